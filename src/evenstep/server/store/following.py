"""The servers after the first: they keep what workers send until they are told what the first has decided.

An update goes to the followers first, where it is only kept (*staged*), then to server 0, which decides when it is
applied, in which order and together with which others. Clients carry that decision to the followers: the worker itself
or, if it dies in between, the next one to write or read. So every server applies the same updates in the same order,
and an update that server 0 has applied is on all servers, or will be.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenstep.core.errors import RefusedError
from evenstep.server.store.attendance import Attendance
from evenstep.server.store.commits import Commits, First
from evenstep.server.store.decisions import Decided
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.readers import Readers
from evenstep.server.store.rounds import Contribution, Round
from evenstep.server.store.state import Applied
from evenstep.server.wire.slices import Slices
from evenstep.server.wire.tensors import Spec

__all__ = ["Follower", "Staged"]

_MOST = 1024


@dataclass(frozen=True)
class Staged:
    """An update that waits for a decision.

    Attributes:
        sequence: Its number.
        kind: "gradient", "delta" or "put".
        part: The contribution.
        slices: How the parameters lie over the servers, if they are put for the first time.
        buffers: Which of them the optimizer does not train, likewise.
    """

    sequence: int
    kind: str
    part: Contribution
    slices: Slices | None = None
    buffers: tuple[str, ...] = ()


class Follower:
    """Keeps updates, and applies what another server decides.

    Args:
        options: How the store behaves.
        commits: Commits updates.
        readers: Those who read meanwhile.
        attendance: The lock, and who is registered.

    Attributes:
        staged: What waits, by (worker, session).
    """

    def __init__(self, options: StoreOptions, commits: Commits, readers: Readers, attendance: Attendance) -> None:
        self._options, self._commits, self._readers, self._attendance = options, commits, readers, attendance
        self._state, self._workers, self._changed = commits.state, attendance.workers, attendance.changed
        self.staged: dict[tuple[str, str], Staged] = {}
        self._decided: tuple[Decided, Applied | None] | None = None  # what is being applied

    def stage(self, worker: str, session: str, staged: Staged) -> int:
        """Keep an update; sending it again changes nothing. Returns the version of this server, -1 if nothing was put.

        Raises:
            RefusedError: It could not be applied.
        """
        with self._changed:
            self._attendance.check_sound()
            self._attendance.expire()
            last = self._workers.acknowledged.get(worker)
            if last is not None and last.sequence >= staged.sequence:
                return self._at
            self._check(worker, staged)
            before = self.staged.get((worker, session))
            if before is None and len(self.staged) >= _MOST:
                raise RefusedError(f"{_MOST} updates wait for server 0 already; try again", 503)
            if before is None or before.sequence != staged.sequence:
                self._commits.write_down(lambda journal: journal.stage(worker, session, staged))
                self.staged[worker, session] = staged
                self._changed.notify_all()
            return self._at

    def _check(self, worker: str, staged: Staged) -> None:
        if staged.kind != "put":
            self._attendance.see(worker)
            self._commits.check(staged.kind, staged.part)
        elif self._state.layout is not None:
            self._state.layout.check_whole({name: Spec.of(tensor) for name, tensor in staged.part.tensors.items()})

    def follow(
        self, decisions: Sequence[Decided], alive: Collection[str] = (), wait_s: float = 0.0
    ) -> tuple[int, bool]:
        """Apply what server 0 has decided; return the version, and whether all of it is applied.

        Args:
            decisions: The decisions, in order, without a gap.
            alive: The workers registered at server 0.
            wait_s: How long to wait for an update that is not here.
        """
        with self._changed:
            self._attendance.check_sound()
            self._attendance.expire()
            if not decisions:
                return self._at, True
            done = self._attendance.wait(lambda: self._advance(decisions), wait_s)
            if done:
                self._tidy(alive)
            return self._at, done

    def contributors(self) -> Iterable[str]:
        """Who contributed to updates that are not made yet. The caller holds the lock, here and below."""
        return {worker for worker, _ in self.staged}

    def begin(self, worker: str, session: str) -> None:
        """Nothing to do when a worker registers: what an earlier life has staged may still be decided."""

    def gone(self) -> None:
        """Nothing to do when a worker is gone: what it has staged may still be decided."""

    @property
    def _at(self) -> int:
        """The version; -1 while nothing was put."""
        return self._state.version if self._state.layout is not None else -1

    def _advance(self, decisions: Sequence[Decided]) -> bool:
        """Apply as much as possible; True if that is everything."""
        for version, who in decisions:
            if version <= self._at:
                continue
            if version != self._at + 1 or any(
                (found := self.staged.get((worker, session))) is None or found.sequence != sequence
                for worker, (sequence, session) in who.items()
            ):
                return False
            self._readers.make_way()
            if version == self._at + 1:  # unless another thread did it while we waited
                self._follow_one((version, who))
        return True

    def _follow_one(self, decision: Decided) -> None:
        """Apply one decision, and write it down."""
        if self._decided is None or self._decided[0] != decision:
            self._decided = decision, self._applied(decision)  # only once: adding up overwrites what was staged
        applied = self._decided[1]
        if applied is None:
            self._put_first(decision)
            return
        held = dict(self.staged)
        self._forget(applied.sequences)  # first, so that a snapshot taken by the commit no longer holds it
        try:
            self._commits.commit(applied, lambda journal: journal.follow(decision))
        except RefusedError as error:
            self.staged = held
            if error.status == 503:
                raise
            why = f"version {decision[0]}, which server 0 has made, cannot be made here: {error}"
            raise self._attendance.break_off(why) from error

    def carry_out(self, decision: Decided) -> None:
        """Apply one decision from the log, before anybody is served."""
        applied = self._applied(decision)
        assert applied is not None, "the first values are in a snapshot, not in a log"
        self._commits.replay(applied)
        self._forget(applied.sequences)

    def _applied(self, decision: Decided) -> Applied | None:
        """The update that a decision makes; None: the parameters are put for the first time.

        Raises:
            RefusedError: The staged updates cannot have been decided together.
        """
        version, who = decision
        round_ = self._round_of(decision)
        worker, (_, session) = next(iter(who.items()))
        first = self.staged[worker, session]
        if first.kind == "put" and self._state.layout is None:
            return None
        total = first.part.tensors
        if self._options.staleness == 0 and first.kind != "put":
            total = round_.total()
        sequences = {name: number for name, (number, _) in who.items()}
        sessions = {name: life for name, (_, life) in who.items()}
        return Applied(first.kind, version, total, round_.buffers(), sequences, [], round_.options(), sessions=sessions)

    def _round_of(self, decision: Decided) -> Round:
        """The staged updates of a decision.

        Raises:
            RefusedError: They cannot have been decided together.
        """
        version, who = decision
        found = {worker: self.staged[worker, session] for worker, (_, session) in who.items()}
        if len(found) > 1 and (self._options.staleness != 0 or any(each.kind == "put" for each in found.values())):
            raise RefusedError(f"version {version} is said to be made of {len(found)} updates, expected one")
        round_ = Round()
        for worker, staged in found.items():
            if len(found) > 1:
                round_.check(worker, staged.kind, staged.part)
            round_.add(worker, staged.kind, staged.part)
        return round_

    def _put_first(self, decision: Decided) -> None:
        """Give the parameters their first values; a snapshot holds them, so the decision need not be logged."""
        worker, (sequence, session) = next(iter(decision[1].items()))
        held, first = dict(self.staged), self.staged[worker, session]
        self._workers.acknowledge(worker, sequence, 0, [], counts=False)
        self._forget({worker: sequence})
        try:
            self._commits.put_first(First(first.part.tensors, worker, first.buffers, first.slices))
        except BaseException:
            self.staged = held
            self._workers.acknowledged.pop(worker)
            raise

    def _forget(self, sequences: Mapping[str, int]) -> None:
        """Drop what was applied, and what another life of the same worker had sent of it."""
        for (worker, session), staged in list(self.staged.items()):
            if staged.sequence <= sequences.get(worker, 0):
                del self.staged[worker, session]

    def _tidy(self, alive: Collection[str]) -> None:
        """Drop undecided updates of workers gone here and at server 0; if they return, they send them again."""
        for worker, session in list(self.staged):
            if worker not in self._workers.registered and worker not in alive:
                del self.staged[worker, session]
