"""The results of the parts of a batch in an evaluation, joined as if the batch had not been cut."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import nested_concat

from evenstep.engine.results import Mean, add

__all__ = ["joined", "mean", "weight_of"]

_IGNORED = -100  # the label of what is not to be learned, and the padding of outputs


def weight_of(inputs: Mapping[str, Any], *, shifted: bool) -> int:
    """What the loss of a part is a mean over: how many labels it has or, if it has none, how many samples.

    Args:
        inputs: The part.
        shifted: Whether the first label of every row is not a target, as in causal language models.
    """
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and shifted:
            labels = labels[..., 1:]
    return int(labels.ne(_IGNORED).sum()) if isinstance(labels, Tensor) else len(next(iter(inputs.values())))


def mean(values: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    """The weighted mean of the parts' losses, in the order of the tree; None if they have none."""
    if any(value is None for value in values):
        return None
    means = {n: Mean(float(v) * w if w else 0.0, w) for n, (v, w) in enumerate(zip(values, weights, strict=True))}  # type: ignore[arg-type]  # none is None
    first: Tensor = values[0]  # type: ignore[assignment]  # likewise
    return torch.tensor(add(means, len(means)).value, dtype=first.dtype)


def joined(values: Sequence[Any]) -> Any:
    """Rows of all parts, padded to the longest."""
    return reduce(lambda ours, theirs: nested_concat(ours, theirs, padding_index=_IGNORED), values)
