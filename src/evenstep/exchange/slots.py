"""Exchanges through the slots of a shared segment: each worker writes its own, and everyone reads them in place.

Every wait ends: with what was awaited, with the error of a worker that failed or died, or after the timeout.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from evenstep.core.errors import MismatchError, PeerError, SilenceError
from evenstep.core.events import Event
from evenstep.core.identity import check_not_a_copy
from evenstep.exchange.board import Board
from evenstep.exchange.generations import Generation
from evenstep.exchange.liveness import Liveness, spin_count
from evenstep.native import core
from evenstep.transport.segment import Segment

__all__ = ["SLICE_NS", "Slots"]

SLICE_NS = 50_000_000
"""How long the C core sleeps before we check whether what is awaited can still come."""


class Slots:
    """The slots of a segment, as one worker sees them: see `Rounds`.

    Args:
        segment: Shared by all workers.
        worker: The worker that this process is.
        timeout_s: How long any wait for another worker may take.
        report: Tells the supervisor of a silent worker, for it to decide. None: there is no supervisor.
    """

    def __init__(
        self, segment: Segment, worker: int, timeout_s: float, report: Callable[[Event], None] | None = None
    ) -> None:
        self.worker, self.timeout_s, self.waited_s = worker, timeout_s, 0.0
        self.most_bytes = segment.slot_bytes
        self._segment, self._base, self._report = segment, segment.base, report
        self._board = Board(segment)
        self._liveness = Liveness()
        self._spin = spin_count(1)
        self._failed = False
        self._pid, self._name = os.getpid(), f"worker {worker}"
        core.set_pid(self._base, worker, self._pid)

    def begin(self, generation: Generation) -> None:
        """See `Rounds`."""
        self._liveness.close()  # a place may have another process now
        self._spin = spin_count(len(generation.members))

    def post(self, seq: int, tag: str, address: int, num_bytes: int, among: Sequence[int]) -> None:
        """See `Rounds`."""
        if self._failed and len(among) > 1:  # nobody may meet a script that carries on regardless
            raise self._peer_error()
        core.post(self._base, self.worker, seq, tag, address, num_bytes)

    def collect(self, worker: int, seq: int, tag: str, address: int, num_bytes: int, deadline: float) -> None:
        """See `Rounds`."""

        def look() -> int:
            return core.collect(self._base, worker, seq, tag, address, num_bytes, self._spin, SLICE_NS)

        if self._await(worker, tag, deadline, look) == core.ES_MISMATCH:
            raise self._mismatch(worker, tag, num_bytes)

    def follow(self, worker: int, seq: int, tag: str, deadline: float) -> None:
        """See `Rounds`."""
        self._await(worker, tag, deadline, lambda: core.follow(self._base, worker, seq, self._spin, SLICE_NS))

    def _await(self, worker: int, tag: str, deadline: float, look: Callable[[], int]) -> int:
        """The one place that waits for another worker: until it has come, however that ended."""
        rc, waits, begin = core.ES_AGAIN, False, time.monotonic()
        try:
            while rc not in (core.ES_OK, core.ES_MISMATCH):
                rc = look()
                if rc == core.ES_ABORTED:
                    raise self._peer_error()
                if rc == core.ES_AGAIN:
                    if not waits:
                        self._board.waits(self.worker, waits := True)
                    self._check_alive(worker)
                    if time.monotonic() > deadline:
                        self._is_silent(worker, tag)
            return rc
        finally:
            self.waited_s += time.monotonic() - begin
            if waits:
                self._board.waits(self.worker, False)

    def _mismatch(self, worker: int, tag: str, num_bytes: int) -> MismatchError:
        _, their_bytes, theirs, _ = core.last_post(self._base, worker)
        here = f"worker {self.worker} is at '{tag}' with {num_bytes} bytes"
        return MismatchError(
            f"{here} but worker {worker} is at '{theirs}' with {their_bytes} bytes: all workers must run the same "
            "script on the same model; look for a branch that depends on the worker, the time or unseeded randomness"
        )

    def _check_alive(self, worker: int) -> None:
        pid = core.pid(self._base, worker)
        if pid == 0 or not self._liveness.ended(pid):  # 0: it has not joined yet
            return
        text = (
            f"{self._describe(worker)} ended while worker {self.worker} waited for it; "
            f"its last exchange was '{self._last_tag(worker)}'"
        )
        core.abort_all(self._base, self.worker, worker, text)
        raise self._peer_error()

    def _is_silent(self, worker: int, tag: str) -> NoReturn:
        text = (
            f"{self._describe(worker)} said nothing for {self.timeout_s:g} s: worker {self.worker} waits for "
            f"it at '{tag}', its last exchange was '{self._last_tag(worker)}'; look at what it does, or raise "
            "Run(timeout_s=...)"
        )
        if self._report is None:
            raise SilenceError(text)
        self._report({"silent": worker, "text": text})
        core.abort_all(self._base, self.worker, worker, text)
        raise self._peer_error()

    def _describe(self, worker: int) -> str:
        pid = core.pid(self._base, worker)
        return f"worker {worker} (pid {pid})" if pid else f"worker {worker} (which has not joined yet)"

    def _last_tag(self, worker: int) -> str:
        return core.last_post(self._base, worker)[2] or "none"

    def _peer_error(self) -> PeerError:
        culprit, text = core.aborted(self._base) or (self.worker, "unknown")
        return PeerError(f"worker {culprit} failed, so worker {self.worker} stops too:\n{text}", culprit)

    def check(self) -> None:
        """See `Rounds`."""
        if core.aborted(self._base) is not None:
            raise self._peer_error()

    def check_process(self) -> None:
        """See `Rounds`."""
        check_not_a_copy(self._pid, self._name)

    def fail(self, text: str) -> None:
        """See `Rounds`. The failure of a forked copy of this process does not concern the others."""
        if os.getpid() != self._pid:
            return
        data = text.encode(errors="backslashreplace")
        if len(data) > core.ES_ERROR_BYTES:  # the end of a traceback says most
            half = core.ES_ERROR_BYTES // 2 - 32
            data = data[:half] + b"\n[... much is left out here ...]\n" + data[-half:]
        self._failed = True
        core.abort_all(self._base, self.worker, self.worker, data)

    def leave(self) -> None:
        """See `Rounds`."""
        if self._failed:
            raise self._peer_error()

    def close(self) -> None:
        """See `Rounds`."""
        self._liveness.close()
        self._segment.close()
