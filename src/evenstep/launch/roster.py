"""Who is a worker: events go in, decisions come out. It knows neither processes nor clocks.

A roster is a value. Every event gives the next roster and decisions, which its holder carries out in their order.
`tests/model/protocol.py` runs this very code through all orders of events.
"""

import signal
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from evenstep.core.errors import ConfigError, Stopped

__all__ = [
    "Announce",
    "Decision",
    "Ending",
    "Fail",
    "LastWord",
    "LeaveOut",
    "Lose",
    "Regroup",
    "Roster",
    "Script",
    "Signal",
    "Stage",
    "Start",
    "Worker",
]

_CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS}
MAX_CRASHES = 4
"""After this many crashes in one place with no step committed in between, the next worker would crash too."""
_HEAD = 0  # the machine without which there is no generation
_BACKOFF_S = (0.1, 30.0)  # the first wait before a place is started again with no step committed since, and the longest


class Stage(Enum):
    """Where a worker stands."""

    BEGINS = "one of the first, before there is a generation"
    CATCHES_UP = "started later, and not yet where the others are"
    READY = "has caught up, and waits to be let in"
    WORKS = "in the present generation"
    WAITS = "was in the present generation, and waits for the next"
    LEAVES = "told to go"
    LEFT = "told to go, and its process has ended"
    GONE = "its process has ended"
    MISSING = "its process ended normally, but without the run that the others are in"


class Script(Enum):
    """How far a worker's script is."""

    OUTSIDE = "in no run"
    INSIDE = "in a run"
    CLOSED = "has closed its last run"
    ENDED = "at its end, without having left its run"


class LastWord(Enum):
    """What a worker has said about its end."""

    NONE = "nothing"
    ERROR = "an error"
    MISTAKE = "a sentence for the user, who needs no traceback"
    HOPELESS = "an error that would happen again"
    BEGINS_AGAIN = "that another worker must take its place and repeat more than the last step"


class Ending(Enum):
    """Whether the run is about to end."""

    NONE = "it goes on"
    STOPS = "it was asked to stop after this step"
    FAILED = "a worker has failed for good"
    KILLED = "everyone was told to end now"


_MEMBERS = {Stage.BEGINS, Stage.WORKS, Stage.WAITS}
_LATE = {Stage.CATCHES_UP, Stage.READY}
_WAITING = {Stage.READY, Stage.WAITS}
_WITHOUT_PROCESS = {Stage.LEFT, Stage.GONE, Stage.MISSING}


class Worker(NamedTuple):
    """The worker of a place, from its start to its end.

    Attributes:
        place: Its number; a worker that replaces it has the same.
        stage: Where it stands.
        script: How far its script is.
        fault: What it has said about its end.
        final: Whether the others cannot go on without it.
        given_up: Whether it is about to be killed because it makes no progress.
        starved: Whether the system killed it because memory had run out.
        code: Its exit code, or minus the signal that killed it.
        machine: The machine that it is on; 0 is the head, where files are written.
    """

    place: int
    stage: Stage
    script: Script = Script.OUTSIDE
    fault: LastWord = LastWord.NONE
    final: bool = False
    given_up: bool = False
    starved: bool = False
    code: int | None = None
    machine: int = 0

    @property
    def alive(self) -> bool:
        """Whether it has a process."""
        return self.stage not in _WITHOUT_PROCESS

    @property
    def is_member(self) -> bool:
        """Whether the others wait for it."""
        return self.stage in _MEMBERS

    @property
    def is_late(self) -> bool:
        """Whether it was started later than the others and has not joined them yet."""
        return self.stage in _LATE

    @property
    def waits(self) -> bool:
        """Whether it waits for the next generation."""
        return self.stage in _WAITING

    @property
    def closed(self) -> bool:
        """Whether it has closed its last run."""
        return self.script is Script.CLOSED


class Start(NamedTuple):
    """Start a worker in a place after a delay."""

    place: int
    delay_s: float


class Lose(NamedTuple):
    """Say that a worker is lost; if it was a member, make the others stop waiting for it.

    Attributes:
        place: Its place.
        was_member: Whether the others may be waiting for it.
        delay_s: After how long it is replaced; None: it is not.
        left: How many workers go on.
    """

    place: int
    was_member: bool
    delay_s: float | None
    left: int


class LeaveOut(NamedTuple):
    """Say that a worker ended before it had caught up, and that the others go on without it."""

    place: int


class Fail(NamedTuple):
    """The run has failed because of this worker: make the others stop waiting for it."""

    place: int


class Signal(NamedTuple):
    """Send a signal to a worker."""

    place: int
    number: int


class Regroup(NamedTuple):
    """Ask the workers to come and wait for a generation."""

    generation: int


