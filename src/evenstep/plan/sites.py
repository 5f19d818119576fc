"""Which workers are around which memory.

A *site* is a set of workers around one memory that holds the whole committed state: a machine, or a GPU. Within a site
owners share out the update; every site steps for itself, on the same sums.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Sites"]

T = TypeVar("T")


@dataclass(frozen=True)
class Sites:
    """The sites of a generation, as one worker sees them.

    Attributes:
        rank: This worker.
        members: The ranks of each site, in order.
    """

    rank: int
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rank: int, places: Sequence[Hashable]) -> "Sites":
        """Workers with equal places are one site; sites come in the order of their first workers."""
        found: dict[Hashable, list[int]] = {}
        for worker, place in enumerate(places):
            found.setdefault(place, []).append(worker)
        return cls(rank, tuple(tuple(ranks) for ranks in found.values()))

    @property
    def mine(self) -> tuple[int, ...]:
        """The workers of this worker's site."""
        return next(ranks for ranks in self.members if self.rank in ranks)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of its site, which changes what nobody owns."""
        return self.mine[0] == self.rank

    @property
    def are_one(self) -> bool:
        """Whether there is only one site."""
        return len(self.members) == 1

    def for_each_rank(self, of_sites: Sequence[T]) -> list[T]:
        """For every worker, the item of its site."""
        found = {rank: value for ranks, value in zip(self.members, of_sites, strict=True) for rank in ranks}
        return [found[rank] for rank in range(len(found))]

    def takes(self, source: int, only: Collection[int] | None = None) -> bool:
        """Whether this worker takes a copy, for its site, of what a worker of another site has.

        Args:
            source: The rank of that worker.
            only: The numbers of the sites that need it; None: all.
        """
        needs = only is None or self.members.index(self.mine) in only
        return self.is_first and source not in self.mine and needs

    def first_shards(self, spans: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[int | None]:
        """The first shard with samples of each site; None: it has none.

        Args:
            spans: The shards of each worker.
            sizes: The number of samples of every shard.
        """
        found: list[int | None] = []
        for ranks in self.members:
            shards = [k for rank in ranks for k in range(*spans[rank]) if sizes[k]]
            found.append(min(shards) if shards else None)
        return found
