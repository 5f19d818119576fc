"""The supervisor of a run: one loop around its workers, on this machine and on those that have joined it.

Workers are forked from a warm process on each machine (`machine.py`): torch is imported once, so a worker starts in
milliseconds. The supervisor has one thread and waits in one place. Its `crew` has the workers and carries out what the
`roster` decides, `reports` takes what they say, and an `outcome` is how it ends. A machine that is lost is never asked
again: it ends its workers by itself when it no longer hears from us, and what they would write reaches nobody.

Workers die with their supervisor (the kernel sees to that), and the segment has no name, so nothing outlives a run.
"""

import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from evenstep.core.children import Child, signal_name
from evenstep.core.config import MAX_SHARDS
from evenstep.core.control import Control
from evenstep.core.errors import ConfigError
from evenstep.core.signals import Signals
from evenstep.exchange.board import Asks
from evenstep.launch.console import Console
from evenstep.launch.crew import RunCrew, listed
from evenstep.launch.job import Job
from evenstep.launch.machine import End, Here, RunMachine
from evenstep.launch.machines import Machines
from evenstep.launch.outcome import RunOutcome
from evenstep.launch.reports import Reports
from evenstep.launch.roster import Ending
from evenstep.launch.scribe import Scribe
from evenstep.launch.trace_file import TraceFile
from evenstep.launch.trace_lines import TraceLines, in_reports
from evenstep.launch.trails import TrailPiece
from evenstep.launch.worker import warm_up
from evenstep.page.answers import answer
from evenstep.page.process import PageProcess
from evenstep.page.seen import Seen
from evenstep.transport.segment import Segment

__all__ = ["supervise"]

_DRAIN_S = 1.0  # how long to keep reading after the last worker has ended, if something that it started still writes
_LOOK_S = 0.25  # how often to look for workers that are stopped or stuck


