"""The fixed tree over shards, laid over devices: who holds which shards, and which partial sums move where.

The tree itself is `plan.tree`'s and depends on the number of shards alone. A layout only says where its nodes are
computed: a node lives where its first shard does, so the right child of a node moves to the device of the left one,
unless it is there already. Every layout therefore adds the same numbers in the same order.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from evenstep.core.errors import ConfigError

__all__ = ["Layout", "Move"]

Span = tuple[int, int]


@dataclass(frozen=True)
class Move:
    """A partial sum on its way up: the sum over the shards of a tree node, from one device to another."""

    node: Span
    source: int
    target: int


@dataclass(frozen=True)
class Layout:
    """Which device holds which shards.

    Attributes:
        order: The devices, by the shards they hold.
        spans: The shards [first, last + 1) of each of them, in the same order; together they are all shards.

    Raises:
        ConfigError: A device has no shard, or the spans are not neighbours.
    """

    order: tuple[int, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        ends = [0, *(end for _, end in self.spans)]
        if len(self.order) != len(self.spans) or any(
            first != before or end <= first for before, (first, end) in zip(ends, self.spans, strict=False)
        ):
            raise ConfigError(f"spans {self.spans} of {len(self.order)} devices, expected neighbouring spans from 0 on")

    @property
    def num_shards(self) -> int:
        """How many shards all devices hold together."""
        return self.spans[-1][1]

    def holder(self, shard: int) -> int:
        """The device that holds a shard."""
        return self.order[bisect_right(self.spans, (shard, self.num_shards)) - 1]

    def rounds(self) -> Iterator[list[Move]]:
        """What moves, level by level from the leaves up; the moves of one level can go at the same time."""
        holders = [device for device, (a, b) in zip(self.order, self.spans, strict=True) for _ in range(a, b)]
        width = 1
        while width < self.num_shards:
            moves = []
            for right in range(width, self.num_shards, 2 * width):
                source, target = holders[right], holders[right - width]
                if source != target:
                    moves.append(Move((right, min(right + width, self.num_shards)), source, target))
            yield moves
            width *= 2

    def num_nodes(self, place: int) -> int:
        """How many partial sums remain on the device at a place of the order once it has added what it can."""
        first, end = self.spans[place]
        count = 0
        while first < end:
            width = 1
            while (
                first % (2 * width) == 0
                and first + width < self.num_shards
                and min(first + 2 * width, self.num_shards) <= end
            ):
                width *= 2
            first = min(first + width, self.num_shards)
            count += 1
        return count
