"""The supervisor: forks the workers of one machine from a warm process, watches them, and replaces those that fail.

It imports torch once, before it forks, so a worker is there in milliseconds. It has one thread and waits in one place.
Who is a worker is decided by its `roster`; here that is carried out. A worker that it gives up it kills, and it waits
for the end of that process before anybody else goes on: nobody who is not in the present generation can write anything.

Workers die with it (the kernel sees to that), and the segment has no name, so nothing outlives a run.
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from evenstep.core import env
from evenstep.core.children import Child, Children, signal_name
from evenstep.core.config import MAX_SHARDS
from evenstep.core.control import Control
from evenstep.core.errors import ConfigError, PeerError, Stopped
from evenstep.core.events import Event
from evenstep.core.signals import Signals
from evenstep.exchange import generations
from evenstep.exchange.board import Asks, Board
from evenstep.exchange.generations import Generation
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.memory import Starvation
from evenstep.launch.page_process import PageProcess
from evenstep.launch.roster import (
    MAX_CRASHES,
    Announce,
    Decision,
    Ending,
    Fail,
    Fault,
    LeaveOut,
    Lose,
    Regroup,
    Roster,
    Script,
    Signal,
    Stage,
    Start,
    Worker,
)
from evenstep.launch.scribe import Scribe
from evenstep.launch.seen import Seen
from evenstep.launch.worker import STACK_SIGNAL, run_worker
from evenstep.launch.worker_process import WorkerProcess
from evenstep.native import core
from evenstep.run.progress import Progress
from evenstep.transport.segment import Segment

__all__ = ["supervise"]

_GRACE_S = 5.0  # how long the others may take to end once the run has failed, and again before they are killed
_DRAIN_S = 1.0  # how long to read on after the last worker has ended, if something that it started still writes
_LOOK_S = 0.25  # how often to look whether somebody is stopped or stuck
_STOPPED_S = 1.0  # how long a worker may be stopped
_STACK_S = 0.3  # how long a worker that is given up has to write its stack


class _Supervisor:
    def __init__(
        self,
        job: Job,
        console: Console,
        segment: Segment,
        control: Control,
        scribe: Scribe,
        page: PageProcess | None = None,
    ) -> None:
        self._job, self._console, self._segment, self._control = job, console, segment, control
        self._scribe, self._page = scribe, page
        self._seen = Seen()
        self._name = secrets.token_hex(4)
        self._board = Board(segment)
        self._starvation = Starvation()
        self._children = Children(self._on_lines, self._on_end)
        self._roster = Roster(job.num_workers, max_restarts=job.max_restarts)
        self._processes: dict[int, WorkerProcess] = {}  # the present or last one of every place
        self._starts: dict[int, float] = {}  # which places get a worker, and when
        self._members: Sequence[int] = ()
        self._lost_at: float | None = None  # when a worker was lost, until a step is committed again
        self._trained = False  # whether the script has made a run, be it one that meets others at a server
        self._over_since: float | None = None  # since when all but those who catch up have ended
        self._shards: int | None = job.shards
        self._timeout_s = job.step_timeout_s
        self._failed: WorkerProcess | None = None
        self._stop_signal: int | None = None
        self._stopped: dict[str, Any] | None = None
        self._checkpoints_asked = 0
        self._deadline: float | None = None
        self._events: dict[str, Callable[[WorkerProcess, Event], None]] = {
            "progress": lambda _, event: console.progress(Progress(**event["progress"])),
            "made": self._on_made,
            "shards": self._on_run,
            "waits": self._on_waits,
            "committed": self._on_committed,
            "silent": self._on_silent,
            "slow": lambda _, event: console.say(event["slow"]),
            "says": lambda _, event: console.say(event["says"]),
            "prints": lambda worker, event: console.print(worker.number, tuple(event["at"]), event["prints"]),
            "warning": lambda worker, event: console.warn(worker.number, event["warning"]),
            "stopped": self._on_stopped,
            "closed": lambda worker, _: self._on_script(worker, Script.CLOSED),
            "ended": lambda worker, _: self._on_script(worker, Script.ENDED),
            "fingerprint": lambda _, event: console.note_fingerprint(event["operation"], event["fingerprint"]),
            "saved": lambda _, event: self._seen.saved(event["saved"]),
            "fingerprint now": lambda _, event: self._seen.fingerprint(*event["fingerprint now"]),
            "error": self._on_error,
            "final": self._on_final,
        }

    # ---- the one loop ----

    def run(self) -> int:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        with Signals(self._on_signal, *numbers) as signals, self._children as children:
            children.watch(signals, signals.deliver)
            children.watch(self._control.socket, lambda: self._control.answer(self._command))
            if self._page is not None:
                children.adopt(self._page.start(self._segment, os.getpid()))
                self._console.say(f"page {self._page.url}, its buttons need the token {self._page.token}", secret=True)
            for place in range(self._job.num_workers):
                self._start(place, again=False)
            while self._starts or self._roster.alive:
                children.turn(self._wait_s())
                self._look_after()
                self._scribe.write()
            children.finish(_DRAIN_S)
            return self._finish()

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [now + _LOOK_S, *self._starts.values()]
        times += [p.kill_at for p in self._processes.values() if p.child.alive and p.kill_at is not None]
        times += [self._deadline] if self._deadline is not None else []
        return min(times) - now

    def _turn(self, turn: tuple[Roster, Sequence[Decision]]) -> None:
        """Do what the roster has decided."""
        self._roster, decisions = turn
        for decision in decisions:
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Start(place, delay_s):
                self._starts[place] = time.monotonic() + delay_s
            case Lose():
                self._lose(decision)
            case LeaveOut(place):
                worker = self._processes[place]
                self._console.say(f"{worker.describe_end()} before it had caught up; the others go on without it")
                self._console.show_error(worker.error)
            case Fail(place):
                self._fail(self._processes[place])
            case Signal(place, number):
                self._processes[place].child.signal(number)
            case Regroup(generation):
                self._board.ask(Asks.REGROUP, generation)
            case Announce():
                self._announce(decision)

    # ---- starting, losing, giving up ----

    def _start(self, place: int, *, again: bool) -> None:
        self._board.clear(place)
        self._console.begin(place, again=again)

        def main(pipes: Any) -> int:
            variables = env.worker_variables(
                place,
                self._job.num_workers,
                self._job.shards,
                self._segment.fd,
                pipes["events"],
                supervised=True,
                timeout_s=self._job.step_timeout_s,
                resume=self._job.resume,
                standing=self._job.standing.text() if self._job.standing is not None else None,
                job=self._name,
            )
            return run_worker(self._job.script, self._job.args, variables)

        child = self._children.start(main, ("out", "err", "events"), keep={self._segment.fd})
        core.set_pid(self._segment.base, place, child.pid)  # so that the others notice one that ends before it joins
        self._processes[place] = WorkerProcess(place, child)
        self._roster = self._roster.started(place)

    def _lose(self, lost: Lose) -> None:
        worker = self._processes[lost.place]
        how = worker.given_up or worker.describe_end()
        self._console.show_error(worker.error)
        if lost.was_member:
            self._lost_at = self._lost_at or time.monotonic()
            self._abort(worker, how)
        wait = f" in {lost.delay_s:g} s" if lost.delay_s else ""
        next_ = f"{lost.left} go on" if lost.delay_s is None else f"it is replaced{wait}"
        self._console.say(f"{how} at step {self._board.doing(lost.place).step}; {next_}")

    def _fail(self, worker: WorkerProcess) -> None:
        """The run is over, and this worker is why."""
        self._abort(worker, worker.describe_end())
        self._failed = worker
        self._starts.clear()
        self._deadline = time.monotonic() + (0 if self._of(worker).final else _GRACE_S)

    def _abort(self, culprit: WorkerProcess, why: str) -> None:
        core.abort_all(self._segment.base, self._segment.num_workers, culprit.number, why)

    def _of(self, process: WorkerProcess) -> Worker:
        worker = self._roster.of(process.number)
        assert worker is not None, "every process is on the roster"
        return worker

    def _give_up(self, worker: WorkerProcess, why: str, *, leaves: bool = False) -> None:
        """Name a worker that does nothing any more, let it write its stack, and have it killed."""
        doing = self._board.doing(worker.number)
        tag = core.last_post(self._segment.base, worker.number)[2] or "none"
        shard = "" if doing.shard is None else f", shard {doing.shard}"
        worker.given_up = f"{worker.describe()} {why}"
        worker.kill_at = time.monotonic() + _STACK_S
        self._roster = self._roster.gives_up(worker.number, leaves=leaves)
        self._console.say(f"{worker.given_up} at step {doing.step}{shard}, its last exchange was '{tag}'; its stack:")
        worker.child.signal(STACK_SIGNAL)
        worker.child.signal(signal.SIGCONT)

    def _announce(self, said: Announce) -> None:
        rounds = [core.last_post(self._segment.base, place)[0] >> 32 for place in self._processes]
        weights, members = self._job.weights, list(said.members)
        shares = None if weights is None else [weights[n] if n < len(weights) else 1.0 for n in members]
        generation = Generation(said.generation, max(rounds) + 1, members, shares, list(said.leaving))
        generations.announce(self._segment, generation)
        if said.generation > 1 and said.members != self._members:
            self._console.say(f"{len(members)} workers from now on: {', '.join(map(str, members))}")
        self._members = said.members

    # ---- what happens when nothing comes: somebody is stopped, stuck or late ----

    def _look_after(self) -> None:
        now = time.monotonic()
        for place, when in list(self._starts.items()):
            if when <= now:
                del self._starts[place]
                self._start(place, again=True)
        for worker in [p for p in self._processes.values() if p.child.alive]:
            if worker.kill_at is None:
                self._look_at(worker, now)
            elif now >= worker.kill_at:
                worker.child.signal(signal.SIGKILL)
        self._hurry(now)
        if self._deadline is not None and now >= self._deadline:
            self._stop_all()

    def _look_at(self, worker: WorkerProcess, now: float) -> None:
        worker.stopped_since = (worker.stopped_since or now) if worker.child.is_stopped() else None
        if worker.stopped_since is not None and now - worker.stopped_since >= _STOPPED_S:
            self._give_up(worker, f"has been stopped for {now - worker.stopped_since:.1f} s")
        doing = self._board.doing(worker.number)
        if self._timeout_s and doing.busy_s and doing.busy_s > self._timeout_s and not doing.waiting:
            self._children.drain(worker.child, "events")  # perhaps it has just said for whom it waited
            if not any(
                p.child.alive and p.kill_at is not None for p in self._processes.values()
            ):  # one after the other
                self._give_up(worker, f"has been inside of the step for {doing.busy_s:.1f} s")

    def _hurry(self, now: float) -> None:
        """When all others have come to the end of the run, one that still catches up has only so long to get there."""
        late = self._roster.stragglers
        if not late:
            self._over_since = None
            return
        self._over_since = self._over_since or now
        over_s = now - self._over_since
        for worker in [self._processes[w.place] for w in late]:
            if self._timeout_s and over_s > self._timeout_s and worker.kill_at is None:
                why = f"has not caught up {over_s:.1f} s after the others had ended"
                self._give_up(worker, why, leaves=worker.number != 0)  # what comes after the run is worker 0's

    # ---- what the user asks ----

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._ask_for_checkpoint()
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                self._console.say(self._scale(self._roster.wanted + (1 if number == signal.SIGUSR1 else -1)))
            except ConfigError as error:
                self._console.say(str(error))
        elif self._stop_signal is None and self._roster.generation and not self._roster.is_over:
            self._stop_signal = number
            self._deadline = time.monotonic() + self._job.grace_s
            self._board.ask(Asks.STOP, 1)
            self._console.say(f"{signal_name(number)}: stopping after this step; once more stops at once")
            self._turn(self._roster.stop())
            self._starts = {place: when for place, when in self._starts.items() if place in self._roster.starts}
        else:
            if self._stop_signal is not None:
                self._roster = self._roster.kill()
            self._stop_signal = self._stop_signal or number
            self._stopped = None
            self._stop_all()

    def _ask_for_checkpoint(self) -> None:
        self._checkpoints_asked += 1
        self._board.ask(Asks.CHECKPOINT, self._checkpoints_asked)

    def _stop_all(self) -> None:
        gently = self._roster.ending is not Ending.KILLED
        for worker in self._processes.values():
            worker.child.signal(signal.SIGTERM if gently else signal.SIGKILL)
        self._starts.clear()
        self._roster = self._roster.kill()
        self._deadline = time.monotonic() + _GRACE_S

    def _scale(self, number: int) -> str:
        """Have more or fewer workers from the next step on; returns what will be, or raises ConfigError."""
        most = self._shards or MAX_SHARDS
        if not 1 <= number <= most:
            raise ConfigError(f"{number} workers, expected 1 to {most}: every worker needs a shard")
        self._turn(self._roster.scale(number, MAX_SHARDS))
        return f"{number} workers from the next step on"

    def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer what came through the control socket."""
        if "scale" in request:
            try:
                return {"said": self._scale(int(request["scale"]))}
            except (ConfigError, TypeError) as error:
                return {"error": str(error)}
        if "checkpoint" in request:
            self._ask_for_checkpoint()
            return {"said": "a checkpoint is written after this step, if the script has said where"}
        if "stop" in request:
            os.kill(os.getpid(), signal.SIGTERM)
            return {"said": "stopping after this step"}
        if "fingerprint" in request:
            self._board.ask_fingerprint()
            return {"said": "the fingerprint is taken after this step"}
        return {
            "generation": self._roster.generation,
            "operations": self._board.committed,
            "wanted": self._roster.wanted,
            "restarts": self._roster.restarts,
            "num_shards": self._shards,
            "script": str(self._job.script),
            **self._seen.described(self._console.said),
            "workers": [
                {
                    "worker": worker.place,
                    "pid": self._processes[worker.place].child.pid,
                    "step": self._board.doing(worker.place).step,
                    "member": worker.is_member,
                }
                for worker in self._roster.alive
            ],
        }

    # ---- what workers say ----

    def _on_lines(self, child: Child, kind: str, lines: Sequence[bytes]) -> None:
        worker = next(p for p in self._processes.values() if p.child is child)
        if kind != "events":
            self._console.show(worker.number, lines, is_error=kind == "err")
            return
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # it was killed in the middle of a line
            for name, handle in self._events.items():
                if name in event:
                    handle(worker, event)

    def _on_end(self, child: Child) -> None:
        worker = next((p for p in self._processes.values() if p.child is child), None)
        if worker is None:
            self._console.say(f"the page {child.describe_end()}; the run goes on without it")
            return
        code = child.reap()
        if code == -signal.SIGKILL and worker.given_up is None and self._starvation.struck():
            worker.starved = True
            self._roster = self._roster.starves(worker.number)
        self._turn(self._roster.ended(worker.number, code, self._board.committed))

    def _on_made(self, _: WorkerProcess, __: Event) -> None:
        self._trained = True

    def _on_run(self, worker: WorkerProcess, event: Event) -> None:
        self._shards, self._timeout_s = event["shards"], event["timeout_s"]
        self._on_script(worker, Script.INSIDE)

    def _on_script(self, worker: WorkerProcess, script: Script) -> None:
        self._roster = self._roster.speaks(worker.number, script)

    def _on_waits(self, worker: WorkerProcess, _: Event) -> None:
        self._children.drain(worker.child, "out")
        self._console.caught_up(worker.number)
        self._turn(self._roster.waits(worker.number))

    def _on_silent(self, _: WorkerProcess, event: Event) -> None:
        culprit = self._processes[event["silent"]]
        if culprit.child.alive and culprit.kill_at is None and not self._of(culprit).waits:
            self._give_up(culprit, "says nothing: " + event["text"])

    def _on_stopped(self, _: WorkerProcess, event: Event) -> None:
        self._stopped = event["stopped"]
        self._roster = self._roster._replace(has_stopped=True)

    def _on_error(self, worker: WorkerProcess, event: Event) -> None:
        worker.error = event["error"]
        hopeless = Fault.HOPELESS if event.get("hopeless") else Fault.ERROR
        self._roster = self._roster.faults(worker.number, Fault.MISTAKE if event.get("mistake") else hopeless)
        self._console.log_error(worker.number, event["error"])

    def _on_final(self, worker: WorkerProcess, _: Event) -> None:
        self._roster = self._roster.faults(worker.number, self._of(worker).fault, final=True)

    def _on_committed(self, _: WorkerProcess, event: Event) -> None:
        self._roster = self._roster.committed()
        if self._lost_at is not None:
            late_s = time.monotonic() - self._lost_at
            self._seen.recovered(late_s)
            self._console.say(f"step {event['committed']} is committed, {late_s:.3f} s after a worker was lost")
            self._lost_at = None

    # ---- the end ----

    def _finish(self) -> int:
        self._console.end_progress()
        self._scribe.finish(self._trained)
        if self._failed is not None:
            return self._report_failure(self._failed)
        if self._stop_signal is not None and not self._came_to_its_end():
            name = signal_name(self._stop_signal)
            if self._stopped is None:
                self._console.say(f"stopped by {name}")
                return 128 + self._stop_signal
            where = self._stopped["checkpoint"]
            saved = f"its checkpoint is {where}: go on with --resume" if where else "nothing was saved"
            self._console.say(f"stopped by {name} after step {self._stopped['step']}; {saved}")
            return Stopped.exit_code
        self._console.show_fingerprint()
        if self._job.num_workers > 1 and not self._trained:
            self._console.say(
                f"{self._job.script} made no evenstep.Run: {self._job.num_workers} workers have each run all of it by "
                "themselves; train inside `with evenstep.Run() as run`"
            )
        return 0

    def _came_to_its_end(self) -> bool:
        """Whether the run was over before it could be stopped: its last step was done already."""
        well = all(w.code == 0 or w.stage is Stage.LEFT for w in self._roster.workers)
        return well and self._roster.is_over and self._roster.ending is not Ending.KILLED

    def _report_failure(self, worker: WorkerProcess) -> int:
        """Show the error of the worker that failed first (the others fail because of it), last and whole."""
        found, code = self._of(worker), worker.child.reap()
        if found.fault is not Fault.MISTAKE:
            always = self._roster.crashes_always(found)
            again = f", as {MAX_CRASHES - 1} before it without a committed step in between" if always else ""
            self._console.say(f"{worker.describe_end()}{again}")
        self._console.show_error(worker.error)
        if code == 0 and not worker.error:
            self._console.say("it ended while the others waited for it")
            return PeerError.exit_code
        return code if code > 0 else 128 - code


def supervise(job: Job) -> int:
    """Run a job to its end; return the exit code: 0, 75 if it was asked to stop, or the failing worker's.

    Raises:
        ConfigError: The logs or the segment cannot be made; nothing was started.
    """
    group = job.standing.group if job.standing is not None else None
    with ExitStack() as stack:
        console = stack.enter_context(Console(job.log_dir, job.num_workers, group, job.report))
        import torch._inductor.config  # noqa: F401  # a second that every worker would spend in its first step

        segment = stack.enter_context(closing(Segment.create(MAX_SHARDS)))
        control = stack.enter_context(closing(Control()))
        scribe = stack.enter_context(closing(Scribe(segment, job, console.say)))
        page = None if job.page is None else stack.enter_context(closing(PageProcess(job.page)))
        return _Supervisor(job, console, segment, control, scribe, page).run()
