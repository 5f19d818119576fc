"""The workers of one machine: their processes, their segment, the bridge to other machines, and a watch over them.

The head decides what is to be done, through a `RunMachine` for each machine, near or far; what happens is reported to a
`Hears`. A machine itself decides one thing: to kill one of its workers that is stopped or stuck.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evenstep.core import env
from evenstep.core.children import Child, Children, default_signals
from evenstep.exchange import generations
from evenstep.exchange.board import Asks, Board
from evenstep.exchange.generations import Generation
from evenstep.exchange.journal import Journal
from evenstep.launch.job import Job
from evenstep.launch.memory import Starvation
from evenstep.launch.trails import TrailPiece, Trails
from evenstep.launch.worker import STACK_SIGNAL, run_worker
from evenstep.launch.worker_process import WorkerProcess
from evenstep.native import core
from evenstep.transport import bridge
from evenstep.transport.bridge import Bridging
from evenstep.transport.segment import Segment

__all__ = ["End", "Hears", "Here", "RunMachine"]

_STOPPED_S = 1.0  # how long a worker may be stopped
_STACK_S = 3.0  # how long a worker that is given up may take to write its stack
_WRITES_S = 0.02  # how often to look whether it has
_MEET_S = 30.0  # how long the bridges of a generation may take to find each other


@dataclass(frozen=True)
class End:
    """How a worker's process ended.

    Attributes:
        code: Its exit code, or minus the signal that killed it.
        text: The same, as a sentence that names the worker.
        given_up: Why we killed it, as a sentence like `text`, if it made no progress.
        starved: Whether the system killed it because memory had run out.
        step: The step that it was in, or had last done.
    """

    code: int
    text: str
    given_up: str | None
    starved: bool
    step: int


class Hears(Protocol):
    """Is told what happens on a machine."""

    def heard(self, machine: int, place: int, kind: str, lines: Sequence[bytes]) -> None:
        """A worker has written whole lines: to "out", "err" or "events"."""

    def did(self, machine: int, pieces: Sequence[TrailPiece], ahead_ns: int = 0) -> None:
        """What workers did when, by their machine's clock, which is ahead of this one's by `ahead_ns`."""

    def gave_up(self, machine: int, place: int, text: str, leaves: bool) -> None:
        """A worker that makes no progress is about to be killed; with `leaves`, nobody replaces it."""

    def ended(self, machine: int, place: int, end: End) -> None:
        """A worker's process has ended."""

    def broke(self, machine: int, generation: int, culprit: int, text: str) -> None:
        """The bridge of a generation has ended because the machine of the worker `culprit` cannot be reached."""


class RunMachine(Protocol):
    """A machine of a run, as the head sees it.

    Attributes:
        number: Its number; 0 is the head.
        name: Its host name.
        capacity: How many workers it has offered.
    """

    number: int
    name: str
    capacity: int

    @property
    def round(self) -> int:
        """The highest number of any exchange there so far. Exact while no worker is active."""

    def start(self, place: int, num_workers: int) -> None:
        """Start a worker in a place; `num_workers` is how many the run began with."""

    def signal(self, place: int, number: int) -> None:
        """Send a signal to a worker, if it is alive."""

    def give_up(self, place: int, why: str, *, leaves: bool = False) -> None:
        """Have a worker that makes no progress write its stack, then kill it."""

    def abort(self, culprit: int, why: str) -> None:
        """Stop all waiting there."""

    def limit(self, timeout_s: float | None) -> None:
        """Say how long a step may take."""

    def announce(self, generation: Generation, bridging: Bridging | None, *, lacks_state: bool) -> None:
        """Begin a generation with workers of this machine.

        Args:
            generation: The generation.
            bridging: How to reach the other machines, if there are any.
            lacks_state: Whether this machine was not in the previous generation.
        """

    def leave_out(self) -> None:
        """A generation begins without workers of this machine."""

    def row_of(self, place: int) -> dict[str, Any]:
        """What a worker is doing and has done; see `Board.row`."""

    def pid_of(self, place: int) -> int:
        """The process id of a worker."""


