"""How the gradients of single shards become sums: who adds up which parameter, in which buckets, by which programs.

A pure value. Every worker adds up its own shards as far as the tree allows, which leaves it with the tree *nodes* that
cover its span; the nodes of all workers, from left to right, are added up by one worker for each parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.plan import tree
from evenstep.plan.placement import balance

__all__ = ["BUCKET_BYTES", "Leaves", "Span", "Summing", "buckets_of", "plan_nodes", "plan_summing"]

Span = tuple[int, int]
BUCKET_BYTES = 1 << 20


@dataclass(frozen=True)
class Leaves:
    """How the shards of one worker become its nodes.

    Attributes:
        shards: The shards.
        merges: How many additions follow each of them.
        completes: The node that is complete after a shard, for shards that complete one.
        nodes: The spans of the nodes.
    """

    shards: range
    merges: bytes
    completes: dict[int, int]
    nodes: tuple[Span, ...]

    @classmethod
    def of(cls, span: Span, num_shards: int) -> "Leaves":
        """The leaves of a worker that has this span of all shards."""
        shards, nodes = range(*span), tree.cover(span, num_shards)
        merges = tree.merge_program(tuple((k, k + 1) for k in shards), num_shards)
        return cls(shards, merges, {end - 1: n for n, (_, end) in enumerate(nodes)}, nodes)


@dataclass(frozen=True)
class Summing:
    """The plan of one worker.

    Attributes:
        rank: This worker.
        owners: The worker that adds up and updates each parameter; None: nobody here does.
        buckets: Parameters that travel together, in the order in which backward reaches them.
        bucket_of: The bucket of each parameter.
        leaves: How this worker's shards become nodes.
        nodes: The nodes of all workers as (rank, its node), from left to right.
        program: The stack program that adds them up.
    """

    rank: int
    owners: tuple[int | None, ...]
    buckets: tuple[tuple[int, ...], ...]
    bucket_of: tuple[int, ...]
    leaves: Leaves
    nodes: tuple[tuple[int, int], ...]
    program: bytes

    @property
    def owned(self) -> list[int]:
        """The parameters of this worker."""
        return [i for i, owner in enumerate(self.owners) if owner == self.rank]

    @property
    def owned_buckets(self) -> list[int]:
        """The buckets of this worker, in order."""
        return [b for b, bucket in enumerate(self.buckets) if self.owners[bucket[0]] == self.rank]


def plan_summing(
    sizes: Sequence[int],
    spans: Sequence[Span],
    rank: int,
    parts: Sequence[Sequence[int]] | None = None,
    *,
    whole: bool = False,
    num_shards: int | None = None,
) -> Summing:
    """Share out parameters among the workers.

    Args:
        sizes: The bytes of every parameter.
        spans: The shards of each worker; together all shards.
        rank: Which worker this plan is for.
        parts: Which parameters travel together, where that is given; empty ones are ignored.
        whole: Whether all parameters go to one worker, which must see them together.
        num_shards: How many shards there are in all, if these workers have only some of them: then the program
            leaves several sums. None: they have all.
    """
    num_shards = spans[-1][1] if num_shards is None else num_shards
    if parts is None:
        owners = balance(sizes, 1 if whole else len(spans))
        buckets = _buckets(sizes, owners, BUCKET_BYTES)
    else:
        filled = [tuple(part) for part in parts if part]
        of_parts = balance([sum(sizes[i] for i in part) for part in filled], 1 if whole else len(spans))
        owner_of = {i: owner for part, owner in zip(filled, of_parts, strict=True) for i in part}
        owners = [owner_of[i] for i in range(len(sizes))]
        buckets = filled
    leaves = [Leaves.of(span, num_shards) for span in spans]
    nodes = tuple((worker, n) for worker, theirs in enumerate(leaves) for n in range(len(theirs.nodes)))
    program = tree.merge_program(tuple(node for theirs in leaves for node in theirs.nodes), num_shards)
    return Summing(rank, tuple(owners), tuple(buckets), _bucket_of(buckets), leaves[rank], nodes, program)


def plan_nodes(sizes: Sequence[int], span: Span, num_shards: int, *, add: bool) -> Summing:
    """The plan of a worker that is alone with some of the shards.

    Args:
        sizes: The bytes of every parameter.
        span: Its shards.
        num_shards: How many there are in all.
        add: Whether to add its nodes up, from left to right; otherwise they stay, to be added up elsewhere.
    """
    leaves = Leaves.of(span, num_shards)
    buckets = (tuple(range(len(sizes))),)
    nodes = tuple((0, n) for n in range(len(leaves.nodes)))
    program = bytes(min(n, 1) for n in range(len(nodes)))
    owners = (0 if add else None,) * len(sizes)
    return Summing(0, owners, buckets, _bucket_of(buckets), leaves, nodes, program)


def buckets_of(sizes: Sequence[int], most_bytes: int) -> list[tuple[int, ...]]:
    """Parameters that travel together whatever their owners, in the order in which backward reaches them.

    Args:
        sizes: The bytes of every parameter.
        most_bytes: How large a bucket of several may be.
    """
    return _buckets(sizes, [0] * len(sizes), most_bytes)


def _bucket_of(buckets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found = {i: b for b, bucket in enumerate(buckets) for i in bucket}
    return tuple(found[i] for i in range(len(found)))


def _buckets(sizes: Sequence[int], owners: Sequence[int], most_bytes: int) -> list[tuple[int, ...]]:
    """Parameters with one owner together, in the order in which backward reaches them."""
    buckets: list[list[int]] = []
    filled: list[int] = []
    open_bucket: dict[int, int] = {}
    for i in reversed(range(len(sizes))):
        b = open_bucket.get(owners[i])
        if b is None or filled[b] + sizes[i] > most_bytes:
            b = open_bucket[owners[i]] = len(buckets)
            buckets.append([])
            filled.append(0)
        buckets[b].append(i)
        filled[b] += sizes[i]
    return [tuple(bucket) for bucket in buckets]
