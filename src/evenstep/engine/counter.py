"""The binary counter: adds up the gradients of one worker's shards, parameter by parameter, as far as the tree allows.

It knows nothing of other workers or memory. Gradients may come in any order; each parameter holds about log2 K at once.
A shard that gave no gradient for a parameter is absent from the sum.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from evenstep.plan.summing import Leaves

__all__ = ["Counter"]


class Counter:
    """The counter of one step.

    Args:
        leaves: How shards become nodes.
        num_parameters: How many parameters there are.
        shards: The shards that have samples.
        place: Where to put a finished node of a parameter; None: anywhere.
    """

    def __init__(
        self,
        leaves: Leaves,
        num_parameters: int,
        shards: Collection[int],
        place: Callable[[int, int], Tensor | None],
    ) -> None:
        self._leaves, self._shards, self._place = leaves, set(shards), place
        self._next = [leaves.shards.start] * num_parameters
        self._stacks: list[list[Tensor | None]] = [[] for _ in range(num_parameters)]
        self._waiting: list[dict[int, Tensor | None]] = [{} for _ in range(num_parameters)]

    def go_on(self, leaf: int, stacks: list[list[Tensor | None]]) -> None:
        """Start in the middle, with the sums over the leaves before this one."""
        self._next, self._stacks = [leaf] * len(stacks), stacks

    def nodes(self, i: int) -> list[Tensor | None]:
        """The sums over this worker's nodes, once all shards have come."""
        return self._stacks[i]

    def arrive(self, i: int, shard: int, gradient: Tensor | None) -> bool:
        """Take over a gradient, or note that there is none; return whether its parameter's nodes are now complete."""
        self._waiting[i][shard] = gradient
        return self.advance(i)

    def advance(self, i: int, *, over: bool = False) -> bool:
        """Add what has come, in leaf order; return whether the nodes are now complete (and were not before).

        Args:
            i: The number of the parameter.
            over: Whether no more gradients will come.
        """
        leaf, stop = self._next[i], self._leaves.shards.stop
        if leaf == stop:
            return False
        waiting = self._waiting[i]
        while leaf < stop and (leaf in waiting or over or leaf not in self._shards):
            self._push(i, leaf, waiting.pop(leaf, None))
            leaf += 1
        self._next[i] = leaf
        return leaf == stop

    def _push(self, i: int, leaf: int, gradient: Tensor | None) -> None:
        stack = self._stacks[i]
        merges = self._leaves.merges[leaf - self._leaves.shards.start]
        node = self._leaves.completes.get(leaf)
        place = None if node is None else self._place(i, node)
        entry = gradient
        for m in range(merges):
            left = stack.pop()
            if left is None or entry is None:
                entry = left if entry is None else entry
            elif place is not None and m + 1 == merges:
                entry = torch.add(left, entry, out=place)  # the last sum goes straight to its place
            else:
                entry = left.add_(entry)
        if place is not None and entry is not None and entry is not place:
            entry = place.copy_(entry)
        stack.append(entry)
