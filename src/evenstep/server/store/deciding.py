"""The decider of a single server, or of the first of several: it decides what is applied, and in which order.

What `staleness` means:

- 0: synchronous. An update is made of one contribution of every registered worker (at least `workers`), or of tree
  nodes for all shards of a run; it is applied when all are there.
- s: a worker's update is applied at once, but refused while it would bring the worker more than s ahead of the slowest.
- None: applied at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from evenstep.core.errors import RefusedError
from evenstep.server.store.attendance import Attendance
from evenstep.server.store.commits import Commits
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.readers import Readers
from evenstep.server.store.rounds import Contribution, Round
from evenstep.server.store.state import Applied
from evenstep.server.store.workers import Acknowledged

__all__ = ["Decider", "Pending"]


@dataclass(frozen=True)
class Pending:
    """An update that was accepted but waits for other workers."""

    version: int


@dataclass(frozen=True)
class _Failed:
    """Why an accepted update was not made."""

    sequence: int
    error: RefusedError


class Decider:
    """Takes updates, and decides.

    Args:
        options: How the store behaves.
        commits: Commits updates.
        readers: Those who read meanwhile.
        attendance: The lock, and who is registered.
    """

    def __init__(self, options: StoreOptions, commits: Commits, readers: Readers, attendance: Attendance) -> None:
        self._options, self._commits, self._readers, self._attendance = options, commits, readers, attendance
        self._workers, self._changed = attendance.workers, attendance.changed
        self._round = Round()
        self._sequences: dict[str, int] = {}  # of the contributions to the round
        self._sessions: dict[str, str] = {}  # of their senders
        self._failed: dict[str, _Failed] = {}  # the last failed update of each worker

    @property
    def _version(self) -> int:
        return self._commits.state.version

    def update(
        self,
        worker: str,
        sequence: int,
        kind: str,
        part: Contribution,
        *,
        base: int | None = None,
        wait_s: float = 0.0,
        session: str = "",
    ) -> Acknowledged | Pending:
        """Apply a worker's update once, however often it is sent.

        Args:
            worker: The worker, which must be registered.
            sequence: Grows with every update of this worker; a retry has the same.
            kind: "gradient", for the optimizer; or "delta", to be subtracted.
            part: The update. Its tensors were checked against the layout; the store takes over their memory.
            base: The version it was computed from, if the worker says so.
            wait_s: How long to wait for the other workers of a synchronous update.
            session: The life of the worker that sent it.

        Raises:
            RefusedError: It cannot be applied; nothing has changed.
        """
        with self._changed:
            self._readers.make_way()
            self._commits.await_resumption()
            self._attendance.expire()
            if self._repeated(worker, sequence) is None:
                self._attendance.check_sound()
                self._attendance.see(worker)
                self._commits.check(kind, part)
                self._check_turn(worker, kind, part, base)
                self._failed.pop(worker, None)
                self._take(worker, sequence, kind, part, session)
            return self._settle(worker, sequence, wait_s)

    def wait(self, worker: str, sequence: int, wait_s: float = 0.0) -> Acknowledged | Pending:
        """Wait for an accepted update.

        Raises:
            RefusedError: There is no update with this sequence number: send it again.
        """
        with self._changed:
            self._attendance.expire()
            if self._repeated(worker, sequence) is None:
                failed = self._failed.get(worker)
                if failed is not None and failed.sequence == sequence and failed.error.status != 503:
                    raise failed.error
                raise RefusedError(f"there is no update {sequence} of worker '{worker}' here; send it again", 404)
            return self._settle(worker, sequence, wait_s)

    def wait_turn(self, worker: str, wait_s: float = 0.0) -> bool:
        """Wait until a worker's next update would not bring it too far ahead of the slowest; False if not yet.

        Raises:
            RefusedError: It is not registered, or was dropped meanwhile.
        """
        with self._changed:
            self._attendance.expire()
            self._attendance.see(worker)
            staleness = self._options.staleness
            if staleness is None or staleness == 0:
                return True
            return self._attendance.wait(lambda: not self._workers.is_ahead(worker, staleness), wait_s, worker)

    def contributors(self) -> Iterable[str]:
        """Who contributed to the update being made. The caller holds the lock, here and below."""
        return self._sequences

    def begin(self, worker: str, session: str) -> None:
        """Note that a worker registers: a new life takes back what the last one left unfinished."""
        if session and self._sessions.get(worker, session) != session:
            self._round.parts.pop(worker, None)
            del self._sequences[worker], self._sessions[worker]

    def gone(self) -> None:
        """Note that a worker is gone: the remaining ones may now complete an update."""
        self._complete()

    def _repeated(self, worker: str, sequence: int) -> Acknowledged | Pending | None:
        """The fate of this update, if it was sent before."""
        last = self._workers.acknowledged.get(worker)
        if self._sequences.get(worker) == sequence:
            return Pending(self._version)
        if last is None or sequence > last.sequence:
            return None
        if sequence == last.sequence:
            return last
        raise RefusedError(
            f"worker '{worker}' sends update {sequence} after {last.sequence}; sequence numbers only grow", 409
        )

    def _check_turn(self, worker: str, kind: str, part: Contribution, base: int | None) -> None:
        staleness = self._options.staleness
        if staleness == 0:
            if base is not None and base != self._version:
                raise RefusedError(
                    f"worker '{worker}' sends an update of version {base} but the parameters are at {self._version}",
                    409,
                )
            if worker in self._sequences:
                raise RefusedError(f"worker '{worker}' is in this update already, with {self._sequences[worker]}", 409)
            self._round.check(worker, kind, part)
        elif part.num_shards is not None:
            raise RefusedError("tree nodes are for synchronous updates (staleness=0); send a mean", 409)
        elif staleness is not None and self._workers.is_ahead(worker, staleness):
            raise RefusedError(
                f"worker '{worker}' would be more than {staleness} ahead of the slowest; wait for your turn first", 409
            )

    def _take(self, worker: str, sequence: int, kind: str, part: Contribution, session: str) -> None:
        if self._options.staleness == 0:
            self._round.add(worker, kind, part)
            self._sequences[worker], self._sessions[worker] = sequence, session
            self._complete()
        else:
            sequences, sessions, version = {worker: sequence}, {worker: session}, self._version + 1
            self._commits.commit(
                Applied(kind, version, part.tensors, part.buffers, sequences, [part.note], part.options, sessions)
            )

    def _complete(self) -> None:
        """Apply the synchronous update if all contributions are there."""
        if not self._round.parts:
            return
        covered = self._round.covers_all_shards()
        if covered is None:
            everyone = self._workers.registered.keys() <= self._round.parts.keys()
            covered = everyone and len(self._round.parts) >= self._options.workers
        if not covered:
            return
        round_, sequences, sessions = self._round, self._sequences, self._sessions
        self._round, self._sequences, self._sessions = Round(), {}, {}
        applied = Applied(
            round_.kind or "gradient", self._version + 1, round_.total(), round_.buffers(), sequences, round_.notes(),
            round_.options(), sessions=sessions,
        )  # fmt: skip
        try:
            self._commits.commit(applied)
        except RefusedError as error:  # for those that took part, not for the caller that happened to complete it
            self._failed |= {worker: _Failed(sequence, error) for worker, sequence in sequences.items()}
            self._changed.notify_all()

    def _settle(self, worker: str, sequence: int, wait_s: float) -> Acknowledged | Pending:
        """Wait until an accepted update is committed."""

        def failed() -> bool:
            return worker in self._failed and self._failed[worker].sequence == sequence

        def done() -> bool:
            last = self._workers.acknowledged.get(worker)
            return (last is not None and last.sequence >= sequence) or failed()

        if not self._attendance.wait(done, wait_s, worker):
            return Pending(self._version)
        if failed():
            raise self._failed[worker].error
        return self._workers.acknowledged[worker]
