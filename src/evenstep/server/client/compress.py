"""Sending less: bfloat16, and only the largest elements of a gradient, with the rest kept for later.

What top-k holds back is added to the next gradient, so that the sum of what was sent and what is held equals the sum of
the gradients.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.server.wire.tensors import INDICES, VALUES

__all__ = ["Compressor"]

_WIDE = (torch.float32, torch.float64)


class Compressor:
    """Compresses the updates of one client before it sends them.

    Args:
        bfloat16: Send in bfloat16.
        top_k: Send this share of each tensor's elements, those of the largest magnitude; None for all.

    Attributes:
        residual: What was held back so far, by parameter.

    Raises:
        ConfigError: The share is not between 0 and 1.
    """

    def __init__(self, bfloat16: bool, top_k: float | None) -> None:
        if top_k is not None and not 0 < top_k <= 1:
            raise ConfigError(f"top_k={top_k!r}, expected a fraction above 0 and at most 1, such as 0.01")
        self.bfloat16, self._share = bfloat16, top_k
        self.residual: dict[str, Tensor] = {}

    def pack(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What to send instead of these tensors."""
        if self._share is None and not self.bfloat16:
            return tensors
        packed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if self._share is not None and tensor.dtype in _WIDE and tensor.numel():
                packed[name + INDICES], packed[name + VALUES] = self._largest(name, tensor)
            else:
                packed[name] = self._narrow(tensor)
        return packed

    def _largest(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        assert self._share is not None, "called only if a share is set"
        flat = tensor.reshape(-1)
        whole = flat + self.residual[name] if name in self.residual else flat.clone()
        count = math.ceil(self._share * whole.numel())
        indices = whole.abs().topk(count, sorted=False).indices.sort().values
        values = self._narrow(whole[indices])
        whole[indices] -= values.to(whole.dtype)  # what bfloat16 rounds off is held back too
        self.residual[name] = whole
        return indices, values

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if self.bfloat16 and tensor.dtype in _WIDE else tensor

    def widen(self, tensors: dict[str, Tensor], out: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Parameters as they came, or as float32 if they came in bfloat16; into `out`, if it is given."""
        if not self.bfloat16:
            return tensors
        wide = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}
        return wide if out is None else {name: out[name].detach().copy_(t) for name, t in wide.items()}