class Here:
    """This machine: see `RunMachine`.

    Args:
        number: Its number.
        name: Its host name.
        job: What to run.
        segment: The shared memory of its workers.
        hears: Is told what happens.
        machines: Whether there may be other machines.
        job_name: Distinguishes the job from others.
        traced: Whether to collect what its workers do when.
    """

    def __init__(
        self,
        number: int,
        name: str,
        job: Job,
        segment: Segment,
        hears: Hears,
        *,
        machines: bool,
        job_name: str,
        traced: bool = False,
    ) -> None:
        self.number, self.name, self.capacity = number, name, job.num_workers
        self._job, self._segment, self._hears = job, segment, hears
        self._machines, self._job_name = machines, job_name
        self.board, self._trails = Board(segment), Trails(segment) if traced else None
        self.children = Children(self._on_lines, self._on_end)
        self._attended: dict[Child, Callable[[Child], None]] = {}
        self._processes: dict[int, WorkerProcess] = {}  # by place, the present or last one
        self._bridge: tuple[Child, int] | None = None  # with its generation
        self._starvation = Starvation()
        self._timeout_s = job.step_timeout_s

    # ---- what the head asks for ----

    @property
    def round(self) -> int:
        """See `RunMachine`."""
        slots = range(self._segment.num_workers)
        return max(core.last_post(self._segment.base, place)[0] >> 32 for place in slots)

    def attend(self, child: Child, ended: Callable[[Child], None]) -> None:
        """Look after a process that is not a worker; it ends with the others.

        Args:
            child: The process.
            ended: Called with it if it ends before them.
        """
        self._attended[child] = ended
        self.children.adopt(child)

    def start(self, place: int, num_workers: int) -> None:
        """See `RunMachine`."""
        self.board.clear(place)

        def main(pipes: Mapping[str, int]) -> int:
            job = self._job
            variables = env.worker_variables(
                place,
                num_workers,
                job.shards,
                self._segment.fd,
                pipes["events"],
                supervised=True,
                timeout_s=job.step_timeout_s,
                resume=job.resume,
                standing=job.standing.text() if job.standing is not None else None,
                job=self._job_name,
                machines=() if self._machines else None,
                recheck=job.recheck,
                tolerate_wrong=job.tolerate_wrong,
            )
            return run_worker(job.script, job.args, variables)

        child = self.children.start(main, ("out", "err", "events"), keep={self._segment.fd})
        core.set_pid(self._segment.base, place, child.pid)  # so that others notice if it ends before it joins
        if self._trails is not None:
            self._trails.started(place, child.pid)
        self._processes[place] = WorkerProcess(place, child, where=f" on {self.name}" if self._machines else "")

    def signal(self, place: int, number: int) -> None:
        """See `RunMachine`."""
        self._processes[place].child.signal(number)

    def give_up(self, place: int, why: str, *, leaves: bool = False) -> None:
        """See `RunMachine`. Nothing changes for a worker that is about to be killed already."""
        worker = self._processes[place]
        if not worker.child.alive or worker.kill_at is not None:
            return
        doing = self.board.doing(place)
        tag = core.last_post(self._segment.base, place)[2] or "none"
        shard = "" if doing.shard is None else f", shard {doing.shard}"
        worker.given_up = f"{worker.describe()} {why}"
        worker.kill_at = time.monotonic() + _STACK_S
        text = f"{worker.given_up} at step {doing.step}{shard}, its last exchange was '{tag}'; its stack:"
        self._hears.gave_up(self.number, place, text, leaves)
        worker.child.interrupt(STACK_SIGNAL)
        worker.child.signal(signal.SIGCONT)

    def abort(self, culprit: int, why: str) -> None:
        """See `RunMachine`."""
        core.abort_all(self._segment.base, self._segment.num_workers, culprit, why)

    def limit(self, timeout_s: float | None) -> None:
        """See `RunMachine`."""
        self._timeout_s = timeout_s

    def ask(self, what: Asks, number: int) -> None:
        """Ask the workers for something; asking on one machine is enough, since they tell each other."""
        self.board.ask(what, number)

    def announce(self, generation: Generation, bridging: Bridging | None, *, lacks_state: bool) -> None:
        """See `RunMachine`. The last bridge has ended before anyone is told of this generation."""
        self._end_bridge()
        if lacks_state:
            self.board.lacks_state = True
        if bridging is not None:
            self._start_bridge(generation.number, bridging)
        generations.announce(self._segment, generation)

    def leave_out(self) -> None:
        """See `RunMachine`."""
        self._end_bridge()

    def row_of(self, place: int) -> dict[str, Any]:
        """See `RunMachine`."""
        return self.board.row(place)

    def pid_of(self, place: int) -> int:
        """See `RunMachine`."""
        return self._processes[place].child.pid

    @property
    def committed(self) -> int:
        """How many operations are committed here."""
        return self.board.committed

    def journal(self, begin: int) -> tuple[int, bytes]:
        """How many operations are committed here, and the journal from the entry `begin` on."""
        journal = Journal(self._segment)
        return journal.committed, journal.packed(journal.committed, begin)

    def catch_up(self, begin: int, packed: bytes) -> None:
        """Take in entries of the journal, from `begin` on, while no worker of this machine is in a generation."""
        journal = Journal(self._segment)
        entries = Journal.unpack(packed)[journal.committed - begin :]
        journal.append_packed(b"".join(entry.pack() for entry in entries), len(entries))

    # ---- the bridge ----

    def _start_bridge(self, generation: int, plan: Bridging) -> None:
        def main(_: Mapping[str, int]) -> int:
            default_signals()
            if (faults := env.read().faults) is not None:
                from evenstep.testing.faults import arm  # imported here since only tests need it

                arm(faults, self.number)
            return 0 if bridge.serve(self._segment, generation, plan, _MEET_S) is None else 1

        self._bridge = (self.children.start(main, (), keep={self._segment.fd}), generation)

    def _end_bridge(self) -> None:
        if self._bridge is not None:
            self.children.end(self._bridge[0])
            self._bridge = None

    # ---- the watch ----

    def look_after(self, now: float) -> None:
        """Kill workers that are due, and find those that are stopped or stuck. Call it several times a second."""
        if self._trails is not None and (pieces := self._trails.take()):
            self._hears.did(self.number, pieces)
        for worker in [p for p in self._processes.values() if p.child.alive]:
            if worker.kill_at is None:
                self._look_at(worker, now)
            elif now >= worker.kill_at or (worker.writes and not worker.child.is_interrupted(STACK_SIGNAL)):
                worker.child.signal(signal.SIGKILL)

    @property
    def next_look(self) -> list[float]:
        """When to look whether workers that are given up can be killed."""
        given_up = [p for p in self._processes.values() if p.child.alive and p.kill_at is not None]
        return [time.monotonic() + _WRITES_S] * len(given_up)

    def _look_at(self, worker: WorkerProcess, now: float) -> None:
        worker.stopped_since = (worker.stopped_since or now) if worker.child.is_stopped() else None
        if worker.stopped_since is not None and now - worker.stopped_since >= _STOPPED_S:
            self.give_up(worker.number, f"has been stopped for {now - worker.stopped_since:.1f} s")
        doing = self.board.doing(worker.number)
        if self._timeout_s and doing.busy_s and doing.busy_s > self._timeout_s and not doing.waiting:
            self.children.drain(worker.child, "events")  # it may just have reported whom it waits for
            if not self.next_look:  # one at a time
                self.give_up(worker.number, f"has been inside the step for {doing.busy_s:.1f} s")

    def _on_lines(self, child: Child, kind: str, lines: Sequence[bytes]) -> None:
        worker = next(p for p in self._processes.values() if p.child is child)
        if kind == "events":
            self.children.drain(child, "out")  # what it printed before this event is shown before it
        elif kind == "err" and worker.kill_at is not None:
            worker.writes = True
        self._hears.heard(self.number, worker.number, kind, lines)

    def _on_end(self, child: Child) -> None:
        if self._bridge is not None and child is self._bridge[0]:
            generation, self._bridge = self._bridge[1], None
            culprit, text = core.aborted(self._segment.base) or (0, "its bridge " + child.describe_end())
            self._hears.broke(self.number, generation, culprit, text)
            return
        if child in self._attended:
            self._attended[child](child)
            return
        worker = next(p for p in self._processes.values() if p.child is child)
        code = child.reap()
        if self._trails is not None:
            self._trails.ended(worker.number)
            self._hears.did(self.number, self._trails.take(at_once=True))
        if code == -signal.SIGKILL and worker.given_up is None and self._starvation.struck():
            worker.starved = True
        step, text = self.board.doing(worker.number).step, worker.describe_end()
        self._hears.ended(self.number, worker.number, End(code, text, worker.given_up, worker.starved, step))
