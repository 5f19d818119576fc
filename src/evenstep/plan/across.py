"""How gradients are added up over machines: who owns what on each, and which of them adds up what. A pure value.

Each machine adds up its own shards, which leaves it with the tree nodes that cover its span, and updates all parameters
for itself. In between, every *piece* of the gradients has a *home*: the machine that adds up the nodes of all and sends
the sum to the others. If there are only two nodes, every machine is the home of everything: the two that have them send
each other as many bytes as if they shared out the pieces, and nobody waits for a sum. Parameters travel in buckets,
alike on all machines; a large one is cut into several pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.plan import tree
from evenstep.plan.machines import machine_spans
from evenstep.plan.placement import balance
from evenstep.plan.summing import Span, Summing, buckets_of, plan_summing

__all__ = ["EVERY", "Across", "Piece", "most_pieces", "plan_across"]

EVERY = -1
"""As a home: every machine adds up the piece for itself."""

_ALIGNMENT = 64
_MOST_BYTES = 9 << 18  # of a piece: every message costs, and larger ones would hold up those behind them
_LEAST_BYTES = 9 << 15  # a little more than a power of two, so that a matrix and its bias travel together
_TINY_BYTES = 5 << 18  # if one or two machines send, up to this much is one piece, and up to twice as much two:
_SMALL_BYTES = 5 << 19  # a message costs more than waiting for the last gradient
_PIECES_EACH = 8  # how many pieces each machine should have at least, so that their shares are nearly equal


@dataclass(frozen=True)
class Piece:
    """A part of the gradients that is added up at once.

    Attributes:
        bucket: The bucket it is a piece of.
        home: The machine that adds it up, or EVERY one of them.
        begin: Its first byte among those of the bucket.
        end: One past its last byte.
        parameters: The parameters in it; if it is a part of one, that one.
    """

    bucket: int
    home: int
    begin: int
    end: int
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class Across:
    """The plan of one worker.

    Attributes:
        machine: The machine it is on.
        local: How the workers of this machine add up its shards; ranks are counted among them.
        offsets: Where each parameter begins among the bytes of its bucket.
        bucket_bytes: How many bytes each bucket has.
        pieces: All pieces.
        pieces_of: The numbers of each bucket's pieces.
        nodes: The nodes of all machines, from left to right, with the machine of each.
        program: The stack program that adds them up.
        workers: The ranks of this machine's workers among all.
        parts: The nodes of this machine's workers, from left to right.
        machines: The machine that each worker is on.
    """

    machine: int
    local: Summing
    offsets: tuple[int, ...]
    bucket_bytes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    pieces_of: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, Span], ...]
    program: bytes
    workers: range
    parts: tuple[Span, ...]
    machines: tuple[int, ...]

    def inputs_of(self, node: Span) -> tuple[list[int], bytes]:
        """Which of the local workers' nodes make up a node of this machine, and how they are added up."""
        inside = [n for n, (first, end) in enumerate(self.parts) if node[0] <= first and end <= node[1]]
        return inside, tree.merge_program(tuple(self.parts[n] for n in inside), self.num_shards)

    @property
    def num_shards(self) -> int:
        """How many shards there are in all."""
        return self.nodes[-1][1][1]

    @property
    def own(self) -> list[int]:
        """The numbers of this machine's nodes."""
        return [n for n, (machine, _) in enumerate(self.nodes) if machine == self.machine]


def plan_across(
    sizes: Sequence[int], spans: Sequence[Span], rank: int, machines: Sequence[int], *, whole: bool = False
) -> Across:
    """Plan for one worker.

    Args:
        sizes: The bytes of every parameter.
        spans: The shards of each worker; together all shards.
        rank: Which worker this plan is for.
        machines: On which machine each worker is.
        whole: Whether one worker of each machine updates all parameters, because it must see them together.
    """
    num_shards, here = spans[-1][1], machines[rank]
    workers = range(machines.index(here), machines.index(here) + machines.count(here))
    covers = [tree.cover(span, num_shards) for span in machine_spans(spans, machines)]
    piece_bytes = _piece_bytes(sizes, sum(bool(cover) for cover in covers))
    buckets = buckets_of(sizes, piece_bytes)
    mine = [spans[worker] for worker in workers]
    local = plan_summing(sizes, mine, rank - workers.start, buckets, whole=whole, num_shards=num_shards)
    offsets = [0] * len(sizes)
    bucket_bytes = []
    for bucket in buckets:
        end = 0
        for i in bucket:
            offsets[i], end = end, end + _aligned(sizes[i])
        bucket_bytes.append(end)
    cut = [(b, begin, end) for b, size in enumerate(bucket_bytes) for begin, end in _cut(size, piece_bytes)]
    nodes = tuple((machine, node) for machine, cover in enumerate(covers) for node in cover)
    homes = [EVERY] * len(cut)
    if len(nodes) > 2:
        homes = balance([end - begin for _, begin, end in cut], 1 + max(machines))
    pieces = [Piece(b, home, begin, end, buckets[b]) for (b, begin, end), home in zip(cut, homes, strict=True)]
    of_buckets = tuple(tuple(n for n, piece in enumerate(pieces) if piece.bucket == b) for b in range(len(buckets)))
    return Across(
        here,
        local,
        tuple(offsets),
        tuple(bucket_bytes),
        tuple(pieces),
        of_buckets,
        nodes,
        tree.merge_program(tuple(node for _, node in nodes), num_shards),
        workers,
        tuple(node for span in mine for node in tree.cover(span, num_shards)),
        tuple(machines),
    )


def most_pieces(sizes: Sequence[int]) -> int:
    """How many pieces there can be of the gradients of parameters, on any number of machines."""
    least = _piece_bytes(sizes, None)
    return sum(len(_cut(sum(_aligned(sizes[i]) for i in bucket), least)) for bucket in buckets_of(sizes, least))


def _piece_bytes(sizes: Sequence[int], num_machines: int | None) -> int:
    """How large a piece is if so many machines have nodes; None: at least, however many have.

    What a machine sends grows with what it adds up, unless only one or two have nodes: then it is the same anyway.
    """
    total = sum(sizes)
    least = min(max(total // 256, _LEAST_BYTES), _MOST_BYTES)
    if num_machines is None:
        return least
    if num_machines <= 2 and total <= _SMALL_BYTES:
        return max(total if total <= _TINY_BYTES else total // 2 + total // 16, least)
    return min(max(total // (_PIECES_EACH * max(num_machines - 1, 1)), least), _MOST_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _cut(size: int, piece_bytes: int) -> list[tuple[int, int]]:
    """The pieces of a bucket; only a bucket of one parameter that is too large has more than one."""
    piece_bytes = _aligned(piece_bytes)
    if size <= 2 * piece_bytes:
        return [(0, size)]
    return [(begin, min(begin + piece_bytes, size)) for begin in range(0, size, piece_bytes)]
