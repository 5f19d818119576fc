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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from evenstep.core import env
from evenstep.core.errors import ConfigError
from evenstep.launch.worker import become_worker
from evenstep.native import core
from evenstep.run.progress import Display, Progress
from evenstep.transport.segment import Segment

__all__ = ["Job", "supervise"]

_GRACE_S = 5.0  # how long the others may take to end once one has failed, and again before they are killed


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
    code: int | None = None
    error: str | None = None
    log: BinaryIO | None = None
    pending: dict[str, bytes] = field(default_factory=dict)


class _Supervisor:
    def __init__(self, job: Job) -> None:
        self._job = job
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
        signal.set_wakeup_fd(told.fileno())
        self._selector.register(wake, selectors.EVENT_READ, ("signal", None, wake))
        try:
            for number in range(self._job.num_workers):
                self._start(number)
            while any(w.code is None for w in self._workers) or len(self._selector.get_map()) > 1:
                for key, _ in self._selector.select(timeout=self._wait_s()):
                    self._handle(*key.data, fileobj=key.fileobj)
                self._check_deadline()
            return self._finish()
        finally:
            self._kill(signal.SIGKILL)
            self._display.close()
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
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
        worker = _Worker(number, pid, os.pidfd_open(pid))
        if self._job.log_dir is not None:
            worker.log = (self._job.log_dir / f"worker-{number}.log").open("wb")
        self._workers.append(worker)
        for kind, (reading, writing) in pipes.items():
            os.close(writing)
            self._selector.register(reading, selectors.EVENT_READ, (kind, worker, None))
        self._selector.register(worker.pidfd, selectors.EVENT_READ, ("exit", worker, None))

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = self._signal or number

    def _wait_s(self) -> float:
        return 1.0 if self._deadline is None else max(min(self._deadline - time.monotonic(), 1.0), 0.0)

    def _handle(self, kind: str, worker: _Worker | None, extra: Any, *, fileobj: Any) -> None:
        if worker is None:
            extra.recv(64)
            self._stop_all()
        elif kind == "exit":
            self._selector.unregister(fileobj)
            os.close(fileobj)
            self._on_exit(worker)
        else:
            data = os.read(fileobj, 65536)
            self._on_output(kind, worker, data)
            if not data:
                self._selector.unregister(fileobj)
                os.close(fileobj)

    def _on_output(self, kind: str, worker: _Worker, data: bytes) -> None:
        """Pass on whole lines, and at the end of a stream what is left of one."""
        *lines, rest = (worker.pending.get(kind, b"") + data).split(b"\n")
        if not data and rest:
            lines, rest = [*lines, rest], b""
        worker.pending[kind] = rest
        for line in lines:
            if kind == "events":
                self._on_event(worker, json.loads(line))
            else:
                if worker.log is not None:
                    worker.log.write(line + b"\n")
                    worker.log.flush()
                text = line.decode(errors="replace")
                self._display.write(f"[{worker.number}] {text}", sys.stdout if kind == "out" else sys.stderr)

    def _on_event(self, worker: _Worker, event: dict[str, Any]) -> None:
        if "progress" in event:
            self._display.show(Progress(**event["progress"]))
        elif "fingerprint" in event:
            self._fingerprint = event["fingerprint"]
        elif "error" in event:
            worker.error = event["error"]

    def _on_exit(self, worker: _Worker) -> None:
        _, status = os.waitpid(worker.pid, 0)
        worker.code = os.waitstatus_to_exitcode(status)
        if worker.code == 0 or self._deadline is not None:
            return
        how = f"was killed by {signal.Signals(-worker.code).name}" if worker.code < 0 else f"ended with exit code {worker.code}"
        core.abort_all(self._segment.base, worker.number, f"worker {worker.number} (pid {worker.pid}) {how}")
        self._first_failure = worker
        self._deadline = time.monotonic() + _GRACE_S

    def _stop_all(self) -> None:
        self._kill(signal.SIGKILL if self._killing else signal.SIGTERM)
        self._killing = True
        self._deadline = time.monotonic() + _GRACE_S

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline and any(w.code is None for w in self._workers):
            self._stop_all()

    def _kill(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.code is None:
                try:
                    os.killpg(worker.pid, number)
                except ProcessLookupError:
                    signal.pidfd_send_signal(worker.pidfd, number)  # not its own group yet
            if worker.code is None and number == signal.SIGKILL:
                os.waitpid(worker.pid, 0)
                worker.code = -number

    def _finish(self) -> int:
        self._display.close()
        for worker in self._workers:
            if worker.log is not None:
                worker.log.close()
        if self._signal is not None:
            print(f"evenstep: stopped by {signal.Signals(self._signal).name}", file=sys.stderr)
            return 128 + self._signal
        if self._first_failure is not None:
            return self._report_failure(self._first_failure)
        if self._fingerprint is not None:
            print(f"fingerprint {self._fingerprint}", flush=True)
        return 0

    def _report_failure(self, first: _Worker) -> int:
        """Show the error of the worker that failed first (the others fail because of it), last and whole."""
        culprit, text = core.aborted(self._segment.base) or (first.number, "")
        worker = self._workers[culprit] if self._workers[culprit].code else first
        print(f"evenstep: worker {worker.number} failed", file=sys.stderr)
        print((worker.error or text).rstrip(), file=sys.stderr)
        assert worker.code is not None, "a worker that failed has ended"
        return worker.code if worker.code > 0 else 128 - worker.code


def supervise(job: Job) -> int:
    """Run a job to its end; return the exit code: 0, or that of the worker that failed first.

    Raises:
        ConfigError: The log directory cannot be made; nothing was started.
    """
    if job.log_dir is not None:
        try:
            job.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {job.log_dir} cannot be made: {error.strerror}; name another one") from error
    return _Supervisor(job).run()
