"""The supervisor: forks the workers of one machine from a warm process, watches them, and replaces those that fail.

It imports torch once, before it forks, so a worker is there in milliseconds. It has one thread and waits in one place.
It alone decides who is a worker: when one has failed, or others shall join, it waits until all who are left wait for
its word, and announces the next *generation*. A worker that it gives up it kills, and it waits for the end of that
process before anybody else goes on: nobody who is not in the present generation can write anything.

Workers die with it (the kernel sees to that), and the segment has no name, so nothing outlives a run.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.core import env
from evenstep.core.config import MAX_SHARDS
from evenstep.core.control import Control
from evenstep.core.errors import ConfigError, PeerError, Stopped
from evenstep.core.events import Event
from evenstep.exchange import generations
from evenstep.exchange.board import Asks, Board
from evenstep.exchange.generations import Generation
from evenstep.launch.console import Console
from evenstep.launch.worker import STACK_SIGNAL, become_worker
from evenstep.launch.worker_process import WorkerProcess, signal_name
from evenstep.native import core
from evenstep.plan.groups import Standing
from evenstep.run.progress import Progress
from evenstep.transport.segment import Segment

__all__ = ["Job", "supervise"]

_GRACE_S = 5.0  # how long the others may take to end once the run has failed, and again before they are killed
_LONGEST_LINE_BYTES = 1 << 20  # what comes without a line feed is shown in pieces of this size
_DRAIN_S = 1.0  # how long to read on after the last worker has ended, if something that it started still writes
_LOOK_S = 0.25  # how often to look whether somebody is stopped or stuck
_STOPPED_S = 1.0  # how long a worker may be stopped
_CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS}
_MAX_CRASHES = 4  # in one place without a committed step in between: then the next one would crash too
_STACK_S = 0.3  # how long a worker that is given up has to write its stack
_BACKOFF_S = (
    0.1,
    30.0,
)  # before the second start of a worker since the last committed step, doubled each time; at most


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        script: The training script, or the name of a module.
        args: Its own arguments.
        num_workers: How many workers.
        shards: Parts of every batch; None: the script's.
        log_dir: Where each worker's output goes too.
        max_restarts: How many workers may be replaced in all; None: any number.
        step_timeout_s: How long a step may take; None: the script's `Run(timeout_s=...)`.
        grace_s: How long the first signal gives the run to finish its step and write a checkpoint.
        weights: How much each worker shall do; None: measured.
        resume: Whether to go on from the newest checkpoint.
        standing: Where the workers stand as a group, if there are groups and servers.
        report: Takes progress and fingerprint of a group.
    """

    script: Path | str
    args: tuple[str, ...]
    num_workers: int
    shards: int | None = None
    log_dir: Path | None = None
    max_restarts: int | None = None
    step_timeout_s: float | None = None
    grace_s: float = 30.0
    weights: tuple[float, ...] | None = None
    resume: bool = False
    standing: Standing | None = None
    report: Callable[[Event], None] | None = None


