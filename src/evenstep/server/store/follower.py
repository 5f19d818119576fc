"""The servers after the first: they hold what workers send until they are told what the first has made of it.

An update goes to the followers first, where it is only kept (*staged*), then to server 0, which decides when it is
applied, in which order and together with whose. Whoever talks to several servers carries that decision to the
followers: the worker itself, or, should it die in between, the next one to write or read. So every server applies the
same updates in the same order, and an update that server 0 has applied is on all servers, or will be.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from evenstep.core.errors import RefusedError, ServerError
from evenstep.server.store.checks import check_contribution
from evenstep.server.store.decisions import Decided
from evenstep.server.store.optimizers import MakeOptimizer
from evenstep.server.store.options import Options
from evenstep.server.store.rounds import Contribution, Round
from evenstep.server.store.state import Applied
from evenstep.server.store.store import Store
from evenstep.server.wire.slices import Place, Slices
from evenstep.server.wire.tensors import Spec

__all__ = ["Follower", "Staged"]

_MOST = 1024


@dataclass(frozen=True)
class Staged:
    """An update that waits for a decision.

    Attributes:
        sequence: Its number.
        kind: "gradient", "delta" or "put".
        part: What.
        slices: How the parameters lie over the servers, if they are put for the first time.
        buffers: Which of them the optimizer does not train, likewise.
    """

    sequence: int
    kind: str
    part: Contribution
    slices: Slices | None = None
    buffers: tuple[str, ...] = ()


class Follower(Store):
    """A store that applies what another one decides. Arguments as for `Store`.

    Attributes:
        staged: What waits, by (worker, session).
    """

    def __init__(
        self,
        options: Options,
        optimizer: MakeOptimizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        place: Place = Place(1, 2),  # noqa: B008  # a frozen value
    ) -> None:
        super().__init__(options, optimizer, clock, place)
        self.staged: dict[tuple[str, str], Staged] = {}
        self._decided: tuple[Decided, Applied | None] | None = None  # what is being applied

    def stage(self, worker: str, session: str, staged: Staged) -> int:
        """Keep an update; sending it again changes nothing. Returns the version of this server, -1 if nothing was put.

        Raises:
            RefusedError: It could not be applied.
        """
        with self._changed:
            self._check_sound()
            self._expire()
            last = self.workers.acknowledged.get(worker)
            if last is not None and last.sequence >= staged.sequence:
                return self._at
            self._check_staged(worker, staged)
            before = self.staged.get((worker, session))
            if before is None and len(self.staged) >= _MOST:
                raise RefusedError(f"{_MOST} updates wait for server 0 already; try again", 503)
            if before is None or before.sequence != staged.sequence:
                self._write_down(lambda journal: journal.stage(worker, session, staged))
                self.staged[worker, session] = staged
                self._changed.notify_all()
            return self._at

    def _check_staged(self, worker: str, staged: Staged) -> None:
        if staged.kind != "put":
            self.workers.see(worker, self._clock())
            check_contribution(self.state, staged.kind, staged.part, finite=self.options.reject_nonfinite)
        elif self.layout is not None:
            self.layout.check_whole({name: Spec.of(tensor) for name, tensor in staged.part.tensors.items()})

    def follow(
        self, decisions: Sequence[Decided], alive: Collection[str] = (), wait_s: float = 0.0
    ) -> tuple[int, bool]:
        """Apply what server 0 has decided; return the version, and whether all of it is applied.

        Args:
            decisions: In order, without a gap.
            alive: Who was registered there then.
            wait_s: How long to wait for an update that is not here.
        """
        with self._changed:
            self._check_sound()
            self._expire()
            if not decisions:
                return self._at, True
            done = self._wait(lambda: self._advance(decisions), wait_s)
            if done:
                self._tidy(alive)
            return self._at, done

    @property
    def _at(self) -> int:
        """The version; -1 while nothing was put."""
        return self.version if self.layout is not None else -1

    def _advance(self, decisions: Sequence[Decided]) -> bool:
        """Apply as much as can be; True if that is all of it."""
        for version, who in decisions:
            if version <= self._at:
                continue
            if version != self._at + 1 or any(
                (found := self.staged.get((worker, session))) is None or found.sequence != sequence
                for worker, (sequence, session) in who.items()
            ):
                return False
            self._await_readers()
            if version == self._at + 1:  # nobody has done it while we waited
                self._follow_one((version, who))
        return True

    def _follow_one(self, decision: Decided) -> None:
        """Apply one decision, and write it down."""
        if self._decided is None or self._decided[0] != decision:
            self._decided = decision, self._applied(decision)  # once: to add up uses the memory of what was staged
        applied = self._decided[1]
        if applied is None:
            self._put_first(decision)
            return
        try:
            self._commit(applied, lambda journal: journal.follow(decision))
        except RefusedError as error:
            if error.status != 503:
                self._broken = f"version {decision[0]}, which server 0 has made, cannot be made here: {error}"
                raise ServerError(self._broken) from error
            raise

    def _round_of(self, decision: Decided) -> Round:
        """The staged updates of a decision.

        Raises:
            RefusedError: They cannot have been decided together.
        """
        version, who = decision
        found = {worker: self.staged[worker, session] for worker, (_, session) in who.items()}
        if len(found) > 1 and (self.options.staleness != 0 or any(each.kind == "put" for each in found.values())):
            raise RefusedError(f"version {version} is said to be made of {len(found)} updates, expected one")
        round_ = Round()
        for worker, staged in found.items():
            if len(found) > 1:
                round_.check(worker, staged.kind, staged.part)
            round_.add(worker, staged.kind, staged.part)
        return round_

    def carry_out(self, decision: Decided) -> None:
        """Apply one decision that was written down, before anybody is served."""
        applied = self._applied(decision)
        assert applied is not None, "the first values are in the snapshot, and no decision"
        self.replay(applied)

    def _count(self, applied: Applied) -> None:
        super()._count(applied)
        self._forget(applied.sequences)

    def _applied(self, decision: Decided) -> Applied | None:
        """What a decision comes to; None: the parameters are put for the first time.

        Raises:
            RefusedError: The staged updates cannot have been decided together.
        """
        version, who = decision
        round_ = self._round_of(decision)
        worker, (_, session) = next(iter(who.items()))
        first = self.staged[worker, session]
        if first.kind == "put" and self.layout is None:
            return None
        total = first.part.tensors
        if self.options.staleness == 0 and first.kind != "put":
            total = round_.total()
        sequences = {name: number for name, (number, _) in who.items()}
        sessions = {name: life for name, (_, life) in who.items()}
        options = round_.options()
        return Applied(first.kind, version, total, round_.buffers(), sequences, [], options, sessions=sessions)

    def _put_first(self, decision: Decided) -> None:
        """Give the parameters their first values; they are written down as a whole, so the decision need not be."""
        worker, (sequence, session) = next(iter(decision[1].items()))
        before, first = dict(self.staged), self.staged[worker, session]
        self._initialise(first.part.tensors, worker, {}, first.buffers, first.slices)
        self.workers.acknowledge(worker, sequence, 0, [], counts=False)
        self._forget({worker: sequence})
        try:
            self._keep_first()
        except BaseException:
            self.staged = before
            self.workers.acknowledged.pop(worker)
            raise

    def _forget(self, sequences: Mapping[str, int]) -> None:
        """What was applied is not kept any more, nor what another life of the same worker had sent of it."""
        for (worker, session), staged in list(self.staged.items()):
            if staged.sequence <= sequences.get(worker, 0):
                del self.staged[worker, session]

    def _tidy(self, alive: Collection[str]) -> None:
        """Forget what was not decided of workers that are gone, here and at server 0: who comes back sends it again."""
        for worker, session in list(self.staged):
            if worker not in self.workers.registered and worker not in alive:
                del self.staged[worker, session]

    def _complete(self) -> None:
        """Server 0 decides."""
