"""Batch norm that activation checkpointing computes again inside backward, where nobody can be met.

What a call found is kept as long as its graph lives, and its recomputation uses it.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.surroundings import Surroundings
from evenstep.nn import passes
from evenstep.nn.passes import Combined, Part

__all__ = ["NormCall", "Recomputed", "recall", "remember"]


@dataclass(eq=False)
class NormCall:
    """One call of one layer by all participants."""

    around: Surroundings
    tag: str
    whole: Combined
    keeps: list[list[Any]]
    ambiguous: bool = False


class Recomputed(torch.autograd.Function):
    """The output again, for the tensors that later operations save; nobody differentiates it."""

    @staticmethod
    def forward(ctx: Any, call: NormCall, activation: str | None, *tensors: Any) -> Tensor:
        """Compute it from what the call found."""
        x, weight, bias, residual = tensors
        return passes.outputs([Part(x, weight, bias, residual, activation)], call.whole)[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Refuse: the first forward's node has the gradients."""
        raise UnsupportedError(
            "synchronized batch norm cannot be recomputed with use_reentrant=True; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


_remembered: WeakKeyDictionary[nn.Module, WeakValueDictionary[bytes, NormCall]] = WeakKeyDictionary()


def remember(layer: nn.Module, own: Tensor, call: NormCall) -> None:
    """Keep what a checkpointed call found for its recomputation; the call lives as long as its joint node.

    The recomputed input has the bits of the first one, so its own statistics find what the call found.
    """
    known = _remembered.setdefault(layer, WeakValueDictionary())
    key = own.cpu().numpy().tobytes()
    other = known.get(key)
    if other is not None and not all(map(torch.equal, other.whole.stats, call.whole.stats)):
        call.ambiguous = True
    known[key] = call


def recall(layer: nn.Module, input: Tensor) -> NormCall | None:
    """The call that is computed again with this input, if there is one.

    Raises:
        UnsupportedError: There are two that could be meant, with different statistics.
    """
    if layer not in _remembered:
        return None
    row = passes.statistics([Part(input.detach(), None, None)])[0]
    call = _remembered[layer].get(row.cpu().numpy().tobytes())
    if call is not None and call.ambiguous:
        raise UnsupportedError(
            f"'{call.tag}' is recomputed in backward, but an earlier call had an input with the same statistics among "
            "others: call backward before the next forward, or do not checkpoint this layer"
        )
    return call