class _Supervisor:
    def __init__(self, job: Job, console: Console) -> None:
        self._job, self._console = job, console
        self._name = secrets.token_hex(4)
        self._segment = Segment.create(MAX_SHARDS)
        self._board = Board(self._segment)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}  # the present or last one of every place
        self._wanted = job.num_workers
        self._generation = Generation(0, 0, [], None)
        self._starts: dict[int, float] = {}  # which places get a worker, and when
        self._restarts = 0
        self._failures: dict[int, int] = {}  # of workers that replaced others, since the last committed step
        self._failed_at: int | None = None  # how much was committed when a script last failed by itself
        self._lost_at: float | None = None  # when a worker was lost, until a step is committed again
        self._stepped = False
        self._trained = False  # whether the script has made a run, be it one that meets others at a server
        self._over_since: float | None = None  # since when all but those who catch up have ended
        self._shards: int | None = job.shards
        self._timeout_s = job.step_timeout_s
        self._first_failure: WorkerProcess | None = None
        self._stop_signal: int | None = None
        self._stopped: dict[str, Any] | None = None
        self._checkpoints_asked = 0
        self._deadline: float | None = None
        self._killing = False
        self._control = Control()
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
            "closed": self._on_closed,
            "ended": self._on_ended,
            "fingerprint": lambda _, event: console.note_fingerprint(event["operation"], event["fingerprint"]),
            "error": self._on_error,
            "final": self._on_final,
        }

    # ---- the one loop ----

    def run(self) -> int:
        wake, told = socket.socketpair()
        told.setblocking(False)
        wake.setblocking(False)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody could be waited for
        signal.set_wakeup_fd(told.fileno())
        self._selector.register(wake, selectors.EVENT_READ, ("signal", None))
        self._selector.register(self._control.socket, selectors.EVENT_READ, ("control", None))
        try:
            for number in range(self._job.num_workers):
                self._start(number, replaying=False)
            while self._starts or any(w.alive for w in self._workers.values()):
                self._turn(self._wait_s())
                self._look_after()
            drained = time.monotonic() + _DRAIN_S
            while self._turn(0.0) and time.monotonic() < drained:
                pass
            return self._finish()
        finally:
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
                if worker.alive:
                    worker.reap()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for key in list(self._selector.get_map().values()):
                if key.fileobj not in (wake, self._control.socket):
                    os.close(key.fd)
            for closing in (wake, told, self._selector, self._control, self._segment):
                closing.close()

    def _turn(self, wait_s: float) -> bool:
        """Wait, at most so long, and handle what has come; False if nothing has."""
        ready = self._selector.select(timeout=wait_s)
        # what a worker printed comes before what it says of itself, and that before its end
        order = {"out": 0, "err": 0, "events": 1, "exit": 2}
        for key, _ in sorted(ready, key=lambda item: order.get(item[0].data[0], 3)):
            if key.fd not in self._selector.get_map():
                continue  # closed meanwhile
            kind, worker = key.data
            self._handle(kind, worker, key.fileobj)
        return bool(ready)

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [*self._starts.values(), *(w.kill_at for w in self._workers.values() if w.alive and w.kill_at)]
        times += [now + _LOOK_S] if self._deadline is None else [self._deadline, now + _LOOK_S]
        return max(min(times) - now, 0.0)

    def _handle(self, kind: str, worker: WorkerProcess | None, source: Any) -> None:
        if kind == "control":
            self._control.answer(self._command)
        elif worker is None:
            for number in source.recv(64):
                self._on_signal(number)
        elif kind == "exit":
            self._close(source)
            self._drain(worker)
            self._on_exit(worker)
        else:
            data = os.read(source, 65536)
            self._on_output(kind, worker, data)
            if not data:
                self._close(source)

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _drain(self, worker: WorkerProcess, kinds: Sequence[str] = ("out", "err", "events")) -> None:
        """Read what a worker has written so far."""
        for key in list(self._selector.get_map().values()):
            kind, owner = key.data
            while owner is worker and kind in kinds and key.fd in self._selector.get_map():
                try:
                    self._handle(kind, worker, key.fd)
                except BlockingIOError:
                    break

    # ---- starting, losing, giving up ----

    def _start(self, number: int, *, replaying: bool) -> None:
        pipes = {kind: os.pipe() for kind in ("out", "err", "events")}
        variables = env.worker_variables(
            number,
            self._job.num_workers,
            self._job.shards,
            self._segment.fd,
            pipes["events"][1],
            supervised=True,
            timeout_s=self._job.step_timeout_s,
            resume=self._job.resume,
            standing=self._job.standing.text() if self._job.standing is not None else None,
            job=self._name,
        )
        self._board.clear(number)
        self._console.begin(number, again=replaying)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            streams = (pipes["out"][1], pipes["err"][1])
            become_worker(
                parent, self._job.script, self._job.args, variables, streams, {self._segment.fd, pipes["events"][1]}
            )
        core.set_pid(self._segment.base, number, pid)  # so that the others notice even one that ends before it joins
        worker = WorkerProcess(number, pid, os.pidfd_open(pid), replaying=replaying, member=not replaying)
        self._workers[number] = worker
        for kind, (reading, writing) in pipes.items():
            os.close(writing)
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, (kind, worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, ("exit", worker))

    def _on_exit(self, worker: WorkerProcess) -> None:
        worker.reap()
        assert worker.code is not None, "it was collected"
        committed = self._board.committed
        if self._killing or self._first_failure is not None:
            return  # all are ending
        as_it_should = worker.code == 0 and (worker.closed or worker.ended or not worker.in_run)
        as_it_was_told = worker.dismissed or (self._stop_signal is not None and worker.code == Stopped.exit_code)
        if as_it_should or as_it_was_told:
            self._form()
        elif self._stop_signal is not None:
            self._lose(worker)
        elif worker.replaying and not (worker.closed or worker.final) and worker.code >= 0 and self._others(worker):
            self._console.say(f"{worker.describe_end()} before it had caught up; the others go on without it")
            self._console.show_error(worker.error)
            self._wanted = min(self._wanted, len(self._others(worker)))
        elif self._is_final(worker, committed):
            self._fail(worker)
        else:
            self._lose(worker)

    def _others(self, worker: WorkerProcess) -> list[WorkerProcess]:
        return [w for w in self._workers.values() if w.alive and w is not worker]

    def _is_over(self) -> bool:
        """Whether some worker has come to the end of the run, so that all that counts is committed."""
        return any(w.closed for w in self._workers.values())

    def _is_final(self, worker: WorkerProcess, committed: int) -> bool:
        """Whether the run cannot go on: the script is at fault, and would be again."""
        if (worker.code is not None and worker.code < 0) or worker.given_up:
            return self._crashes_always(worker)
        again = self._failed_at == committed
        self._failed_at = committed
        return worker.final or worker.hopeless or worker.mistake or not self._stepped or again or worker.closed

    def _crashes_always(self, worker: WorkerProcess) -> bool:
        """Whether a worker crashed, and so did those before it in its place since the last committed step."""
        crashed = worker.code is not None and -worker.code in _CRASHES and not worker.given_up
        return crashed and self._failures.get(worker.number, -1) + 2 >= _MAX_CRASHES

    def _lose(self, worker: WorkerProcess) -> None:
        """Go on without a worker, and start another one in its place."""
        now = time.monotonic()
        step = self._board.doing(worker.number).step
        how = worker.given_up or worker.describe_end()
        self._console.show_error(worker.error)
        if worker.member:
            self._lost_at = self._lost_at or now
            core.abort_all(self._segment.base, self._segment.num_workers, worker.number, how)
        worker.member = worker.waits = False
        most = 0 if self._stop_signal is not None and not self._is_needed(worker) else self._job.max_restarts
        left = most is None or self._restarts < most
        crowd = sum(1 for w in self._others(worker) if not w.dismissed) + len(self._starts)
        if left and crowd < self._wanted:
            self._restarts += 1
            failures = self._failures[worker.number] = self._failures.get(worker.number, -1) + 1
            delay = min(_BACKOFF_S[0] * 2 ** (failures - 1), _BACKOFF_S[1]) if failures else 0.0
            self._starts[worker.number] = now + delay
            next_ = "it is replaced" + (f" in {delay:g} s" if delay else "")
        else:
            next_ = f"{crowd} go on"
        self._console.say(f"{how} at step {step}; {next_}")
        if not self._starts and not self._others(worker) and self._stop_signal is None:
            return self._fail(worker)
        return self._form()

    def _is_needed(self, worker: WorkerProcess) -> bool:
        """Whether a run that shall stop cannot do so in order without another one in place of this worker."""
        killed = worker.code is not None and worker.code < 0
        return killed and self._stopped is None and not any(w.member for w in self._others(worker))

    def _give_up(self, worker: WorkerProcess, why: str) -> None:
        """Name a worker that does nothing any more, let it write its stack, and have it killed."""
        doing = self._board.doing(worker.number)
        tag = core.last_post(self._segment.base, worker.number)[2] or "none"
        shard = "" if doing.shard is None else f", shard {doing.shard}"
        worker.given_up = f"{worker.describe()} {why}"
        worker.kill_at = time.monotonic() + _STACK_S
        self._console.say(f"{worker.given_up} at step {doing.step}{shard}, its last exchange was '{tag}'; its stack:")
        worker.signal(STACK_SIGNAL)
        worker.signal(signal.SIGCONT)

    def _look_after(self) -> None:
        """What happens when nothing comes: somebody is stopped, stuck or late."""
        now = time.monotonic()
        for number, when in list(self._starts.items()):
            if when <= now:
                del self._starts[number]
                self._start(number, replaying=True)
        for worker in list(self._workers.values()):
            if not worker.alive:
                continue
            if worker.kill_at is not None:
                if now >= worker.kill_at:
                    worker.signal(signal.SIGKILL)
                continue
            worker.stopped_since = (worker.stopped_since or now) if worker.is_stopped() else None
            if worker.stopped_since is not None and now - worker.stopped_since >= _STOPPED_S:
                self._give_up(worker, f"has been stopped for {now - worker.stopped_since:.1f} s")
            self._look_at_step(worker)
        self._hurry(now)
        if self._deadline is not None and now >= self._deadline:
            self._stop_all()

    def _look_at_step(self, worker: WorkerProcess) -> None:
        doing = self._board.doing(worker.number)
        if self._timeout_s and doing.busy_s and doing.busy_s > self._timeout_s and not doing.waiting:
            self._drain(worker, ("events",))  # perhaps it has just said for whom it waited
            if not any(w.alive and w.kill_at is not None for w in self._workers.values()):  # one after the other
                self._give_up(worker, f"has been inside of the step for {doing.busy_s:.1f} s")

    def _hurry(self, now: float) -> None:
        """When all others have come to the end of the run, one that still catches up has only so long to get there."""
        late = [w for w in self._workers.values() if w.alive]
        if not late or self._starts or not self._is_over() or any(w.closed or not w.replaying for w in late):
            self._over_since = None
            return
        self._over_since = self._over_since or now
        over_s = now - self._over_since
        for worker in late:
            if self._timeout_s and over_s > self._timeout_s and worker.kill_at is None:
                self._give_up(worker, f"has not caught up {over_s:.1f} s after the others had ended")
                worker.dismissed = worker.number != 0  # what comes after the run is worker 0's, and has to be done

    # ---- generations ----

    def _form(self) -> None:
        """Begin the next generation if all who are left of the present one wait for it."""
        alive = [w for w in self._workers.values() if w.alive and not w.dismissed]
        waiting = sorted((w for w in alive if w.waits), key=lambda w: (not w.member, w.number))
        if self._stop_signal is not None and any(w.member for w in alive):
            waiting = [w for w in waiting if w.member]  # nobody joins a run that is about to stop
        if not waiting or self._first_failure is not None:
            return None
        gone = [w for w in self._workers.values() if w.code == 0 and w.member and not w.closed]
        if gone:  # its script came to an end, and those who wait wait for it
            return self._fail(gone[0])
        if any(w.member and not w.waits for w in alive):
            if any(not w.member for w in waiting) or len(alive) > self._wanted:
                self._board.ask(Asks.REGROUP, self._generation.number + 1)
            return None
        chosen = sorted(waiting[: self._wanted], key=lambda w: w.number)
        for worker in waiting[self._wanted :]:
            worker.dismissed, worker.member, worker.waits = True, False, False
        for worker in chosen:
            worker.member, worker.waits, worker.replaying = True, False, False
        members = [w.number for w in chosen]
        rounds = [core.last_post(self._segment.base, number)[0] >> 32 for number in self._workers]
        weights = self._job.weights
        before = self._generation
        self._generation = Generation(
            before.number + 1,
            max(rounds) + 1,
            members,
            None if weights is None else [weights[n] if n < len(weights) else 1.0 for n in members],
            [w.number for w in self._workers.values() if w.alive and w.dismissed],
        )
        generations.announce(self._segment, self._generation)
        if before.number and members != before.members:
            self._console.say(f"{len(members)} workers from now on: {', '.join(map(str, members))}")
        if len(alive) > len(chosen) or any(not w.member for w in alive):
            self._form()
        return None

    def _scale(self, number: int) -> str:
        """Have more or fewer workers from the next step on; returns what will be, or raises ConfigError."""
        most = self._shards or MAX_SHARDS
        if not 1 <= number <= most:
            raise ConfigError(f"{number} workers, expected 1 to {most}: every worker needs a shard")
        if self._stop_signal is not None or self._first_failure is not None:
            raise ConfigError("the run is ending: it takes no more workers")
        self._wanted = number
        live = [w for w in self._workers.values() if w.alive and not w.dismissed]
        for place in range(MAX_SHARDS):
            if len(live) + len(self._starts) >= number:
                break
            taken = place in self._workers and self._workers[place].alive  # one that was dismissed may still read there
            if place not in self._starts and not taken:
                self._starts[place] = time.monotonic()
        if len(live) > number:
            self._board.ask(Asks.REGROUP, self._generation.number + 1)
        return f"{number} workers from the next step on"

    # ---- what the user asks ----

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._checkpoints_asked += 1
            self._board.ask(Asks.CHECKPOINT, self._checkpoints_asked)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            try:
                self._console.say(self._scale(self._wanted + (1 if number == signal.SIGUSR1 else -1)))
            except ConfigError as error:
                self._console.say(str(error))
        elif number in (signal.SIGINT, signal.SIGTERM):
            if self._stop_signal is None and self._generation.number and not self._is_over():
                self._stop_signal = number
                self._deadline = time.monotonic() + self._job.grace_s
                self._board.ask(Asks.STOP, 1)
                self._console.say(f"{signal_name(number)}: stopping after this step; once more stops at once")
                if any(w.member and w.alive for w in self._workers.values()):  # else those who come have to stop it
                    self._starts.clear()
                    for worker in self._workers.values():
                        if worker.replaying and worker.alive:
                            worker.dismissed = True
                            worker.signal(signal.SIGKILL)
                self._form()
            else:
                self._killing = self._killing or self._stop_signal is not None
                self._stop_signal = self._stop_signal or number
                self._stopped = None
                self._stop_all()

    def _command(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer what came through the control socket."""
        if "scale" in request:
            try:
                return {"said": self._scale(int(request["scale"]))}
            except (ConfigError, TypeError) as error:
                return {"error": str(error)}
        live = [w for w in self._workers.values() if w.alive]
        return {
            "generation": self._generation.number,
            "operations": self._board.committed,
            "wanted": self._wanted,
            "restarts": self._restarts,
            "workers": [
                {"worker": w.number, "pid": w.pid, "step": self._board.doing(w.number).step, "member": w.member}
                for w in live
            ],
        }

    def _stop_all(self) -> None:
        for worker in self._workers.values():
            worker.signal(signal.SIGKILL if self._killing else signal.SIGTERM)
        self._starts.clear()
        self._killing = True
        self._deadline = time.monotonic() + _GRACE_S

    def _fail(self, worker: WorkerProcess) -> None:
        """The run is over, and this worker is why."""
        core.abort_all(self._segment.base, self._segment.num_workers, worker.number, worker.describe_end())
        self._first_failure = worker
        self._starts.clear()
        for other in self._others(worker):
            if other.replaying:  # it has nothing to say, and may be so young that it would take a SIGTERM for ours
                other.signal(signal.SIGKILL)
            elif other.waits:  # nobody will call it any more
                other.signal(signal.SIGTERM)
        self._deadline = time.monotonic() + (0 if worker.final else _GRACE_S)

    # ---- what workers say ----

    def _on_output(self, kind: str, worker: WorkerProcess, data: bytes) -> None:
        """Pass on whole lines, and at the end of a stream what is left of one."""
        *lines, rest = (worker.pending.get(kind, b"") + data).split(b"\n")
        if rest and (not data or (len(rest) > _LONGEST_LINE_BYTES and kind != "events")):
            lines, rest = [*lines, rest], b""
        worker.pending[kind] = rest
        if kind == "events":
            for line in lines:
                self._on_event(worker, line)
        else:
            self._console.show(worker.number, lines, is_error=kind == "err")

    def _on_event(self, worker: WorkerProcess, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # it was killed in the middle of a line
        for name, handle in self._events.items():
            if name in event:
                handle(worker, event)

    def _on_waits(self, worker: WorkerProcess, _: Event) -> None:
        self._drain(worker, ("out",))
        self._console.caught_up(worker.number)
        worker.waits = True
        self._form()

    def _on_made(self, _: WorkerProcess, __: Event) -> None:
        self._trained = True

    def _on_run(self, worker: WorkerProcess, event: Event) -> None:
        worker.in_run, worker.closed = True, False
        self._shards, self._timeout_s = event["shards"], event["timeout_s"]

    def _on_closed(self, worker: WorkerProcess, _: Event) -> None:
        worker.in_run, worker.closed = False, True

    def _on_ended(self, worker: WorkerProcess, _: Event) -> None:
        worker.ended = True

    def _on_silent(self, _: WorkerProcess, event: Event) -> None:
        culprit = self._workers[event["silent"]]
        if culprit.alive and not culprit.waits and culprit.kill_at is None:
            self._give_up(culprit, "says nothing: " + event["text"])

    def _on_stopped(self, _: WorkerProcess, event: Event) -> None:
        self._stopped = event["stopped"]

    def _on_error(self, worker: WorkerProcess, event: Event) -> None:
        worker.error, worker.mistake = event["error"], event.get("mistake", False)
        worker.hopeless = event.get("hopeless", False)
        self._console.log_error(worker.number, event["error"])

    def _on_final(self, worker: WorkerProcess, _: Event) -> None:
        worker.final = True

    def _on_committed(self, _: WorkerProcess, event: Event) -> None:
        self._stepped = True
        self._failures.clear()
        if self._lost_at is not None:
            late_s = time.monotonic() - self._lost_at
            self._console.say(f"step {event['committed']} is committed, {late_s:.3f} s after a worker was lost")
            self._lost_at = None

    # ---- the end ----

    def _finish(self) -> int:
        for worker in self._workers.values():
            for kind in list(worker.pending):
                self._on_output(kind, worker, b"")
        self._console.end_progress()
        if self._first_failure is not None:
            return self._report_failure(self._first_failure)
        if self._stop_signal is not None and not self._came_to_its_end():
            if self._stopped is not None:
                where = self._stopped["checkpoint"]
                saved = f"its checkpoint is {where}: go on with --resume" if where else "nothing was saved"
                self._console.say(
                    f"stopped by {signal_name(self._stop_signal)} after step {self._stopped['step']}; {saved}"
                )
                return Stopped.exit_code
            self._console.say(f"stopped by {signal_name(self._stop_signal)}")
            return 128 + self._stop_signal
        self._console.show_fingerprint()
        if self._job.num_workers > 1 and not self._trained:
            self._console.say(
                f"{self._job.script} made no evenstep.Run: {self._job.num_workers} workers have each run all of it by "
                "themselves; train inside `with evenstep.Run() as run`"
            )
        return 0

    def _came_to_its_end(self) -> bool:
        """Whether the run was over before it could be stopped: its last step was done already."""
        ends_well = all(w.code == 0 or w.dismissed for w in self._workers.values())
        return ends_well and self._is_over() and not self._killing

    def _report_failure(self, worker: WorkerProcess) -> int:
        """Show the error of the worker that failed first (the others fail because of it), last and whole."""
        how, code = worker.describe_end(), worker.code
        assert code is not None, "a worker that failed has ended"
        if not worker.mistake:
            crashes = self._crashes_always(worker)
            again = f", as {_MAX_CRASHES - 1} before it without a committed step in between" if crashes else ""
            self._console.say(f"{how}{again}")
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
    with Console(job.log_dir, job.num_workers, group, job.report) as console:
        import torch._inductor.config  # noqa: F401  # a second that every worker would spend in its first step

        return _Supervisor(job, console).run()
