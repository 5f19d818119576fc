"""The trace of a run as a file that Perfetto and chrome://tracing open: JSON, whole after every write.

A *process* of the trace is a machine, a *thread* one worker from its start to its end. What the supervisor says is
shown as instants. All times are by the head's clock.

A process that is killed may leave a write half done. So another one, the *mender*, does nothing but wait for the end of
this one, and takes away what is incomplete then.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from evenstep.core.children import fork
from evenstep.core.errors import ConfigError
from evenstep.exchange.tracing import Kind, Span, unpack
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.trails import TrailPiece

__all__ = ["TraceFile", "mend"]

_STEP = re.compile(r"step \d+: ")  # how the tags of a step's exchanges begin
_BEGIN = b'{"displayTimeUnit": "ms", "otherData": {"evenstep trace": 1'
_END = b"\n]}\n"
_SUPERVISOR = 1  # its thread in the trace; no worker has that process id
_MOST_TEXT = 400
_TAIL_BYTES = 1 << 16  # at least two events
_MENDING_S = 5.0


class TraceFile:
    """Takes the spans of all workers. If the file can no longer be written, the user is told once, and the run goes on.

    Args:
        path: The file; an existing trace is replaced.
        job: What is traced.
        console: Tells the user what goes wrong, and has what the supervisor said.

    Raises:
        ConfigError: The file cannot be written, or exists and is not a trace: a slip must not cost a script.
    """

    def __init__(self, path: Path, job: Job, console: Console) -> None:
        self._path, self._console = path, console
        self._zero_ns, self._said_s = time.monotonic_ns(), 0.0
        self._known: set[tuple[int, int]] = set()
        self._lost, self._failed, self._end = 0, False, 0
        facts = json.dumps({"began": time.time(), "script": str(job.script)})[1:]
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.pread(self._fd, len(_BEGIN), 0) not in (b"", _BEGIN):
                os.close(self._fd)
                raise ConfigError(
                    f"--trace: {path} exists and is not a trace, so it is not replaced; name another file"
                )
            os.ftruncate(self._fd, 0)
            head = _BEGIN + f', {facts}, "traceEvents": [\n'.encode()
            self._write(head, [_name("thread_name", 1, _SUPERVISOR, "supervisor")])
        except OSError as error:
            raise ConfigError(f"--trace: cannot write {path}: {error.strerror}; name another file") from error
        alive, self._alive = os.pipe()  # the mender reads, and nobody ever writes
        self._mender = fork(lambda: _await_end(alive, self._fd), keep={alive, self._fd}, tied=False)
        os.close(alive)

    def add(self, machine: int, name: str, pieces: Iterable[TrailPiece], ahead_ns: int) -> None:
        """Write what workers of a machine did, and what the supervisor has said meanwhile.

        Args:
            machine: The number of the machine.
            name: Its host name.
            pieces: The spans of its workers.
            ahead_ns: How far its clock is ahead of this machine's.
        """
        lines = self._said()
        zero_ns = self._zero_ns + ahead_ns
        for place, pid, spans in pieces:
            lines += self._introduce(machine, name, place, pid)
            lines += [self._line(span, machine, pid, zero_ns) for span in unpack(spans)]
        self._append(lines)

    def finish(self) -> None:
        """Write what is left, and tell the user if spans are missing."""
        self._append(self._said())
        if self._lost:
            self._console.say(f"--trace {self._path}: {self._lost} spans are missing, since they came too fast")

    def close(self) -> None:
        """Close the file."""
        os.close(self._alive)
        if self._mender.wait(_MENDING_S):
            self._mender.reap()
        else:
            self._mender.kill()
        os.close(self._fd)

    def _said(self) -> list[str]:
        news = [(when_s, text) for when_s, text in self._console.said if when_s > self._said_s]
        self._said_s = news[-1][0] if news else self._said_s
        event = {"ph": "i", "s": "g", "pid": 1, "tid": _SUPERVISOR, "cat": "supervisor"}
        return [
            json.dumps({**event, "ts": round(1e6 * when_s - self._zero_ns / 1e3, 3), "name": text[:_MOST_TEXT]})
            for when_s, text in news
        ]

    def _append(self, lines: Sequence[str]) -> None:
        if not lines or self._failed:
            return
        try:
            self._write(b",\n", lines)
        except OSError as error:
            self._failed = True
            self._console.say(f"--trace {self._path} can no longer be written: {error.strerror}; it ends here")

    def _introduce(self, machine: int, name: str, place: int, pid: int) -> list[str]:
        lines, process = [], machine + 1
        if (process, 0) not in self._known:
            self._known.add((process, 0))
            lines.append(_name("process_name", process, 0, f"machine {machine} ({name})"))
        if (process, pid) not in self._known:
            self._known.add((process, pid))
            lines.append(_name("thread_name", process, pid, f"worker {place} (pid {pid})", worker=place))
            order = {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": pid}
            lines.append(json.dumps({**order, "args": {"sort_index": place + 2}}))
        return lines

    def _line(self, span: Span, machine: int, pid: int, zero_ns: int) -> str:
        if span.kind is Kind.LOST:
            self._lost += span.number
        begin, lasted = (span.begin_ns - zero_ns) / 1e3, span.duration_ns / 1e3
        what = _what(span.kind, _STEP.sub("", span.name, count=1), span.number)
        return f'{{"ph":"X","pid":{machine + 1},"tid":{pid},"ts":{begin:.3f},"dur":{lasted:.3f},{what}}}'

    def _write(self, head: bytes, lines: Iterable[str]) -> None:
        """Overwrite the end of the file with lines and a new end, in one call."""
        data = head + ",\n".join(lines).encode() + _END
        try:
            written = os.pwrite(self._fd, data, self._end)
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._end + written)
        except OSError:
            os.ftruncate(self._fd, self._end)
            os.pwrite(self._fd, _END, self._end)  # it needs no new space on the disk
            raise
        self._end += len(data) - len(_END)


def _await_end(alive: int, fd: int) -> int:
    """Be the mender: wait until the process at the other end of a pipe is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the other one decides
    os.read(alive, 1)
    mend(fd)
    return 0


