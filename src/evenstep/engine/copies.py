"""Copies of many tensors at once: a launch for each type, where torch would make one for each tensor."""

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Copier", "Copies"]


class Copies:
    """A copy of many tensors that can be made again and again: the second tensor of each pair goes into the first."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in pairs:
            targets, sources = self._kinds.setdefault((target.dtype, target.device), ([], []))
            targets.append(target)
            sources.append(source)

    @torch.no_grad()
    def make(self) -> None:
        """Copy, in place."""
        for targets, sources in self._kinds.values():
            torch._foreach_copy_(targets, sources)


class Copier:
    """Copies tensors into others, mostly the same as the time before."""

    def __init__(self) -> None:
        self._known: list[Tensor] = []  # held, so that no other tensor can be taken for one of them
        self._copies = Copies(())

    def copy(self, tensors: dict[str, Tensor], to: dict[str, Tensor]) -> None:
        """Copy each tensor into its namesake, in place; one that is its namesake is left alone."""
        asked = [*tensors.values(), *map(to.__getitem__, tensors)]
        if len(asked) != len(self._known) or not all(map(operator.is_, asked, self._known)):
            self._known = asked
            self._copies = Copies((to[name], t) for name, t in tensors.items() if to[name] is not t)
        self._copies.make()
