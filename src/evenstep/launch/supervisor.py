"""The supervisor: forks the workers of one machine from a warm process, watches them, and shows what they say.

It imports torch once, before it forks, so a worker is there in milliseconds. It has one thread and waits in one place.
Workers die with it (the kernel sees to that), and the segment has no name, so nothing outlives a run.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from evenstep.core import env
from evenstep.core.errors import ConfigError
from evenstep.launch.worker import become_worker
from evenstep.native import core
from evenstep.run.progress import Display, Progress
from evenstep.transport.segment import Segment

__all__ = ["Job", "supervise"]

_GRACE_S = 5.0  # how long the others may take to end once one has failed, and again before they are killed
_LONGEST_LINE_BYTES = 1 << 20  # what comes without a line feed is shown in pieces of this size
_DRAIN_S = 1.0  # how long to read on after the last worker has ended, if something that it started still writes


@dataclass(frozen=True)
class Job:
    """What to run."""

    script: Path
    args: tuple[str, ...]
    num_workers: int
    shards: int | None = None
    log_dir: Path | None = None


@dataclass
class _Worker:
    number: int
    pid: int
    pidfd: int
    log: BinaryIO | None
    code: int | None = None
    error: str | None = None
    mistake: bool = False  # the error is one sentence to the user, who needs no traceback
    pending: dict[str, bytes] = field(default_factory=dict)

    def describe_end(self) -> str:
        """How it ended, as a sentence."""
        assert self.code is not None, "it has ended"
        how = f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"worker {self.number} (pid {self.pid}) {how}"


class _Supervisor:
    def __init__(self, job: Job, logs: Sequence[BinaryIO | None]) -> None:
        self._job = job
        self._logs = logs
        self._segment = Segment.create(job.num_workers)
        self._selector = selectors.DefaultSelector()
        self._display = Display()
        self._workers: list[_Worker] = []
        self._first_failure: _Worker | None = None
        self._fingerprint: str | None = None
        self._signal: int | None = None
        self._deadline: float | None = None
        self._killing = False

    def run(self) -> int:
        wake, told = socket.socketpair()
        told.setblocking(False)
        wake.setblocking(False)
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody could be waited for
        signal.set_wakeup_fd(told.fileno())
        self._selector.register(wake, selectors.EVENT_READ, ("signal", None))
        try:
            for number in range(self._job.num_workers):
                self._start(number)
            while any(w.code is None for w in self._workers):
                self._turn(self._wait_s())
                self._check_deadline()
            drained = time.monotonic() + _DRAIN_S
            while self._turn(0.0) and time.monotonic() < drained:
                pass
            return self._finish()
        finally:
            self._kill(signal.SIGKILL)
            for worker in self._workers:
                if worker.code is None:
                    self._reap(worker)
            self._display.close()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
            for key in list(self._selector.get_map().values()):
                if key.fileobj is not wake:
                    os.close(key.fd)
            for closing in (wake, told, self._selector, self._segment):
                closing.close()

    def _start(self, number: int) -> None:
        pipes = {kind: os.pipe() for kind in ("out", "err", "events")}
        variables = env.worker_variables(
            number, self._job.num_workers, self._job.shards, self._segment.fd, pipes["events"][1]
        )
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
        worker = _Worker(number, pid, os.pidfd_open(pid), self._logs[number])
        self._workers.append(worker)
        for kind, (reading, writing) in pipes.items():
            os.close(writing)
            self._selector.register(reading, selectors.EVENT_READ, (kind, worker))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, ("exit", worker))

    def _turn(self, wait_s: float) -> bool:
        """Wait, at most so long, and handle what has come; False if nothing has."""
        ready = self._selector.select(timeout=wait_s)
        for key, _ in ready:
            kind, worker = key.data
            self._handle(kind, worker, key.fileobj)
        return bool(ready)

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = self._signal or number

    def _wait_s(self) -> float:
        return 1.0 if self._deadline is None else max(min(self._deadline - time.monotonic(), 1.0), 0.0)

    def _handle(self, kind: str, worker: _Worker | None, source: Any) -> None:
        if worker is None:
            source.recv(64)
            self._stop_all()
        elif kind == "exit":
            self._close(source)
            self._on_exit(worker)
        else:
            data = os.read(source, 65536)
            self._on_output(kind, worker, data)
            if not data:
                self._close(source)

    def _close(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _on_output(self, kind: str, worker: _Worker, data: bytes) -> None:
        """Pass on whole lines, and at the end of a stream what is left of one."""
        *lines, rest = (worker.pending.get(kind, b"") + data).split(b"\n")
        if rest and (not data or (len(rest) > _LONGEST_LINE_BYTES and kind != "events")):
            lines, rest = [*lines, rest], b""
        worker.pending[kind] = rest
        if kind == "events":
            for line in lines:
                self._on_event(worker, line)
        elif lines:
            self._show(worker, lines, sys.stdout if kind == "out" else sys.stderr)

    def _show(self, worker: _Worker, lines: Sequence[bytes], stream: TextIO) -> None:
        if worker.log is not None:
            worker.log.write(b"\n".join(lines) + b"\n")
            worker.log.flush()
        # with `_bytes_as_they_are`, what is no text in the stream's encoding comes out as it went in
        texts = (line.decode(stream.encoding or "utf-8", "surrogateescape") for line in lines)
        self._display.write("\n".join(f"[{worker.number}] {text}" for text in texts), stream)
        stream.flush()

    def _on_event(self, worker: _Worker, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # it was killed in the middle of a line
        if "progress" in event:
            self._display.show(Progress(**event["progress"]))
        elif "fingerprint" in event:
            self._show_fingerprint()  # that of an earlier run of this script
            self._fingerprint = event["fingerprint"]
        elif "error" in event:
            worker.error, worker.mistake = event["error"], event.get("mistake", False)
            if worker.log is not None:
                worker.log.write(worker.error.rstrip().encode(errors="backslashreplace") + b"\n")
                worker.log.flush()

    def _on_exit(self, worker: _Worker) -> None:
        self._reap(worker)
        if worker.code == 0 or self._deadline is not None:
            return
        core.abort_all(self._segment.base, self._job.num_workers, worker.number, worker.describe_end())
        self._first_failure = worker
        self._deadline = time.monotonic() + _GRACE_S

    def _reap(self, worker: _Worker) -> None:
        """Collect a worker that has ended and, unless all went well, what it started; its number is free only then."""
        end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None, "waitid waits"
        if end.si_code != os.CLD_EXITED or end.si_status != 0:
            with suppress(ProcessLookupError, PermissionError):  # no group of its own yet, or another user's by now
                os.killpg(worker.pid, signal.SIGKILL)
        worker.code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _stop_all(self) -> None:
        self._kill(signal.SIGKILL if self._killing else signal.SIGTERM)
        self._killing = True
        self._deadline = time.monotonic() + _GRACE_S

    def _check_deadline(self) -> None:
        if (
            self._deadline is not None
            and time.monotonic() >= self._deadline
            and any(w.code is None for w in self._workers)
        ):
            self._stop_all()

    def _kill(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.code is None:
                try:
                    os.killpg(worker.pid, number)
                except ProcessLookupError:
                    os.kill(worker.pid, number)  # not its own group yet; its number is its own until we reap it

    def _finish(self) -> int:
        for worker in self._workers:
            for kind in list(worker.pending):
                self._on_output(kind, worker, b"")
        self._display.close()
        sys.stdout.flush()
        if self._signal is not None:
            print(f"evenstep: stopped by {_signal_name(self._signal)}", file=sys.stderr)
            return 128 + self._signal
        if self._first_failure is not None:
            return self._report_failure(self._first_failure)
        self._show_fingerprint()
        return 0

    def _show_fingerprint(self) -> None:
        if self._fingerprint is not None:
            self._display.write(f"fingerprint {self._fingerprint}", sys.stdout)
            sys.stdout.flush()

    def _report_failure(self, first: _Worker) -> int:
        """Show the error of the worker that failed first (the others fail because of it), last and whole."""
        culprit, text = core.aborted(self._segment.base) or (first.number, "")
        worker = self._workers[culprit] if self._workers[culprit].code else first
        code, how = worker.code, worker.describe_end()
        assert code is not None, "a worker that failed has ended"
        if not worker.mistake:
            print(f"evenstep: {how}", file=sys.stderr)
        why = worker.error or (text if text != how else "")
        if why:
            print(why.rstrip(), file=sys.stderr)
        return code if code > 0 else 128 - code


def supervise(job: Job) -> int:
    """Run a job to its end; return the exit code: 0, or that of the worker that failed first.

    Raises:
        ConfigError: The logs or the segment cannot be made; nothing was started.
    """
    with ExitStack() as stack:
        logs: list[BinaryIO | None] = [None] * job.num_workers
        if job.log_dir is not None:
            try:
                job.log_dir.mkdir(parents=True, exist_ok=True)
                names = (f"worker-{number}.log" for number in range(job.num_workers))
                logs = [stack.enter_context((job.log_dir / name).open("wb")) for name in names]
            except OSError as error:
                raise ConfigError(
                    f"--log-dir {job.log_dir}: {error.filename or job.log_dir} cannot be made: {error.strerror}; "
                    "name another directory"
                ) from error
        import torch._inductor.config  # noqa: F401  # a second that every worker would spend in its first step

        for stream in (sys.stdout, sys.stderr):
            stack.enter_context(_bytes_as_they_are(stream))
        return _Supervisor(job, logs).run()


@contextmanager
def _bytes_as_they_are(stream: TextIO) -> Iterator[None]:
    """Let the stream write undecodable bytes, which workers may well print, as they are."""
    if not isinstance(stream, TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="surrogateescape")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # most real-time signals have no name
