"""The servers after the first: they hold what workers send until they are told what the first has made of it.

An update goes to the followers first, where it is only kept (*staged*), then to server 0, which decides when it is
applied, in which order and together with whose. Whoever talks to several servers carries that decision to the
followers: the worker itself, or, should it die in between, the next one to write or read. So every server applies the
same updates in the same order, and an update that server 0 has applied is on all servers, or will be.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from evenstep.core.errors import RefusedError
from evenstep.server.checks import check_contribution
from evenstep.server.decisions import Decided
from evenstep.server.options import Options
from evenstep.server.rounds import Contribution, Round
from evenstep.server.slices import Place, Slices
from evenstep.server.state import Applied, MakeOptimizer
from evenstep.server.store import Store
from evenstep.server.wire import Spec

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
        self._write_down(lambda journal: journal.follow(decision))
        self.carry_out(decision)
        self.after_update()

    def carry_out(self, decision: Decided) -> None:
        """Apply one decision. For the store itself, and for what reads a log back."""
        version, who = decision
        found = {worker: self.staged.pop((worker, session)) for worker, (_, session) in who.items()}
        first = next(iter(found.values()))
        sequences = {worker: sequence for worker, (sequence, _) in who.items()}
        sessions = {worker: session for worker, (_, session) in who.items()}
        if first.kind == "put" and self.layout is None:
            self._initialise(first.part.tensors, next(iter(found)), {}, first.buffers, first.slices)
            for worker, sequence in sequences.items():
                self.workers.acknowledge(worker, sequence, 0, [], counts=False)
            self.after_put()
            return
        total, buffers, options = first.part.tensors, first.part.buffers, first.part.options
        if self.options.staleness == 0 and first.kind != "put":
            round_ = Round()
            for worker, staged in found.items():
                round_.add(worker, staged.kind, staged.part)
            total, buffers, options = round_.total(), round_.buffers(), round_.options()
        self.apply(Applied(first.kind, version, total, buffers, sequences, [], options, sessions=sessions))
        for who_else, staged in list(self.staged.items()):  # another life of the worker has sent it again
            if staged.sequence <= sequences.get(who_else[0], 0):
                del self.staged[who_else]

    def _tidy(self, alive: Collection[str]) -> None:
        """Forget what was not decided of workers that are gone, here and at server 0: who comes back sends it again."""
        for worker, session in list(self.staged):
            if worker not in self.workers.registered and worker not in alive:
                del self.staged[worker, session]

    def _complete(self) -> None:
        """Server 0 decides."""
