"""The supervisor: decides who the workers of a run are, on this machine and on those that have joined it.

Workers are forked from a warm process on each machine (`machine.py`): torch is imported once, so a worker is there in
milliseconds. The supervisor has one thread and waits in one place. Who is a worker is decided by its `roster`; here
that is carried out. A worker that is given up is killed, and its end is waited for before anybody else goes on: nobody
who is not in the present generation can write anything. A machine that is lost is never asked again: it ends its
workers by itself when it hears nothing any more, and what they would write reaches nobody.

Workers die with their supervisor (the kernel sees to that), and the segment has no name, so nothing outlives a run.
"""

import json
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

from evenstep.core.children import Child, signal_name
from evenstep.core.config import MAX_SHARDS
from evenstep.core.control import Control
from evenstep.core.errors import ConfigError, PeerError, Stopped
from evenstep.core.events import Event
from evenstep.core.signals import Signals
from evenstep.exchange.board import Asks
from evenstep.exchange.generations import Generation
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.machine import End, Here, Machine
from evenstep.launch.machines import Machines
from evenstep.launch.roster import (
    MAX_CRASHES,
    Announce,
    Decision,
    Ending,
    Fail,
    LastWord,
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
from evenstep.launch.seat import Seat
from evenstep.launch.trace_file import TraceFile
from evenstep.launch.trails import TrailPiece
from evenstep.launch.worker import warm_up
from evenstep.page.answers import answer
from evenstep.page.process import PageProcess
from evenstep.page.seen import Seen
from evenstep.run.progress import Progress
from evenstep.transport.segment import Segment

__all__ = ["supervise"]

_GRACE_S = 5.0  # how long the others may take to end once the run has failed, and again before they are killed
_DRAIN_S = 1.0  # how long to read on after the last worker has ended, if something that it started still writes
_LOOK_S = 0.25  # how often to look whether somebody is stopped or stuck


class _Supervisor:
    def __init__(
        self,
        job: Job,
        console: Console,
        segment: Segment,
        control: Control,
        scribe: Scribe,
        page: PageProcess | None = None,
        trace: TraceFile | None = None,
    ) -> None:
        self._job, self._console, self._control = job, console, control
        self._segment, self._scribe, self._page, self._trace = segment, scribe, page, trace
        self._seen, self._opened = Seen(), ExitStack()
        machines = job.listen is not None
        name = socket.gethostname()
        self._here = Here(
            0, name, job, segment, self, machines=machines, job_name=secrets.token_hex(4), traced=trace is not None
        )
        self._board = self._here.board
        self._machines = Machines(self._here, job, self, console.say)
        self._roster = Roster(job.num_workers, max_restarts=job.max_restarts)
        self._seats: dict[int, Seat] = {}  # the present or last worker of every place
        self._starts: dict[int, float] = {}  # which places get a worker, and when
        self._began_with: int | None = None  # how many workers there were at first; None: not yet
        self._keepers = int(job.keeper)  # workers that compute nothing, and are not counted
        self._members: Sequence[int] = ()
        self._lost_at: float | None = None  # when a worker was lost, until a step is committed again
        self._trained = False  # whether the script has made a run, be it one that meets others at a server
        self._over_since: float | None = None  # since when all but those who catch up have ended
        self._shards: int | None = job.shards
        self._timeout_s = job.step_timeout_s
        self._failed: Seat | None = None
        self._stop_signal: int | None = None
        self._stopped: dict[str, Any] | None = None
        self._checkpoints_asked = 0
        self._deadline: float | None = None
        self._wrong: Counter[int] = Counter()  # how often the worker of each place computed wrong
        self._events: dict[str, Callable[[Seat, Event], None]] = {
            "progress": lambda _, event: console.progress(Progress(**event["progress"])),
            "made": self._on_made,
            "shards": self._on_run,
            "waits": self._on_waits,
            "committed": self._on_committed,
            "silent": self._on_silent,
            "wrong": self._on_wrong,
            "slow": lambda _, event: console.say(event["slow"]),
            "says": lambda _, event: console.say(event["says"]),
            "prints": lambda worker, event: console.print(worker.number, tuple(event["at"]), event["prints"]),
            "warning": lambda worker, event: console.warn(worker.number, event["warning"]),
            "stopped": self._on_stopped,
            "closed": lambda worker, _: self._on_script(worker, Script.CLOSED),
            "ended": lambda worker, _: self._on_script(worker, Script.ENDED),
            "fingerprint": lambda _, event: console.note_fingerprint(event["operation"], event["fingerprint"]),
            "page": self._on_page,
            "saved": lambda _, event: self._seen.saved(event["saved"]),
            "fingerprint now": lambda _, event: self._seen.fingerprint(*event["fingerprint now"]),
            "error": self._on_error,
            "begins again": self._on_begins_again,
            "final": self._on_final,
        }

    # ---- the one loop ----

    def run(self) -> int:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        children = self._here.children
        with self._opened, Signals(self._on_signal, *numbers) as signals, children, self._machines:
            children.watch(signals, signals.deliver)
            children.watch(self._control.socket, lambda: self._control.answer(self._command))
            if self._page is not None:
                self._show_page(self._page)
            self._begin()
            while self._starts or self._roster.alive or self._awaits_machines:
                children.turn(self._wait_s())
                self._machines.turn(time.monotonic())
                self._look_after()
                self._scribe.write()
            children.finish(_DRAIN_S)
            code = self._finish()
            self._machines.end(code)
            return code

    def _begin(self) -> None:
        """Start the first workers, if all machines are there that are waited for."""
        if not self._machines.are_enough:
            return
        places = [place for machine in self._machines.all.values() for place in self._machines.places_of(machine)]
        self._began_with = max(len(places) - self._keepers, 1)
        self._roster = self._roster._replace(wanted=len(places))
        for place in places:
            self._start(place, again=False)

    @property
    def _awaits_machines(self) -> bool:
        return self._began_with is None and self._stop_signal is None

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [now + (0.01 if self._machines.is_busy else _LOOK_S), *self._starts.values(), *self._here.next_look]
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
                worker = self._seats[place]
                self._console.say(f"{worker.ended.text} before it had caught up; the others go on without it")
                self._console.show_error(worker.error)
            case Fail(place):
                self._fail(self._seats[place])
            case Signal(place, number):
                self._machines.of(place).signal(place, number)
            case Regroup(generation):
                self._here.ask(Asks.REGROUP, generation)
            case Announce():
                self._announce(decision)

    # ---- starting, losing, giving up ----

    def _start(self, place: int, *, again: bool) -> None:
        self._console.begin(place, again=again)
        machine = self._machines.of(place)
        assert self._began_with is not None, "workers are started when the run has begun"
        machine.start(place, self._began_with)
        self._seats[place] = Seat(place)
        self._roster = self._roster.started(place, machine.number)

    def _lose(self, lost: Lose) -> None:
        worker = self._seats[lost.place]
        how = worker.ended.given_up or worker.ended.text
        if worker.begins_again:
            how = f"worker {worker.number} begins again, for nobody has the state any more"
        self._console.show_error(worker.error)
        if lost.was_member:
            self._lost_at = self._lost_at or time.monotonic()
            self._abort(worker.number, how)
        wait = f" in {lost.delay_s:g} s" if lost.delay_s else ""
        next_ = f"{lost.left} go on" if lost.delay_s is None else f"it is replaced{wait}"
        sentence = f"{how} at step {worker.ended.step}; {next_}"
        self._console.say(sentence)
        if lost.was_member:
            self._seen.lost(sentence)

    def _fail(self, worker: Seat) -> None:
        """The run is over, and this worker is why."""
        self._abort(worker.number, worker.ended.text)
        self._failed = worker
        self._starts.clear()
        self._deadline = time.monotonic() + (0 if self._of(worker).final else _GRACE_S)

    def _abort(self, culprit: int, why: str) -> None:
        for machine in self._machines.all.values():
            machine.abort(culprit, why)

    def _of(self, seat: Seat) -> Worker:
        worker = self._roster.of(seat.number)
        assert worker is not None, "every seat is on the roster"
        return worker

    def _give_up(self, worker: Seat, why: str, *, leaves: bool = False) -> None:
        worker.given_up = True
        self._machines.of(worker.number).give_up(worker.number, why, leaves=leaves)

    def _announce(self, said: Announce) -> None:
        weights, members = self._job.weights, list(said.members)
        shares = None if weights is None else [weights[n] if n < len(weights) else 1.0 for n in members]
        generation = Generation(said.generation, 0, members, shares, list(said.leaving), keeper=self._job.keeper)
        self._machines.announce(generation)
        if said.generation > 1 and said.members != self._members:
            counted = members[self._keepers :] if len(members) > 1 else members  # the keeper has the first place
            self._console.say(f"{len(counted)} workers from now on: {_listed(counted)}")
        self._members = said.members

    # ---- machines come and go; see `Decides` ----

    def room(self, count: int) -> str | None:
        """See `Decides`."""
        most, taken = self._shards or MAX_SHARDS, self._roster.wanted - self._keepers
        if self._began_with is None:
            taken = sum(machine.capacity for machine in self._machines.all.values()) - self._keepers
        if self._roster.ending is not Ending.NONE or self._roster.is_over:
            return "the run is ending: it takes no more workers"
        if taken >= most:
            return (
                f"all {most} shards have a worker already: start the run with more --shards, or fewer workers elsewhere"
            )
        if taken + count > most:
            return f"it offers {count} workers, but {taken} of {most} shards have one already: use -n {most - taken}"
        return None

    def joined(self, machine: Machine, places: Sequence[int]) -> None:
        """See `Decides`."""
        count = f"{len(places)} worker{'s' if len(places) > 1 else ''}"
        self._console.say(f"{self._machines.describe(machine)} has joined with {count}: {_listed(places)}")
        if self._timeout_s is not None:
            machine.limit(self._timeout_s)
        if self._began_with is None:
            self._begin()
        else:
            self._turn(self._roster.adds(places))

    def lost(self, machine: Machine, places: Sequence[int], why: str) -> None:
        """See `Decides`."""
        lost = [place for place in places if (worker := self._roster.of(place)) is not None and worker.alive]
        gone = f"; worker{'s' if len(lost) > 1 else ''} {_listed(lost)} went with it" if lost else ""
        self._console.say(f"{self._machines.describe(machine)} {why}{gone}")
        self._seen.lost(f"{self._machines.describe(machine)} {why}{gone}")
        if any(self._roster.of(place).is_member for place in lost):  # type: ignore[union-attr]  # they are on it
            self._lost_at = self._lost_at or time.monotonic()
            self._abort(lost[0], f"{self._machines.describe(machine)} {why}")
        self._starts = {place: when for place, when in self._starts.items() if place not in places}
        self._turn(self._roster.loses(places))

    def broke(self, machine: int, generation: int, culprit: int, text: str) -> None:
        """See `Hears`."""
        if generation == self._roster.generation and self._roster.ending is Ending.NONE and not self._roster.is_over:
            self._abort(culprit, text)
            self._machines.broke(generation, machine, culprit, text)

    def did(self, machine: int, pieces: Sequence[TrailPiece], ahead_ns: int = 0) -> None:
        """See `Hears`."""
        if self._trace is not None:
            self._trace.add(machine, self._machines.all[machine].name, pieces, ahead_ns)

    def gave_up(self, machine: int, place: int, text: str, leaves: bool) -> None:
        """See `Hears`."""
        self._seats[place].given_up = True
        self._roster = self._roster.gives_up(place, leaves=leaves)
        self._console.say(text)

    # ---- what happens when nothing comes: somebody is stopped, stuck or late ----

    def _look_after(self) -> None:
        now = time.monotonic()
        for place, when in list(self._starts.items()):
            if when <= now:
                del self._starts[place]
                self._start(place, again=True)
        self._here.look_after(now)
        self._hurry(now)
        if self._deadline is not None and now >= self._deadline:
            self._stop_all()

    def _hurry(self, now: float) -> None:
        """When all others have come to the end of the run, one that still catches up has only so long to get there."""
        late = self._roster.stragglers
        if not late:
            self._over_since = None
            return
        self._over_since = self._over_since or now
        over_s = now - self._over_since
        for worker in [self._seats[w.place] for w in late]:
            if self._timeout_s and over_s > self._timeout_s and not worker.given_up:
                why = f"has not caught up {over_s:.1f} s after the others had ended"
                self._give_up(worker, why, leaves=worker.number != 0)  # what comes after the run is worker 0's

    # ---- what the user asks ----

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self.ask_for_checkpoint()
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                wanted = self._roster.wanted - self._keepers
                self._console.say(self.scale(wanted + (1 if number == signal.SIGUSR1 else -1)))
            except ConfigError as error:
                self._console.say(str(error))
        elif self._stop_signal is None and self._roster.generation and not self._roster.is_over:
            self._stop_signal = number
            self._deadline = time.monotonic() + self._job.grace_s
            self._here.ask(Asks.STOP, 1)
            self._console.say(f"{signal_name(number)}: stopping after this step; once more stops at once")
            self._turn(self._roster.stop())
            self._starts = {place: when for place, when in self._starts.items() if place in self._roster.starts}
        else:
            if self._stop_signal is not None:
                self._roster = self._roster.kill()
            self._stop_signal = self._stop_signal or number
            self._stopped = None
            self._stop_all()

    def ask_for_checkpoint(self) -> None:
        """See `Asked`."""
        self._checkpoints_asked += 1
        self._here.ask(Asks.CHECKPOINT, self._checkpoints_asked)

    def _stop_all(self) -> None:
        gently = self._roster.ending is not Ending.KILLED
        for worker in self._roster.alive:
            self._machines.of(worker.place).signal(worker.place, signal.SIGTERM if gently else signal.SIGKILL)
        self._starts.clear()
        self._roster = self._roster.kill()
        self._deadline = time.monotonic() + _GRACE_S

    def scale(self, number: int) -> str:
        """See `Asked`."""
        most = self._shards or MAX_SHARDS
        if not 1 <= number <= most:
            raise ConfigError(f"{number} workers, expected 1 to {most}: every worker needs a shard")
        self._turn(self._roster.scale(number + self._keepers, MAX_SHARDS))
        return f"{number} workers from the next step on"

    def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer what came through the control socket."""
        if "await" not in request:
            return answer(self, request)
        self._machines.workers_awaited = int(request["await"])
        if self._began_with is None:
            self._begin()
        return {"said": f"the first step waits for {request['await']} workers"}

    def ask_for_fingerprint(self) -> None:
        """See `Asked`."""
        self._board.ask_fingerprint()

    def stop(self) -> None:
        """See `Asked`."""
        os.kill(os.getpid(), signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        """See `Asked`."""
        return {
            "generation": self._roster.generation,
            "operations": self._board.committed,
            "wanted": self._roster.wanted - self._keepers,
            "restarts": self._roster.restarts,
            "num_shards": self._shards,
            "script": str(self._job.script),
            "buttons": ["add", "remove", "checkpoint", "fingerprint", "stop"],
            **self._seen.described(self._console.said),
            **self._machines.described({worker.place: worker.is_member for worker in self._roster.alive}),
        }

    # ---- what workers say ----

    def heard(self, machine: int, place: int, kind: str, lines: Sequence[bytes]) -> None:
        """See `Hears`."""
        worker = self._seats[place]
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

    def _show_page(self, page: PageProcess) -> None:
        self._page = page
        self._here.attend(page.start(self._segment, os.getpid()), self._page_ended)
        self._console.say(page.invitation, secret=True)

    def _on_page(self, _: Seat, event: Event) -> None:
        """The script asks for a page; that of the command line goes before."""
        if self._page is None:
            try:
                self._show_page(self._opened.enter_context(closing(PageProcess(event["page"], "Run(page=...)"))))
            except ConfigError as error:
                self._console.say(f"{error}; the run goes on without a page")

    def _page_ended(self, child: Child) -> None:
        self._console.say(f"the page {child.describe_end()}; the run goes on without it")

    def ended(self, machine: int, place: int, end: End) -> None:
        """See `Hears`."""
        self._seats[place].end = end
        self._board.holds(place, False)
        if end.starved:
            self._roster = self._roster.starves(place)
        self._turn(self._roster.ended(place, end.code, self._board.committed))

    def _on_made(self, _: Seat, __: Event) -> None:
        self._trained = True

    def _on_run(self, worker: Seat, event: Event) -> None:
        if (self._shards, self._timeout_s) != (event["shards"], event["timeout_s"]):
            self._shards, self._timeout_s = event["shards"], event["timeout_s"]
            for machine in self._machines.all.values():
                machine.limit(self._timeout_s)
        self._on_script(worker, Script.INSIDE)

    def _on_script(self, worker: Seat, script: Script) -> None:
        self._roster = self._roster.speaks(worker.number, script)

    def _on_waits(self, worker: Seat, _: Event) -> None:
        self._console.caught_up(worker.number)
        self._turn(self._roster.waits(worker.number))

    def _on_silent(self, _: Seat, event: Event) -> None:
        culprit = self._seats[event["silent"]]
        if self._of(culprit).alive and not culprit.given_up and not self._of(culprit).waits:
            self._give_up(culprit, "says nothing: " + event["text"])

    def _on_wrong(self, _: Seat, event: Event) -> None:
        """A worker computed wrong, as the others say. All of them come and wait for the next generation."""
        place, most = event["wrong"], event["tolerates"]
        self._wrong[place] += 1
        if self._wrong[place] > most:
            self._console.say(f"{event['text']}; it is dismissed, and the others do the step again")
            self._roster = self._roster.convicts(place)
        else:
            self._console.say(f"{event['text']}; tolerated, {self._wrong[place]} of {most}: the step is done again")

    def _on_stopped(self, _: Seat, event: Event) -> None:
        self._stopped = event["stopped"]
        self._roster = self._roster._replace(has_stopped=True)

    def _on_error(self, worker: Seat, event: Event) -> None:
        worker.error = event["error"]
        hopeless = LastWord.HOPELESS if event.get("hopeless") else LastWord.ERROR
        self._roster = self._roster.faults(worker.number, LastWord.MISTAKE if event.get("mistake") else hopeless)
        self._console.log_error(worker.number, event["error"])

    def _on_begins_again(self, worker: Seat, _: Event) -> None:
        worker.begins_again = True
        self._roster = self._roster.faults(worker.number, LastWord.BEGINS_AGAIN)

    def _on_final(self, worker: Seat, _: Event) -> None:
        self._roster = self._roster.faults(worker.number, self._of(worker).fault, final=True)

    def _on_committed(self, _: Seat, event: Event) -> None:
        self._roster = self._roster.committed()
        self._machines.committed()
        if self._lost_at is not None:
            late_s = time.monotonic() - self._lost_at
            self._seen.recovered(late_s)
            self._console.say(f"step {event['committed']} is committed, {late_s:.3f} s after a worker was lost")
            self._lost_at = None

    # ---- the end ----

    def _finish(self) -> int:
        self._console.end_progress()
        self._scribe.finish(self._trained)
        if self._trace is not None:
            self._trace.finish()
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
        if (self._began_with or 0) > 1 and not self._trained:
            self._console.say(
                f"{self._job.script} made no evenstep.Run: {self._began_with} workers have each run all of it by "
                "themselves; train inside `with evenstep.Run() as run`"
            )
        return 0

    def _came_to_its_end(self) -> bool:
        """Whether the run was over before it could be stopped: its last step was done already."""
        well = all(w.code == 0 or w.stage is Stage.LEFT for w in self._roster.workers)
        return well and self._roster.is_over and self._roster.ending is not Ending.KILLED

    def _report_failure(self, worker: Seat) -> int:
        """Show the error of the worker that failed first (the others fail because of it), last and whole."""
        found, code = self._of(worker), worker.ended.code
        if found.fault is not LastWord.MISTAKE:
            always = self._roster.crashes_always(found)
            again = f", as {MAX_CRASHES - 1} before it without a committed step in between" if always else ""
            self._console.say(f"{worker.ended.text}{again}")
        self._console.show_failure(worker.error)
        if code == 0 and not worker.error:
            self._console.say("it ended while the others waited for it")
            return PeerError.exit_code
        return code if code > 0 else 128 - code


def _listed(places: Sequence[int]) -> str:
    return ", ".join(map(str, places))


def supervise(job: Job) -> int:
    """Run a job to its end; return the exit code: 0, 75 if it was asked to stop, or the failing worker's.

    Raises:
        ConfigError: The logs or the segment cannot be made; nothing was started.
    """
    group = job.standing.group if job.standing is not None else None
    with ExitStack() as stack:
        console = stack.enter_context(Console(job.log_dir, job.num_workers, group, job.report))
        warm_up()
        segment = stack.enter_context(closing(Segment.create(MAX_SHARDS)))
        control = stack.enter_context(closing(Control()))
        scribe = stack.enter_context(closing(Scribe(segment, job, console.say)))
        page = None if job.page is None else stack.enter_context(closing(PageProcess(job.page, f"--page {job.page}")))
        trace = None if job.trace is None else stack.enter_context(closing(TraceFile(job.trace, job, console)))
        return _Supervisor(job, console, segment, control, scribe, page, trace).run()
