"""The tokens of a batch, counted part by part: what transformers reports as tokens seen and operations done."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

__all__ = ["TokenCount"]


class TokenCount(NamedTuple):
    """How many tokens there are: all of them, and without padding."""

    all: int = 0
    without_padding: int = 0

    @classmethod
    def of(cls, inputs: Mapping[str, Any], name: str, padding: int | None) -> "TokenCount":
        """Count the tokens of a part.

        Args:
            inputs: The part.
            name: The name of the tokens in it; where there are none, nothing is counted.
            padding: The token that pads, if that is known; a mask in the part says better what is padding.
        """
        tokens, mask = inputs.get(name), inputs.get("attention_mask")
        if tokens is None:
            return cls()
        if mask is not None:
            return cls(tokens.numel(), int(mask.sum()))
        return cls(tokens.numel(), tokens.numel() if padding is None else int((tokens != padding).sum()))

    @classmethod
    def total(cls, counts: Iterable[tuple[int, int]]) -> "TokenCount":
        """The sum of the counts of some parts."""
        return cls(*map(sum, zip(*counts, strict=True)))

    def operations(self, model: nn.Module) -> int:
        """About how many operations training on them takes; 0 for a model that does not say how large it is."""
        count = getattr(model, "num_parameters", None)
        return 6 * self.all * count(exclude_embeddings=True) if count is not None else 0

    def wanted(self, kind: str) -> int:
        """The count that `include_num_input_tokens_seen` asks for: "all", "non_padding" or "no"."""
        return 0 if kind == "no" else self[kind == "non_padding"]
