"""The workers of a run as seen from one of them: who they are, and what they do together.

Exchanges are matched by tag, never by arrival: two workers that come with different tags both get a MismatchError that
names both. Every wait ends: with what was awaited, with the error of a worker that failed or died, or with a
SilenceError after the timeout.

Under a supervisor the workers of a run may change. Those of one *generation* stay the same; when one of them fails,
everyone leaves, and enters the next generation once the supervisor has said who is in it. Without a supervisor, a group
that has failed stays failed.
"""

import json
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.core import points
from evenstep.core.output import say
from evenstep.exchange.board import Board
from evenstep.exchange.bridged import Bridged, Puts
from evenstep.exchange.generations import Generation
from evenstep.exchange.membership import Fixed, Membership, Supervised
from evenstep.exchange.rounds import Rounds
from evenstep.exchange.slots import Slots
from evenstep.exchange.tracing import Kind, Tracer
from evenstep.native import core
from evenstep.plan import tree
from evenstep.transport.segment import Segment

__all__ = ["SUMMABLE", "Group", "tree_sum"]

_JSON_BYTES = 2048  # values up to this size take one exchange
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_SUM = 0
HOME = 0  # the machine where files are written
SUMMABLE = tuple(_DTYPES)
"""What a tree sum can add."""


class Group:
    """The workers of a run in its current generation.

    Args:
        segment: The memory that the workers of this machine share.
        rounds: What carries their exchanges.
        membership: What says who they are.
        puts: See below.

    Attributes:
        worker: The number of this worker, which never changes.
        members: The workers of this generation, in order.
        rank: The place of this worker among them.
        num_workers: How many there are.
        weights: How much each of them is to do, if the user has said so.
        keeper: Whether the first of them keeps the state and computes no shard.
        generation: The number of the generation; 0 before the first.
        left: Whether this worker has to enter the next generation before it can exchange anything.
        elastic: Whether a supervisor replaces workers.
        exchanges: How many exchanges of all workers there were, over all generations; the same on all workers.
        machines: The machine that each of them is on, counted from 0 in this generation.
        machine: The machine that this one is on.
        num_machines: How many there are.
        leads: Whether this worker is the first of its machine, which looks after its memory for all of them.
        at_home: Whether it is on the machine where files are written and read.
        puts: The way to the memory of other machines, if there may be any.
        tracer: Records what this worker does when.
    """

    def __init__(self, segment: Segment, rounds: Rounds, membership: Membership, puts: Puts | None = None) -> None:
        self.segment, self.worker, self.elastic = segment, rounds.worker, membership.elastic
        self.board, self.tracer = Board(segment), Tracer(segment, rounds.worker)
        self._rounds, self._membership, self.puts = rounds, membership, puts
        self.exchanges = 0
        self._inner = 0  # exchanges among some workers since the last one among all
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.tell, self.check, self.check_process = membership.tell, rounds.check, rounds.check_process
        self.fail, self.close = rounds.fail, rounds.close
        self.generation, self.left = 0, True
        self.members: list[int] = [self.worker]
        self.weights: list[float] | None = None
        self.keeper = False
        self.rank, self.num_workers = 0, 1
        self.machines, self.machine, self.num_machines, self.leads, self.at_home = [0], 0, 1, True, True
        if membership.first is not None:
            self._take(membership.first)

    @classmethod
    def around(cls, segment: Segment, worker: int, timeout_s: float, events_fd: int | None = None) -> "Group":
        """The workers around one segment.

        Args:
            segment: Shared by all.
            worker: Which of them this process is.
            timeout_s: How long any wait for another worker may take.
            events_fd: Where a supervisor listens. None: there is none, and every place in the segment has a worker.
        """
        if events_fd is None:
            return cls(segment, Slots(segment, worker, timeout_s), Fixed(segment.num_workers))
        supervised = Supervised(segment, worker, events_fd)
        return cls(segment, Slots(segment, worker, timeout_s, supervised.tell), supervised)

    @classmethod
    def across(
        cls,
        segment: Segment,
        worker: int,
        timeout_s: float,
        *,
        events_fd: int | None = None,
        machines: Sequence[int] | None = None,
    ) -> "Group":
        """The workers around the segments of several machines, between which bridges carry what they post.

        Args:
            segment: The segment of this machine.
            worker: Which of all workers this process is.
            timeout_s: How long any wait for another worker may take.
            events_fd: Where a supervisor listens, which says who the workers are.
            machines: Without a supervisor: the machine that each worker is on.
        """
        membership: Membership
        if events_fd is not None:
            membership = supervised = Supervised(segment, worker, events_fd)
            rounds = Bridged(segment, worker, timeout_s, supervised.tell)
        else:
            assert machines is not None, "without a supervisor the caller says who the workers are"
            membership = Fixed(len(machines), machines)
            rounds = Bridged(segment, worker, timeout_s)
        return cls(segment, rounds, membership, Puts(segment, rounds))

    @property
    def timeout_s(self) -> float:
        """How long any wait for another worker may take."""
        return self._rounds.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._rounds.timeout_s = seconds

    @property
    def waited_s(self) -> float:
        """How long this worker has waited for others altogether."""
        return self._rounds.waited_s

    def say(self, text: str) -> None:
        """Say something to the user, through the supervisor if there is one. For one worker."""
        if self.elastic:
            self.tell({"says": text})
        else:
            say(text)

    def enter(self) -> None:
        """Wait until the supervisor has said who the workers are from now on, and become one of them.

        Raises:
            Dismissed: This worker is no longer needed.
            SilenceError: The supervisor said nothing.
        """
        with self.tracer.span(Kind.WAIT, "the next generation"):
            self._take(self._membership.next(self.generation, self.timeout_s))

    def _take(self, generation: Generation) -> None:
        self.generation, self.left = generation.number, False
        self.members, self.weights = generation.members, generation.weights
        self.rank, self.num_workers = self.members.index(self.worker), len(self.members)
        self.keeper = generation.keeper and self.num_workers > 1
        self._members = tuple(self.members)
        named = generation.machines or [0] * self.num_workers
        order = list(dict.fromkeys(named))
        self.machines = [order.index(name) for name in named]
        self.machine, self.num_machines = self.machines[self.rank], len(order)
        self.at_home = named[self.rank] == HOME
        self.leads = self.machines.index(self.machine) == self.rank
        self.exchanges, self._inner = generation.round, 0
        self._rounds.begin(generation)

    def leave(self) -> None:
        """Take part in no more exchanges until the next generation.

        Raises:
            PeerError: This worker itself has failed, and is not admitted again.
        """
        self._rounds.leave()
        self.left = True

    def gather(
        self, tag: str, rows: Tensor, shares: Sequence[int] | None = None, *, everyone: bool | None = None
    ) -> Tensor:
        """Offer this worker's rows; return everyone's, in rank order.

        Blocks until all participants have offered theirs. What does not fit into a slot goes in several pieces, and no
        wait for a piece takes longer than `timeout_s`.

        Args:
            tag: What this exchange is; must be the same on all workers that take part.
            rows: A contiguous CPU tensor [rows of this worker, n]; n and dtype are the same on all.
            shares: How many rows each worker offers. None: each offers as many as this one.
            everyone: Whether workers that offer no rows take part too, to receive those of the others. If not, they
                must not call this. Between two exchanges in which everyone takes part, the others are all among the
                same workers. None: only if no shares are given.

        Raises:
            MismatchError: Another worker is at another exchange.
            PeerError: Another worker failed or died.
            SilenceError: Another worker did not come within the timeout.
        """
        everyone = shares is None if everyone is None else everyone
        counts = [len(rows)] * self.num_workers if shares is None else shares
        out = rows.new_empty((sum(counts), rows.shape[1]))
        self._gather_into(out.data_ptr(), tag, rows, counts, everyone)
        return out

    def sum(self, tag: str, rows: Tensor, shares: Sequence[int], *, everyone: bool = False) -> Tensor:
        """Offer one row [rows of this worker, n] for each shard; return their tree sum [n], the same on all workers.

        The arguments are those of `gather`.
        """
        num_rows, size = sum(shares), rows.shape[1]
        row_bytes = size * rows.element_size()
        if self._scratch.numel() < num_rows * row_bytes:
            self._scratch = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
        first = self._scratch.data_ptr()
        self._gather_into(first, tag, rows, shares, everyone)
        out = rows.new_empty(size)
        places = tuple(range(first, first + num_rows * row_bytes, row_bytes))
        core.tree_reduce(_DTYPES[rows.dtype], _SUM, places, tree.leaf_program(num_rows), out.data_ptr(), size)
        return out

    def _gather_into(self, place: int, tag: str, rows: Tensor, counts: Sequence[int], everyone: bool) -> None:
        """Gather everyone's rows, including ours, at an address."""
        mine = rows.contiguous()
        layout = _layout(tuple(counts), self._members, rows.shape[1] * rows.element_size(), everyone)
        num_bytes = mine.numel() * mine.element_size()
        step = self._rounds.most_bytes
        if layout.most_bytes <= step:
            self._exchange(tag, mine.data_ptr(), num_bytes, layout, place, everyone)
            return
        num_pieces = -(-layout.most_bytes // step)
        for piece in range(num_pieces):
            start = piece * step
            here = layout.cut(start, step)
            mine_here = min(max(num_bytes - start, 0), step)
            name = f"{tag} ({piece + 1} of {num_pieces})"
            self._exchange(name, mine.data_ptr() + start, mine_here, here, place, everyone)

    def _exchange(self, tag: str, mine: int, num_bytes: int, layout: "_Layout", place: int, everyone: bool) -> None:
        """Make one post, and collect from everyone in the layout."""
        self.check_process()
        if everyone:
            self.exchanges, self._inner = self.exchanges + 1, 0
        else:
            self._inner += 1
        seq = self.exchanges << 32 | self._inner
        collect = self._traced_collect if self.tracer.on else self._rounds.collect
        with self.tracer.span(Kind.EXCHANGE, tag):
            self._rounds.post(seq, tag, mine, num_bytes, layout.workers)
            points.reach("exchange")
            deadline = time.monotonic() + self._rounds.timeout_s
            for worker, at, theirs in zip(layout.workers, layout.places, layout.sizes, strict=True):
                collect(worker, seq, tag, place + at, theirs, deadline)

    def _traced_collect(self, worker: int, seq: int, tag: str, place: int, num_bytes: int, deadline: float) -> None:
        begin_ns = time.monotonic_ns()
        try:
            self._rounds.collect(worker, seq, tag, place, num_bytes, deadline)
        finally:
            if worker != self.worker:
                self.tracer.waited(begin_ns, worker)

    def gather_blobs(self, tag: str, mine: Tensor, active: Sequence[bool]) -> list[Tensor]:
        """Offer at least one byte [n]; return those of all active workers. Only these take part."""
        found = self.gather(f"{tag} (sizes)", torch.tensor([[len(mine)]]), [int(here) for here in active])
        sizes = [int(size) for size in found]
        told = iter(sizes)
        rows = self.gather(tag, mine.unsqueeze(1), [next(told) if here else 0 for here in active])
        return list(torch.split(rows[:, 0], sizes))

    def gather_json(self, tag: str, value: Any) -> list[Any]:
        """Offer a JSON value of any size; return everyone's in rank order. All workers take part."""
        text = json.dumps(value).encode()
        head = len(text).to_bytes(8, "little") + text[: _JSON_BYTES - 8]
        first = self._gather_bytes(tag, head, _JSON_BYTES)
        sizes = [int.from_bytes(row[:8], "little") for row in first]
        rest: list[bytes] = [b""] * self.num_workers
        more = max(sizes) - (_JSON_BYTES - 8)
        if more > 0:
            rest = self._gather_bytes(f"{tag} (rest)", text[_JSON_BYTES - 8 :], more)
        return [json.loads((a[8:] + b)[:n]) for a, b, n in zip(first, rest, sizes, strict=True)]

    def _gather_bytes(self, tag: str, value: bytes, num_bytes: int) -> list[bytes]:
        row = torch.frombuffer(bytearray(value.ljust(num_bytes, b"\0")), dtype=torch.uint8)
        found = self.gather(tag, row.unsqueeze(0)).numpy().tobytes()
        return [found[start : start + num_bytes] for start in range(0, len(found), num_bytes)]

    def from_one(self, tag: str, rank: int, data: bytes) -> bytes:
        """Give everyone the bytes of one worker; the others offer nothing. All workers take part."""
        mine = data if rank == self.rank else b""
        size = int(self.gather(f"{tag} (size)", torch.tensor([[len(mine)]]))[rank])
        row = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8).view(-1, 1)[: len(mine)]
        shares = [size if other == rank else 0 for other in range(self.num_workers)]
        return self.gather(tag, row, shares, everyone=True).numpy().tobytes() if size else b""

    def gather_bytes(self, tag: str, data: bytes) -> list[bytes]:
        """Offer any number of bytes; return everyone's in rank order. All workers take part."""
        sizes = [int(size) for size in self.gather(f"{tag} (sizes)", torch.tensor([[len(data)]]))]
        row = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).view(-1, 1)[: len(data)]
        found = self.gather(tag, row, sizes, everyone=True).numpy().tobytes() if any(sizes) else b""
        ends = list(accumulate(sizes))
        return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def follow_leader(self, tag: str) -> None:
        """Wait until the first worker of this machine, which waits for nobody, has come here. All workers take part."""
        self._inner += 1
        seq = self.exchanges << 32 | self._inner
        here = [worker for worker, machine in zip(self.members, self.machines, strict=True) if machine == self.machine]
        if self.leads:
            self._rounds.post(seq, tag, 0, 0, here)
        else:
            with self.tracer.span(Kind.EXCHANGE, tag):
                self._rounds.follow(here[0], seq, tag, time.monotonic() + self.timeout_s)

    def barrier(self, tag: str) -> None:
        """Wait until all workers have come here."""
        self.gather(tag, torch.zeros(1, 1))


