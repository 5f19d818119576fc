"""Copies of many tensors at once: a launch for each type, where torch would make one for each tensor."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["copy_all"]


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, in place."""
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = kinds.setdefault((target.dtype, target.device), ([], []))
        targets.append(target)
        sources.append(source)
    for targets, sources in kinds.values():
        torch._foreach_copy_(targets, sources)