class Supervisor:
    """One run: the loop, machines that come and go, and what the user asks for.

    Args:
        job: What to run.
        console: Where the user is told.
        segment: The shared memory of this machine's workers.
        control: Where commands come from.
        scribe: Writes down the figures of every step.
        page: The page of the run, if the command line asks for one.
        trace: Where it is noted what every worker does when, if anywhere.
    """

    def __init__(
        self,
        job: Job,
        console: Console,
        segment: Segment,
        control: Control,
        scribe: Scribe,
        page: PageProcess | None = None,
        trace: TraceLines | None = None,
    ) -> None:
        self._job, self._console, self._control = job, console, control
        self._segment, self._scribe, self._page, self._trace = segment, scribe, page, trace
        self._seen, self._opened = Seen(), ExitStack()
        self._here = Here(
            0,
            socket.gethostname(),
            job,
            segment,
            self,
            machines=job.listen is not None,
            job_name=secrets.token_hex(4),
            traced=trace is not None,
        )
        self._board = self._here.board
        self._machines = Machines(self._here, job, self, console.say)
        self._crew = RunCrew(job, console, self._machines, self._seen)
        self._reports = Reports(self._crew, console, self._seen, self._open_page)
        self._stop_signal: int | None = None
        self._checkpoints_asked = 0

    # ---- the one loop ----

    def run(self) -> int:
        """Run the job to its end; returns the exit code."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        children = self._here.children
        with self._opened, Signals(self._on_signal, *numbers) as signals, children, self._machines:
            children.watch(signals, signals.deliver)
            children.watch(self._control.socket, lambda: self._control.answer(self._command))
            if self._page is not None:
                self._show_page(self._page)
            self._crew.begin()
            while self._crew.is_there or self._awaits_machines:
                children.turn(self._wait_s())
                now = time.monotonic()
                self._machines.turn(now)
                self._crew.look_after(now)
                self._here.look_after(now)  # last, so that a worker just killed is not taken for a stopped one
                self._scribe.write()
            children.finish(_DRAIN_S)
            code = self._finish()
            self._machines.end(code)
            return code

    @property
    def _awaits_machines(self) -> bool:
        return self._crew.began_with is None and self._stop_signal is None

    def _wait_s(self) -> float:
        now = time.monotonic()
        look = now + (0.01 if self._machines.is_busy else _LOOK_S)
        return min([look, *self._crew.next_look(), *self._here.next_look]) - now

    def _finish(self) -> int:
        self._console.end_progress()
        self._scribe.finish(trained=self._reports.trained and self._crew.failed is None)
        if self._trace is not None:
            self._trace.finish()
        return RunOutcome(
            self._job,
            self._crew.roster,
            self._crew.began_with or 0,
            self._reports.trained,
            self._crew.failed,
            self._stop_signal,
            self._reports.stopped,
        ).tell(self._console)

    # ---- machines come and go; see `Decides` ----

    def room(self, count: int) -> str | None:
        """See `Decides`."""
        roster, most, taken = self._crew.roster, self._crew.shards or MAX_SHARDS, self._crew.num_wanted
        if self._crew.began_with is None:
            taken = sum(machine.capacity for machine in self._machines.all.values()) - self._crew.num_keepers
        if roster.ending is not Ending.NONE or roster.is_over:
            return "the run is ending and takes no more workers"
        if taken >= most:
            return (
                f"all {most} shards have a worker already: start the run with more --shards, or fewer workers elsewhere"
            )
        if taken + count > most:
            return f"it offers {count} workers, but {taken} of {most} shards have one already: use -n {most - taken}"
        return None

    def joined(self, machine: RunMachine, places: Sequence[int]) -> None:
        """See `Decides`."""
        count = f"{len(places)} worker{'s' if len(places) > 1 else ''}"
        self._console.say(
            f"{self._machines.describe(machine)} has joined with {count}: {listed(places)}{self._machines.missing}"
        )
        if self._crew.timeout_s is not None:
            machine.limit(self._crew.timeout_s)
        if self._crew.began_with is None:
            self._crew.begin()
        else:
            self._crew.turn(self._crew.roster.adds(places))

    def lost(self, machine: RunMachine, places: Sequence[int], why: str) -> None:
        """See `Decides`."""
        lost = [worker.place for worker in self._crew.alive_in(places)]
        gone = f"; worker{'s' if len(lost) > 1 else ''} {listed(lost)} went with it" if lost else ""
        sentence = f"{self._machines.describe(machine)} {why}"
        self._console.say(f"{sentence}{gone}")
        self._seen.lost(f"{sentence}{gone}")
        self._crew.lose_machine(places, sentence)

    # ---- what happens on machines; see `Hears` ----

    def heard(self, machine: int, place: int, kind: str, lines: Sequence[bytes]) -> None:
        """See `Hears`."""
        self._reports.heard(place, kind, lines)

    def did(self, machine: int, pieces: Sequence[TrailPiece], ahead_ns: int = 0) -> None:
        """See `Hears`."""
        if self._trace is not None:
            self._trace.add(machine, self._machines.all[machine].name, pieces, ahead_ns)

    def gave_up(self, machine: int, place: int, text: str, leaves: bool) -> None:
        """See `Hears`."""
        self._crew.seats[place].given_up = True
        self._crew.roster = self._crew.roster.gives_up(place, leaves=leaves)
        self._console.say(text)

    def ended(self, machine: int, place: int, end: End) -> None:
        """See `Hears`."""
        self._board.holds(place, False)
        self._crew.ended(place, end, self._board.committed)

    def broke(self, machine: int, generation: int, culprit: int, text: str) -> None:
        """See `Hears`."""
        roster = self._crew.roster
        self._machines.say_if_altered(generation, machine, culprit, text)
        if generation == roster.generation and roster.ending is Ending.NONE and not roster.is_over:
            self._crew.abort(culprit, text)
            self._machines.broke(generation, machine, culprit, text)

    # ---- what the user asks; see `Asked` ----

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self.ask_for_checkpoint()
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                self._console.say(self.scale(self._crew.num_wanted + (1 if number == signal.SIGUSR1 else -1)))
            except ConfigError as error:
                self._console.say(str(error))
        elif self._stop_signal is None and self._crew.roster.generation and not self._crew.roster.is_over:
            self._stop_signal = number
            self._console.say(f"{signal_name(number)}: stopping after this step; a second signal stops at once")
            self._crew.stop(self._job.grace_s)
        else:
            if self._stop_signal is not None:
                self._crew.roster = self._crew.roster.kill()
            self._stop_signal = self._stop_signal or number
            self._reports.stopped = None
            self._crew.end_all()

    def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request that came through the control socket."""
        if "await" not in request:
            return answer(self, request)
        self._machines.workers_awaited = int(request["await"])
        self._crew.begin()
        return {"said": f"the first step waits for {request['await']} workers"}

    def scale(self, number: int) -> str:
        """See `Asked`."""
        most = self._crew.shards or MAX_SHARDS
        if not 1 <= number <= most:
            raise ConfigError(f"{number} workers, expected 1 to {most}: every worker needs a shard")
        self._crew.turn(self._crew.roster.scale(number + self._crew.num_keepers, MAX_SHARDS))
        return f"{number} workers from the next step on"

    def ask_for_checkpoint(self) -> None:
        """See `Asked`."""
        self._checkpoints_asked += 1
        self._here.ask(Asks.CHECKPOINT, self._checkpoints_asked)

    def ask_for_fingerprint(self) -> None:
        """See `Asked`."""
        self._board.ask_fingerprint()

    def stop(self) -> None:
        """See `Asked`."""
        os.kill(os.getpid(), signal.SIGTERM)

    def status(self) -> dict[str, Any]:
        """See `Asked`."""
        roster = self._crew.roster
        return {
            "generation": roster.generation,
            "operations": self._board.committed,
            "wanted": self._crew.num_wanted,
            "restarts": roster.restarts,
            "num_shards": self._crew.shards,
            "script": str(self._job.script),
            "group": self._job.group,
            "buttons": ["add", "remove", "checkpoint", "fingerprint", "stop"],
            **self._seen.described(self._console.said),
            **self._machines.described({worker.place: worker.is_member for worker in roster.alive}),
        }

    # ---- the page ----

    def _show_page(self, page: PageProcess) -> None:
        self._page = page
        self._here.attend(page.start(self._segment, os.getpid()), self._page_ended)
        self._console.say(page.invitation, secret=True)

    def _open_page(self, port: int) -> None:
        """The script asks for a page; one that the command line asked for takes precedence."""
        if self._page is None:
            try:
                self._show_page(self._opened.enter_context(closing(PageProcess(port, "Run(page=...)"))))
            except ConfigError as error:
                self._console.say(f"{error}; the run goes on without a page")

    def _page_ended(self, child: Child) -> None:
        self._console.say(f"the page {child.describe_end()}; the run goes on without it")


def supervise(job: Job) -> int:
    """Run a job to its end; returns the exit code: 0, 75 if it was asked to stop, or that of the worker that failed.

    Raises:
        ConfigError: The logs or the segment cannot be created; nothing was started.
    """
    group = job.standing.group if job.standing is not None else None
    with ExitStack() as stack:
        console = stack.enter_context(Console(job.log_dir, job.num_workers, group, job.report))
        warm_up()
        segment = stack.enter_context(closing(Segment.create(MAX_SHARDS)))
        control = stack.enter_context(closing(Control()))
        scribe = stack.enter_context(closing(Scribe(segment, job, console.say)))
        page = None if job.page is None else stack.enter_context(closing(PageProcess(job.page, f"--page {job.page}")))
        trace = None if job.trace is None else _traced(job, job.trace, console, stack)
        return Supervisor(job, console, segment, control, scribe, page, trace).run()


def _traced(job: Job, path: Path, console: Console, stack: ExitStack) -> TraceLines:
    """What makes the trace of a job; its events go to a file, or to the process that writes it."""
    if job.report is not None:
        return TraceLines(in_reports(job.report), job, console)
    return TraceLines(stack.enter_context(closing(TraceFile(path, job.script, console.say))).append, job, console)