class _Layout(NamedTuple):
    """Who takes part in an exchange, where the rows of each go, how many bytes each has, and the maximum of these."""

    workers: tuple[int, ...]
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    most_bytes: int

    def cut(self, start: int, num_bytes: int) -> "_Layout":
        """The piece of everyone's rows that begins at a byte."""
        places = tuple(at + start for at in self.places)
        sizes = tuple(min(max(theirs - start, 0), num_bytes) for theirs in self.sizes)
        return _Layout(self.workers, places, sizes, num_bytes)


@lru_cache(maxsize=1024)
def _layout(counts: tuple[int, ...], members: tuple[int, ...], row_bytes: int, everyone: bool) -> _Layout:
    ends = list(accumulate(counts))
    parts = [
        (worker, (end - count) * row_bytes, count * row_bytes)
        for worker, end, count in zip(members, ends, counts, strict=True)
        if count or everyone
    ]
    workers, places, sizes = zip(*parts, strict=True)
    return _Layout(workers, places, sizes, max(sizes))


def tree_sum(inputs: Sequence[Tensor], program: bytes, out: Tensor) -> Tensor:
    """Sum dense CPU tensors of one shape in the order of a stack program (see `plan.tree`) into `out`.

    Args:
        inputs: One or more tensors, laid out alike.
        program: Merges after each of them.
        out: Where the sum goes; may be one of the inputs.
    """
    dtype, count = out.dtype, out.numel()
    if dtype.is_complex:
        dtype, count = (torch.float32 if dtype == torch.complex64 else torch.float64), 2 * count
    core.tree_reduce(_DTYPES[dtype], _SUM, tuple(t.data_ptr() for t in inputs), program, out.data_ptr(), count)
    return out