def mend(fd: int) -> None:
    """Take away an event that is not complete, and write the end of the file if that is missing."""
    size = os.fstat(fd).st_size
    tail_begin = max(size - _TAIL_BYTES, 0)
    tail = os.pread(fd, size - tail_begin, tail_begin)
    complete = tail.rfind(b",\n")  # between two events; within one there is no line break
    if tail.endswith(b"}" + _END) or complete < 0:
        return
    os.ftruncate(fd, tail_begin + complete)
    os.pwrite(fd, _END, tail_begin + complete)


def _name(what: str, process: int, thread: int, name: str, **more: Any) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name, **more}})


@lru_cache(maxsize=4096)
def _what(kind: Kind, name: str, number: int) -> str:
    """The part of an event that says what was done."""
    args: dict[str, Any] = {}
    match kind:
        case Kind.FORWARD | Kind.BACKWARD if number >= 0:
            name, args = f"{kind.name.lower()}, shard {number}", {"shard": number}
        case Kind.WAIT if number >= 0:
            name, args = f"wait for worker {number}", {"worker": number}
        case Kind.WAIT:
            name = f"wait for {name}"
        case Kind.UNFINISHED:
            name, args = f"step {number}, unfinished", {"step": number, "in": name}
        case Kind.OPERATION:
            args = {"step": number}
        case Kind.LOST:
            name, args = f"{number} spans are missing here: there was no room", {"spans": number}
        case Kind.RECOVERY:
            name, args = "recovery" if number > 1 else "first generation", {"generation": number}
    return f'"name":{json.dumps(name or kind.name.lower())},"cat":"{kind.name.lower()}","args":{json.dumps(args)}'
