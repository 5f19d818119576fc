"""The sum of tensors in the order of the tree over shards, as they come: only some of them are kept at a time."""

from torch import Tensor

__all__ = ["TreeSum"]


class TreeSum:
    """Adds up the items of a stack program (see `plan.tree`)."""

    def __init__(self, program: bytes) -> None:
        self._merges = iter(program)
        self._stack: list[Tensor | None] = []

    def push(self, item: Tensor | None) -> None:
        """Take the next item over, and change it in place; None: there is none, and its neighbour stays as it is."""
        self._stack.append(item)
        for _ in range(next(self._merges)):
            right, left = self._stack.pop(), self._stack.pop()
            self._stack.append(
                left.add_(right) if left is not None and right is not None else left if right is None else right
            )

    @property
    def result(self) -> Tensor | None:
        """The sum, when all have come."""
        (total,) = self._stack
        return total
