"""The workers of a run as seen from one of them: exchanges between them, and failure that reaches everyone.

An exchange is matched by its tag, never by arrival: two workers that come with different tags both get a
MismatchError that names both. Every wait ends: with what was awaited, with the error of a worker that failed or died,
or with a SilenceError after the timeout.

Under a supervisor the workers of a run may change. Those of one *generation* stay the same; when one of them fails,
everyone leaves, and enters the next generation when the supervisor has said who is in it. Without one, a group that has
failed stays failed.
"""

import json
import os
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from evenstep.core import points
from evenstep.core.errors import Dismissed, MismatchError, PeerError, SilenceError
from evenstep.core.events import Event, send
from evenstep.core.identity import check_not_a_copy
from evenstep.exchange import generations
from evenstep.exchange.board import Board
from evenstep.exchange.generations import Generation
from evenstep.exchange.liveness import Liveness, spin_count
from evenstep.native import core
from evenstep.plan import tree
from evenstep.transport.segment import Segment

__all__ = ["SUMMABLE", "Group", "tree_sum"]

_SLICE_NS = 50_000_000  # how long the C core sleeps before we look whether the peer is still alive
_PATIENCE_S = 60.0  # how much longer than any worker the supervisor may take
_JSON_BYTES = 2048  # what fits is exchanged in one go
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_SUM = 0
SUMMABLE = tuple(_DTYPES)
"""What a tree sum can add."""


