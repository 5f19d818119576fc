"""The workers of a run on all its machines: what the roster decides is carried out here.

The `roster` is a pure value that says who is a worker; a `RunCrew` holds it, starts and ends workers through the
machines, and tells the user. A worker that is given up is killed, and its end is awaited before the others go on, so
nobody outside the present generation can write anything.
"""

import signal
import time
from collections.abc import Collection, Sequence

from evenstep.exchange.board import Asks
from evenstep.exchange.generations import Generation
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.machine import End
from evenstep.launch.machines import Machines
from evenstep.launch.roster import (
    Announce,
    Decision,
    Ending,
    Fail,
    LeaveOut,
    Lose,
    Regroup,
    Roster,
    Signal,
    Start,
    Worker,
)
from evenstep.launch.seat import Seat
from evenstep.page.seen import Seen

__all__ = ["RunCrew", "listed"]

_GRACE_S = 5.0  # how long the others may take to end after the run has failed, and again before they are killed


class RunCrew:
    """The workers, and what is decided about them.

    Args:
        job: What to run.
        console: Where the user is told.
        machines: Where the workers are.
        seen: Takes the faults that the page of the run shows.

    Attributes:
        roster: Who is a worker.
        seats: The present or last worker of every place.
        began_with: How many workers there were at first, keepers not counted; None: the run has not begun.
        num_keepers: How many workers keep the state and compute nothing.
        shards: Parts of every batch, once known.
        timeout_s: How long a step may take, once known.
        failed: The worker whose failure ends the run.
        deadline: When everyone still there is told to end.
    """

    def __init__(self, job: Job, console: Console, machines: Machines, seen: Seen) -> None:
        self._job, self._console, self._machines, self._seen = job, console, machines, seen
        self.roster = Roster(job.num_workers, max_restarts=job.max_restarts)
        self.seats: dict[int, Seat] = {}
        self.began_with: int | None = None
        self.num_keepers = int(job.keeper)
        self.shards, self.timeout_s = job.shards, job.step_timeout_s
        self.failed: Seat | None = None
        self.deadline: float | None = None
        self._starts: dict[int, float] = {}  # when each place that is to get a worker gets it
        self._members: Sequence[int] = ()
        self._lost_at: float | None = None  # when a worker was lost, until a step is committed again
        self._over_since: float | None = None  # when all workers but those catching up had ended

    def begin(self) -> None:
        """Start the first workers, if all the machines that the run waits for are there."""
        if self.began_with is not None or not self._machines.are_enough:
            return
        places = [place for machine in self._machines.all.values() for place in self._machines.places_of(machine)]
        self.began_with = max(len(places) - self.num_keepers, 1)
        self.roster = self.roster._replace(wanted=len(places))
        for place in places:
            self._start(place, again=False)

    @property
    def is_there(self) -> bool:
        """Whether there is a worker, or will be one."""
        return bool(self._starts or self.roster.alive)

    @property
    def num_wanted(self) -> int:
        """How many workers there are to be, keepers not counted."""
        return self.roster.wanted - self.num_keepers

    def worker(self, seat: Seat) -> Worker:
        """A worker as the roster has it."""
        worker = self.roster.of(seat.number)
        assert worker is not None, "every seat is on the roster"
        return worker

    # ---- what the roster decides ----

    def turn(self, turn: tuple[Roster, Sequence[Decision]]) -> None:
        """Take the next roster, and carry out what it has decided."""
        self.roster, decisions = turn
        for decision in decisions:
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Start(place, delay_s):
                self._starts[place] = time.monotonic() + delay_s
            case Lose():
                self._lose(decision)
            case LeaveOut(place):
                worker = self.seats[place]
                self._console.say(f"{worker.ended.text} before it had caught up; the others go on without it")
                self._console.show_error(worker.error)
            case Fail(place):
                self._fail(self.seats[place])
            case Signal(place, number):
                self._machines.of(place).signal(place, number)
            case Regroup(generation):
                self._machines.here.ask(Asks.REGROUP, generation)
            case Announce():
                self._announce(decision)

    def _start(self, place: int, *, again: bool) -> None:
        self._console.begin(place, again=again)
        machine = self._machines.of(place)
        assert self.began_with is not None, "workers are started when the run has begun"
        machine.start(place, self.began_with)
        self.seats[place] = Seat(place)
        self.roster = self.roster.started(place, machine.number)

    def _lose(self, lost: Lose) -> None:
        worker = self.seats[lost.place]
        how = worker.ended.given_up or worker.ended.text
        if worker.begins_again:
            how = f"worker {worker.number} starts over, since nobody has the state any more"
        self._console.show_error(worker.error)
        if lost.was_member:
            self._lost_at = self._lost_at or time.monotonic()
            self.abort(worker.number, how)
        wait = f" in {lost.delay_s:g} s" if lost.delay_s else ""
        next_ = f"{lost.left} go on" if lost.delay_s is None else f"it is replaced{wait}"
        sentence = f"{how} at step {worker.ended.step}; {next_}"
        self._console.say(sentence)
        if lost.was_member:
            self._seen.lost(sentence)

    def _fail(self, worker: Seat) -> None:
        """End the run because of this worker."""
        self.abort(worker.number, worker.ended.text)
        self.failed = worker
        self._starts.clear()
        self.deadline = time.monotonic() + (0 if self.worker(worker).final else _GRACE_S)

    def _announce(self, said: Announce) -> None:
        weights, members = self._job.weights, list(said.members)
        shares = None if weights is None else [weights[n] if n < len(weights) else 1.0 for n in members]
        generation = Generation(said.generation, 0, members, shares, list(said.leaving), keeper=self._job.keeper)
        self._machines.announce(generation)
        if said.generation > 1 and said.members != self._members:
            counted = members[self.num_keepers :] if len(members) > 1 else members  # the keeper has the first place
            self._console.say(f"{len(counted)} workers from now on: {listed(counted)}")
        self._members = said.members

    # ---- what happens to workers ----

    def abort(self, culprit: int, why: str) -> None:
        """Make all workers on all machines stop waiting for each other."""
        for machine in self._machines.all.values():
            machine.abort(culprit, why)

    def give_up(self, worker: Seat, why: str, *, leaves: bool = False) -> None:
        """Kill a worker that makes no progress; with `leaves`, nobody replaces it."""
        worker.given_up = True
        self._machines.of(worker.number).give_up(worker.number, why, leaves=leaves)

    def ended(self, place: int, end: End, num_committed: int) -> None:
        """A worker's process has ended."""
        self.seats[place].end = end
        if end.starved:
            self.roster = self.roster.starves(place)
        self.turn(self.roster.ended(place, end.code, num_committed))

    def lose_machine(self, places: Collection[int], why: str) -> None:
        """The workers of these places are lost with their machine."""
        lost = self.alive_in(places)
        if any(worker.is_member for worker in lost):
            self._lost_at = self._lost_at or time.monotonic()
            self.abort(lost[0].place, why)
        self._starts = {place: when for place, when in self._starts.items() if place not in places}
        self.turn(self.roster.loses(places))

    def alive_in(self, places: Collection[int]) -> list[Worker]:
        """The workers of these places that have a process."""
        return [worker for place in places if (worker := self.roster.of(place)) is not None and worker.alive]

    def limit(self, shards: int, timeout_s: float | None) -> None:
        """The script has said how many shards it has, and how long a step may take."""
        if (self.shards, self.timeout_s) != (shards, timeout_s):
            self.shards, self.timeout_s = shards, timeout_s
            for machine in self._machines.all.values():
                machine.limit(timeout_s)

    def committed(self, step: int) -> None:
        """A step is committed: whatever failed before it, the run makes progress."""
        self.roster = self.roster.committed()
        self._machines.committed()
        if self._lost_at is not None:
            late_s = time.monotonic() - self._lost_at
            self._seen.recovered(late_s)
            self._console.say(f"step {step} is committed, {late_s:.3f} s after a worker was lost")
            self._lost_at = None

    # ---- what happens with time ----

    def next_look(self) -> list[float]:
        """When something is due."""
        return [*self._starts.values(), *([self.deadline] if self.deadline is not None else [])]

    def look_after(self, now: float) -> None:
        """Start workers that are due, give up those that catch up too slowly, and end everyone at the deadline."""
        for place, when in list(self._starts.items()):
            if when <= now:
                del self._starts[place]
                self._start(place, again=True)
        self._hurry(now)
        if self.deadline is not None and now >= self.deadline:
            self.end_all()

    def _hurry(self, now: float) -> None:
        """Give up a worker that is still catching up a step's timeout after all others had ended."""
        late = self.roster.stragglers
        if not late:
            self._over_since = None
            return
        self._over_since = self._over_since or now
        over_s = now - self._over_since
        for worker in [self.seats[w.place] for w in late]:
            if self.timeout_s and over_s > self.timeout_s and not worker.given_up:
                why = f"has not caught up {over_s:.1f} s after the others ended"
                self.give_up(worker, why, leaves=worker.number != 0)  # worker 0 does what comes after the run

    # ---- the end ----

    def stop(self, grace_s: float) -> None:
        """Ask the workers to stop after this step, within `grace_s`."""
        self.deadline = time.monotonic() + grace_s
        self._machines.here.ask(Asks.STOP, 1)
        self.turn(self.roster.stop())
        self._starts = {place: when for place, when in self._starts.items() if place in self.roster.starts}

    def end_all(self) -> None:
        """Tell everyone to end now; called again, kill them."""
        gently = self.roster.ending is not Ending.KILLED
        for worker in self.roster.alive:
            self._machines.of(worker.place).signal(worker.place, signal.SIGTERM if gently else signal.SIGKILL)
        self._starts.clear()
        self.roster = self.roster.kill()
        self.deadline = time.monotonic() + _GRACE_S


def listed(places: Collection[int]) -> str:
    """Places for the user."""
    return ", ".join(map(str, places))
