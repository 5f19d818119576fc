"""Clipping the gradients of a step: every element to a magnitude, then all of them to a norm."""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError

__all__ = ["Clipping", "norms_of", "total_norm", "warn_of_torchs"]

_TORCHS = frozenset({"clip_grad_norm_", "clip_grad_value_"})


def warn_of_torchs(caller: FrameType) -> None:
    """Warn if a function that asks for a step without clipping calls torch's own clipping, which would do nothing."""
    for name in _TORCHS.intersection(caller.f_code.co_names):
        warnings.warn(
            f"{name} is called beside run.step, which leaves no gradients behind, so it clips nothing; use "
            f"run.step(..., {'clip_norm' if name == 'clip_grad_norm_' else 'clip_value'}=...)",
            stacklevel=3,
        )


@dataclass(frozen=True)
class Clipping:
    """The limits of gradients; none by default.

    Attributes:
        norm: Scale all gradients down to this norm, as `torch.nn.utils.clip_grad_norm_` does; infinity only measures.
        value: Clip every element of the gradients to this magnitude.
        order: In which order the norms of gradients are added up, which decides the last bit: that of the models'
            parameters, or that of the optimizer's.

    Raises:
        ConfigError: A limit is negative or not a number, or there is no such order.
    """

    norm: float | None = None
    value: float | None = None
    order: Literal["model", "optimizer"] = "model"

    def __post_init__(self) -> None:
        if self.order not in ("model", "optimizer"):
            raise ConfigError(f"clip_order={self.order!r}, expected 'model' or 'optimizer'")
        for name, limit in (("clip_norm", self.norm), ("clip_value", self.value)):
            if limit is not None and not limit >= 0:
                raise ConfigError(f"{name}={limit}, expected a number of at least 0, or None")

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None

    def clip_elements(self, gradients: Iterable[Tensor]) -> None:
        """Clip every element to the magnitude, if there is one."""
        if self.value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.value, self.value)

    def clip(self, gradients: list[Tensor]) -> Tensor | None:
        """Limit gradients that are all here, without waiting for their device; return their former norm, if limited."""
        if not gradients:
            return None if self.norm is None else torch.tensor(0.0)
        if self.value is not None:
            torch._foreach_clamp_max_(gradients, self.value)
            torch._foreach_clamp_min_(gradients, -self.value)
        if self.norm is None:
            return None
        total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.norm != math.inf:
            torch._foreach_mul_(gradients, torch.clamp(self.norm / (total + 1e-6), max=1.0))
        return total

    def scale_down(self, gradients: Iterable[Tensor], total: Tensor) -> None:
        """Scale gradients whose norm over all workers is `total` down to the limit."""
        assert self.norm is not None, "gradients are scaled only if a norm limits them"
        if self.norm == math.inf:
            return
        scale = torch.clamp(self.norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))


def norms_of(gradients: Mapping[int, Tensor]) -> dict[int, float]:
    """The norm of each gradient, by the number of its parameter."""
    return {i: float(torch.linalg.vector_norm(gradient)) for i, gradient in gradients.items()}


def total_norm(norms: Iterable[Mapping[str, float]], numbers: Iterable[int], dtype: torch.dtype) -> Tensor:
    """The norm over all gradients, whatever their owners.

    Args:
        norms: What `norms_of` gave on each worker, as JSON brings it back.
        numbers: The numbers of all parameters, in the order in which norms are added up.
        dtype: The type to compute it in.
    """
    of_all = {int(i): norm for theirs in norms for i, norm in theirs.items()}
    total: Tensor = torch.linalg.vector_norm(torch.tensor([of_all[i] for i in numbers if i in of_all], dtype=dtype))
    return total