class Group:
    """The workers of a run in its present generation.

    Attributes:
        worker: The number of this worker, for as long as it lives.
        members: The workers of this generation, in order.
        rank: The place of this worker among them.
        num_workers: How many they are.
        weights: How much each of them shall do, where the user has said so.
        generation: Counts the changes; 0 before the first generation.
        left: Whether this worker has to enter the next generation before it can exchange anything.
        elastic: Whether there is a supervisor who replaces workers.
        waited_s: How long this worker has waited for others in all.
    """

    def __init__(self, segment: Segment, worker: int, timeout_s: float, events_fd: int | None = None) -> None:
        """Take the place of a worker.

        Args:
            segment: Shared by all.
            worker: Which place.
            timeout_s: How long any wait for another worker may take.
            events_fd: Where a supervisor listens. None: there is none, and the workers are all who have a place.
        """
        self.segment = segment
        self.worker = worker
        self.timeout_s = timeout_s
        self.board = Board(segment)
        self.elastic = events_fd is not None
        self._events_fd = events_fd
        self._round = 0  # exchanges of all workers so far
        self._inner = 0  # exchanges among some of them since
        self._liveness = Liveness()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._failed = False
        self.waited_s = 0.0
        self._pid = os.getpid()
        core.set_pid(segment.base, worker, self._pid)
        self.generation, self.left = 0, True
        self.members: list[int] = [worker]
        self.weights: list[float] | None = None
        self.rank, self.num_workers = 0, 1
        if not self.elastic:
            self._take(Generation(1, 0, list(range(segment.num_workers)), None))

    def enter(self) -> None:
        """Wait until the supervisor has said who the workers are from now on, and be one of them.

        Raises:
            Dismissed: This worker is not needed any more.
            SilenceError: The supervisor said nothing.
        """
        assert self._events_fd is not None, "only a supervisor changes the workers"
        seen = generations.latest(self.segment)
        self.tell({"waits": self.generation})
        deadline = time.monotonic() + 2 * self.timeout_s + _PATIENCE_S
        while True:
            found = generations.wait(self.segment, seen, _SLICE_NS)
            if found is not None:
                if self.worker in found.members:
                    return self._take(found)
                if self.worker in found.dismissed:
                    raise Dismissed
                seen = found.number
            elif time.monotonic() > deadline:
                raise SilenceError(f"worker {self.worker} was let in by nobody: the supervisor says nothing")

    def _take(self, generation: "Generation") -> None:
        self.generation, self.left = generation.number, False
        self.members, self.weights = generation.members, generation.weights
        self.rank, self.num_workers = self.members.index(self.worker), len(self.members)
        self._round, self._inner = generation.round, 0
        self._liveness.close()  # a place may have another process now
        self._spin = spin_count(self.num_workers)

    def leave(self) -> None:
        """Take part in no exchange any more until the next generation.

        Raises:
            PeerError: This worker itself has failed: it is not let in again.
        """
        if self._failed:
            raise self._peer_error()
        self.left = True

    def check_process(self) -> None:
        """See that this process is the worker.

        Raises:
            ConfigError: It is a forked copy of it.
        """
        check_not_a_copy(self._pid, f"worker {self.worker}")

    @property
    def exchanges(self) -> int:
        """A number that grows with every exchange of all workers, over all generations, alike on all."""
        return self._round

    def gather(
        self, tag: str, rows: Tensor, shares: Sequence[int] | None = None, *, everyone: bool | None = None
    ) -> Tensor:
        """Offer this worker's rows; return everyone's, in rank order.

        Blocks until all who take part have offered theirs. What does not fit into a slot goes in several pieces, and
        no wait for a piece takes longer than `timeout_s`.

        Args:
            tag: What this exchange is; must be the same on all workers that take part.
            rows: A contiguous CPU tensor [rows of this worker, n]; n and dtype alike on all.
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
        """Gather everyone's rows, ours too, to an address."""
        mine = rows.contiguous()
        layout, most = _layout(tuple(counts), rows.shape[1] * rows.element_size(), everyone)
        num_bytes = mine.numel() * mine.element_size()
        step = self.segment.slot_bytes
        if most <= step:
            self._exchange(tag, mine.data_ptr(), num_bytes, layout, place, everyone)
            return
        num_pieces = -(-most // step)
        for piece in range(num_pieces):
            start = piece * step
            here = [(rank, at + start, min(max(theirs - start, 0), step)) for rank, at, theirs in layout]
            mine_here = min(max(num_bytes - start, 0), step)
            name = f"{tag} ({piece + 1} of {num_pieces})"
            self._exchange(name, mine.data_ptr() + start, mine_here, here, place, everyone)

    def _exchange(
        self, tag: str, mine: int, num_bytes: int, layout: Sequence[tuple[int, int, int]], place: int, everyone: bool
    ) -> None:
        """Post what fits into a slot, and collect from everyone in the layout."""
        self.check_process()
        if self._failed and self.num_workers > 1:  # a script that goes on all the same must not be met by anybody
            raise self._peer_error()
        if everyone:
            self._round, self._inner = self._round + 1, 0
        else:
            self._inner += 1
        seq = self._round << 32 | self._inner
        core.post(self.segment.base, self.worker, seq, tag, mine, num_bytes)
        points.reach("exchange")
        deadline = time.monotonic() + self.timeout_s
        for rank, at, theirs in layout:
            self._collect(self.members[rank], seq, tag, place + at, theirs, deadline)

    def gather_blobs(self, tag: str, mine: Tensor, active: Sequence[bool]) -> list[Tensor]:
        """Offer bytes [n] of any number but 0; return those of all active workers. Only these take part."""
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

    def barrier(self, tag: str) -> None:
        """Wait until all workers have come here."""
        self.gather(tag, torch.zeros(1, 1))

    def _collect(self, worker: int, seq: int, tag: str, address: int, num_bytes: int, deadline: float) -> None:
        """The one place that waits for another worker."""
        base, rc = self.segment.base, core.ES_AGAIN
        waits, begin = False, time.monotonic()
        try:
            while rc != core.ES_OK:
                rc = core.collect(base, worker, seq, tag, address, num_bytes, self._spin, _SLICE_NS)
                if rc == core.ES_ABORTED:
                    raise self._peer_error()
                if rc == core.ES_MISMATCH:
                    raise self._mismatch(worker, tag, num_bytes)
                if rc == core.ES_AGAIN:
                    if not waits:
                        self.board.waits(self.worker, waits := True)
                    self._check_alive(worker)
                    if time.monotonic() > deadline:
                        self._is_silent(worker, tag)
        finally:
            self.waited_s += time.monotonic() - begin
            if waits:
                self.board.waits(self.worker, False)

    def _is_silent(self, worker: int, tag: str) -> NoReturn:
        text = (
            f"{self._describe(worker)} said nothing for {self.timeout_s:g} s: worker {self.worker} waits for "
            f"it at '{tag}', its last exchange was '{self._last_tag(worker)}'; look at what it does, or raise "
            "Run(timeout_s=...)"
        )
        if self._events_fd is None:
            raise SilenceError(text)
        self.tell({"silent": worker, "text": text})
        core.abort_all(self.segment.base, self.worker, worker, text)
        raise self._peer_error()

    def _describe(self, worker: int) -> str:
        pid = core.pid(self.segment.base, worker)
        return f"worker {worker} (pid {pid})" if pid else f"worker {worker} (which has not joined yet)"

    def _last_tag(self, worker: int) -> str:
        return core.last_post(self.segment.base, worker)[2] or "none"

    def _mismatch(self, worker: int, tag: str, num_bytes: int) -> MismatchError:
        _, their_bytes, theirs, _ = core.last_post(self.segment.base, worker)
        here = f"worker {self.worker} is at '{tag}' with {num_bytes} bytes"
        return MismatchError(
            f"{here} but worker {worker} is at '{theirs}' with {their_bytes} bytes: all workers must run the same "
            "script on the same model; look for a branch that depends on the worker, the time or unseeded randomness"
        )

    def _check_alive(self, worker: int) -> None:
        pid = core.pid(self.segment.base, worker)
        if pid == 0:
            return  # it has not joined yet
        if self._liveness.ended(pid):
            self._is_gone(worker)

    def _is_gone(self, worker: int) -> NoReturn:
        text = (
            f"{self._describe(worker)} ended while worker {self.worker} waited for it; "
            f"its last exchange was '{self._last_tag(worker)}'"
        )
        core.abort_all(self.segment.base, self.worker, worker, text)
        raise self._peer_error()

    def check(self) -> None:
        """For who waits elsewhere than in an exchange.

        Raises:
            PeerError: Another worker failed or died.
        """
        if core.aborted(self.segment.base) is not None:
            raise self._peer_error()

    def _peer_error(self) -> PeerError:
        culprit, text = core.aborted(self.segment.base) or (self.worker, "unknown")
        return PeerError(f"worker {culprit} failed, so worker {self.worker} stops too:\n{text}", culprit)

    def tell(self, event: Event) -> None:
        """Tell the supervisor something, if there is one. A copy of this process has nothing to say."""
        if self._events_fd is not None and os.getpid() == self._pid:
            send(self._events_fd, event)

    def fail(self, text: str) -> None:
        """Tell everyone that this worker failed; the first failure of a group is the one that counts.

        That of a copy of this process does not concern them.
        """
        if os.getpid() != self._pid:
            return
        data = text.encode(errors="backslashreplace")
        if len(data) > core.ES_ERROR_BYTES:  # the end of a traceback says most
            half = core.ES_ERROR_BYTES // 2 - 32
            data = data[:half] + b"\n[... much is left out here ...]\n" + data[-half:]
        self._failed = True
        core.abort_all(self.segment.base, self.worker, self.worker, data)

    def close(self) -> None:
        """Let go of the descriptors."""
        self._liveness.close()
        self.segment.close()


@lru_cache(maxsize=1024)
def _layout(counts: tuple[int, ...], row_bytes: int, everyone: bool) -> tuple[tuple[tuple[int, int, int], ...], int]:
    """(rank, where its rows go, how many bytes they are) for all who take part, and the most bytes of one."""
    places, at = [], 0
    for rank, count in enumerate(counts):
        if count or everyone:
            places.append((rank, at, count * row_bytes))
        at += count * row_bytes
    return tuple(places), max(theirs for _, _, theirs in places)


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