class Announce(NamedTuple):
    """Begin a generation with these members, and dismiss those leaving."""

    generation: int
    members: tuple[int, ...]
    leaving: tuple[int, ...]


Decision: TypeAlias = Start | Lose | LeaveOut | Fail | Signal | Regroup | Announce
Turn: TypeAlias = "tuple[Roster, list[Decision]]"


class Roster(NamedTuple):
    """All workers of a run, and what was decided so far.

    Attributes:
        wanted: How many workers there should be.
        workers: The present or last worker of every place, in the order of places.
        generation: The number of the present generation; 0 before the first.
        starts: The places that are about to get a worker.
        max_restarts: How many workers may be replaced; None: any number.
        restarts: How many have been replaced.
        failures: How often workers that replaced others have failed since the last committed step, by place.
        failed_at: How many operations were committed when a script last failed by itself.
        stepped: Whether any step has been committed.
        ending: Whether the run is about to end.
        has_stopped: Whether the workers have stopped after a step, as they were asked to.
        convicted: The places whose workers computed wrong; they are not used again.
    """

    wanted: int
    workers: tuple[Worker, ...] = ()
    generation: int = 0
    starts: tuple[int, ...] = ()
    max_restarts: int | None = None
    restarts: int = 0
    failures: tuple[tuple[int, int], ...] = ()
    failed_at: int | None = None
    stepped: bool = False
    ending: Ending = Ending.NONE
    has_stopped: bool = False
    convicted: tuple[int, ...] = ()

    # ---- looking ----

    def of(self, place: int) -> Worker | None:
        """The present or last worker of a place, if it ever had one."""
        return next((worker for worker in self.workers if worker.place == place), None)

    @property
    def alive(self) -> list[Worker]:
        """The workers that have a process."""
        return [worker for worker in self.workers if worker.alive]

    @property
    def staying(self) -> list[Worker]:
        """The workers that have a process and were not told to go."""
        return [worker for worker in self.workers if worker.alive and worker.stage is not Stage.LEAVES]

    @property
    def is_over(self) -> bool:
        """Whether some worker has reached the end of the run, so that everything is committed."""
        return any(worker.closed for worker in self.workers)

    @property
    def stragglers(self) -> list[Worker]:
        """The workers still catching up with a run that is over for all others; none if any other is left."""
        if self.starts or not self.is_over or any(w.closed or not w.is_late for w in self.alive):
            return []
        return self.alive

    def crashes_always(self, worker: Worker) -> bool:
        """Whether a worker crashed, starved or hung, and so did those before it in its place since the last step."""
        crashed = worker.code is not None and -worker.code in _CRASHES
        return (crashed or worker.starved or worker.given_up) and self._failures_in(worker.place) + 2 >= MAX_CRASHES

    def _failures_in(self, place: int) -> int:
        return dict(self.failures).get(place, -1)

    # ---- changing ----

    def _put(self, worker: Worker) -> "Roster":
        others = [other for other in self.workers if other.place != worker.place]
        return self._replace(workers=tuple(sorted((*others, worker))))

    def _set(self, place: int, **changes: object) -> "Roster":
        worker = self.of(place)
        assert worker is not None, f"there is a worker in place {place}"
        return self._put(worker._replace(**changes))  # type: ignore[arg-type]  # the caller names its fields

    # ---- what happens: workers come and speak ----

    def started(self, place: int, machine: int = 0) -> "Roster":
        """A process was started in a place, on a machine: one of the first, or one that was decided on."""
        stage = Stage.CATCHES_UP if place in self.starts else Stage.BEGINS
        starts = tuple(other for other in self.starts if other != place)
        return self._replace(starts=starts)._put(Worker(place, stage, machine=machine))

    def waits(self, place: int) -> Turn:
        """A worker waits for the next generation."""
        worker = self.of(place)
        if worker is None or not worker.alive or worker.stage is Stage.LEAVES:
            return self, []
        return self._set(place, stage=Stage.READY if worker.is_late else Stage.WAITS).form()

    def speaks(self, place: int, script: Script) -> "Roster":
        """A worker's script has reached a run, or the end of one."""
        worker = self.of(place)
        if script is Script.ENDED and worker is not None and worker.script is not Script.INSIDE:
            return self  # it has closed its run
        return self._set(place, script=script)

    def faults(self, place: int, fault: LastWord, *, final: bool = False) -> "Roster":
        """A worker says why it is about to end."""
        worker = self.of(place)
        assert worker is not None, "only a worker that was started speaks"
        return self._set(place, fault=fault, final=final or worker.final)

    def committed(self) -> "Roster":
        """A step is committed: whatever failed before it, the run makes progress."""
        return self._replace(stepped=True, failures=())

    def gives_up(self, place: int, *, leaves: bool = False) -> "Roster":
        """A worker makes no progress, and will be killed; with `leaves`, nobody takes its place."""
        roster = self._set(place, given_up=True)
        return roster._set(place, stage=Stage.LEAVES) if leaves else roster

    def convicts(self, place: int) -> "Roster":
        """The others found that a worker computed wrong: it is in no further generation."""
        return self._replace(convicted=(*self.convicted, place), wanted=max(self.wanted - 1, 1))

    def starves(self, place: int) -> "Roster":
        """The system has killed a worker because memory had run out."""
        return self._set(place, starved=True)

    # ---- what happens: workers end ----

    def ended(self, place: int, code: int, committed: int) -> Turn:
        """A worker's process has ended.

        Args:
            place: Its place.
            code: Its exit code, or minus the signal that killed it.
            committed: How many operations are committed.
        """
        worker = self.of(place)
        assert worker is not None, "only a worker that was started ends"
        dismissed = worker.stage is Stage.LEAVES
        told = dismissed or (self.ending is Ending.STOPS and code == Stopped.exit_code)
        well = code == 0 and worker.script is not Script.INSIDE
        missing = well and worker.is_member and not worker.closed
        stage = Stage.LEFT if dismissed else Stage.MISSING if missing else Stage.GONE
        roster = self._set(place, stage=stage, code=code)
        if self.ending in (Ending.FAILED, Ending.KILLED):
            return roster, []  # all are ending
        if well or told:
            return roster.form()
        if self.ending is Ending.STOPS:
            return roster._lose(worker, code)
        if worker.fault is LastWord.BEGINS_AGAIN:
            return roster._lose(worker, code)
        late = worker.is_late and not (worker.closed or worker.final) and code >= 0
        if late and (roster.alive or self.is_over):
            return roster._replace(wanted=min(self.wanted, max(len(roster.alive), 1))), [LeaveOut(place)]
        return roster._fall(worker, code, committed)

    def _fall(self, worker: Worker, code: int, committed: int) -> Turn:
        """A worker has failed: if the script is at fault, it would fail again; otherwise another takes its place."""
        if code < 0 or worker.given_up:
            final, roster = self.crashes_always(worker._replace(code=code)), self
        else:
            again, roster = self.failed_at == committed, self._replace(failed_at=committed)
            fatal = worker.fault in (LastWord.MISTAKE, LastWord.HOPELESS) or worker.final or worker.closed
            final = fatal or again or not self.stepped
        return roster._fail(worker.place) if final else roster._lose(worker, code)

    def _lose(self, worker: Worker, code: int) -> Turn:
        """Go on without a worker, and have another one started in its place."""
        needed = code < 0 and not self.has_stopped and not any(w.is_member for w in self.alive)
        most = 0 if self.ending is Ending.STOPS and not needed else self.max_restarts
        crowd = sum(w.place not in self.convicted for w in self.staying) + len(self.starts)
        roster, delay_s, decisions = self, None, []
        if (most is None or self.restarts < most) and crowd < self.wanted:
            failures = self._failures_in(worker.place) + 1
            delay_s = min(_BACKOFF_S[0] * 2 ** (failures - 1), _BACKOFF_S[1]) if failures else 0.0
            roster = roster._replace(
                restarts=self.restarts + 1,
                failures=tuple(sorted({**dict(self.failures), worker.place: failures}.items())),
                starts=tuple(sorted((*self.starts, worker.place))),
            )
            decisions = [Start(worker.place, delay_s)]
        lost: list[Decision] = [Lose(worker.place, worker.is_member, delay_s, crowd), *decisions]
        if not roster.starts and not roster.alive and self.ending is not Ending.STOPS:
            roster, more = roster._fail(worker.place)
        else:
            roster, more = roster.form()
        return roster, lost + more

    def _fail(self, place: int) -> Turn:
        decisions: list[Decision] = [Fail(place)]
        for other in self.alive:
            if other.is_late:  # it has nothing to report, and may still handle SIGTERM as the supervisor does
                decisions.append(Signal(other.place, signal.SIGKILL))
            elif other.waits:  # no generation will come that could wake it
                decisions.append(Signal(other.place, signal.SIGTERM))
        return self._replace(ending=Ending.FAILED, starts=()), decisions

    # ---- what happens: machines come and go ----

    def adds(self, places: Sequence[int]) -> Turn:
        """A machine has joined, with a place for each of its workers."""
        starts = tuple(sorted((*self.starts, *places)))
        return self._replace(wanted=self.wanted + len(places), starts=starts), [Start(place, 0.0) for place in places]

    def loses(self, places: Collection[int]) -> Turn:
        """A machine is lost, with the workers of its places and those about to be started there."""
        gone = [worker for worker in self.alive if worker.place in places]
        starts = tuple(place for place in self.starts if place not in places)
        fewer = len(self.starts) - len(starts) + sum(worker.stage is not Stage.LEAVES for worker in gone)
        roster = self._replace(wanted=max(self.wanted - fewer, 1), starts=starts)
        for worker in gone:
            roster = roster._set(worker.place, stage=Stage.LEFT, code=-signal.SIGKILL)
        return roster.form()

    # ---- what happens: the user asks ----

    def scale(self, number: int, places: int) -> Turn:
        """Have more or fewer workers from the next step on.

        Args:
            number: How many.
            places: How many there can be at most.

        Raises:
            ConfigError: The run is ending.
        """
        if self.ending is not Ending.NONE:
            raise ConfigError("the run is ending and takes no more workers")
        short = number - len(self.staying) - len(self.starts)
        free = [place for place in range(places) if place not in self.starts and self._is_free(place)]
        added = free[: max(short, 0)]
        decisions: list[Decision] = [Start(place, 0.0) for place in added]
        if len(self.staying) > number:
            decisions.append(Regroup(self.generation + 1))
        return self._replace(wanted=number, starts=tuple(sorted((*self.starts, *added)))), decisions

    def _is_free(self, place: int) -> bool:
        """Whether a place has no worker; one that was told to go may still be reading there."""
        worker = self.of(place)
        return place not in self.convicted and (worker is None or not worker.alive)

    def stop(self) -> Turn:
        """Stop the run after this step."""
        roster, decisions = self._replace(ending=Ending.STOPS), []
        if any(w.is_member for w in self.alive):  # without a member, the workers that come next stop it
            roster = roster._replace(starts=())
            for worker in self.alive:
                if worker.is_late:
                    roster = roster._set(worker.place, stage=Stage.LEAVES)
                    decisions.append(Signal(worker.place, signal.SIGKILL))
        roster, more = roster.form()
        return roster, [*decisions, *more]

    def kill(self) -> "Roster":
        """Everyone is told to end now."""
        return self._replace(ending=Ending.KILLED, starts=())

    # ---- generations ----

    def form(self) -> Turn:
        """Begin the next generation if all that are left of the present one wait for it, otherwise ask them to."""
        waiting = sorted((w for w in self.staying if w.waits), key=lambda w: (not w.is_member, w.machine, w.place))
        if self.ending is Ending.STOPS and any(w.is_member for w in self.staying):
            waiting = [w for w in waiting if w.is_member]  # nobody joins a run that is about to stop
        if not waiting or self.ending in (Ending.FAILED, Ending.KILLED):
            return self, []
        missing = [w for w in self.workers if w.stage is Stage.MISSING]
        if missing:  # its script has ended, and the others wait for it
            return self._fail(missing[0].place)
        if not self._all_wait():
            asked = any(not w.is_member for w in waiting) or len(self.staying) > self.wanted
            return self, [Regroup(self.generation + 1)] if asked else []
        right = [w for w in waiting if w.place not in self.convicted]
        home = next((w for w in right if w.machine == _HEAD), None)
        if home is None:
            return self._without_head(waiting)
        chosen = [home, *(w for w in right if w is not home)][: self.wanted]
        return self._announce(chosen, [w for w in waiting if w not in chosen])

    def _without_head(self, waiting: Sequence[Worker]) -> Turn:
        """No worker of the head waits: one may still come, or the run is over there and so everywhere, or it failed."""
        heads = [worker for worker in self.workers if worker.machine == _HEAD]
        if self.starts or any(worker.alive and worker.place not in self.convicted for worker in heads):
            return self, []
        if not self.is_over:
            return self._fail(heads[-1].place)
        roster = self
        for worker in waiting:
            roster = roster._set(worker.place, stage=Stage.LEAVES)
        return roster, [Signal(worker.place, signal.SIGKILL) for worker in waiting]

    def _all_wait(self) -> bool:
        return not any(w.is_member and not w.waits for w in self.staying)

    def _announce(self, chosen: Sequence[Worker], dismissed: Sequence[Worker]) -> Turn:
        stages = {w.place: Stage.WORKS for w in chosen} | {w.place: Stage.LEAVES for w in dismissed}
        workers = tuple(w._replace(stage=stages.get(w.place, w.stage)) for w in self.workers)
        roster = self._replace(workers=workers, generation=self.generation + 1)
        members = tuple(sorted(w.place for w in chosen))
        leaving = tuple(w.place for w in workers if w.stage is Stage.LEAVES)
        return roster, [Announce(roster.generation, members, leaving)]
