"""The trace of a run as a file that Perfetto and chrome://tracing open: JSON, whole after every write.

A process that is killed may leave a write half done. So another one, the *mender*, does nothing but wait for the end of
this one, and takes away what is incomplete then.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evenstep.core.children import fork
from evenstep.core.errors import ConfigError
from evenstep.launch.trace_lines import SUPERVISOR, name_of

__all__ = ["TraceFile", "mend"]

_BEGIN = b'{"displayTimeUnit": "ms", "otherData": {"evenstep trace": 1'
_END = b"\n]}\n"
_TAIL_BYTES = 1 << 16  # at least two events
_MENDING_S = 5.0


class TraceFile:
    """Takes events. If the file can no longer be written, the user is told once, and the run goes on.

    Args:
        path: The file; an existing trace is replaced.
        script: What is traced.
        say: Tells the user what goes wrong.

    Raises:
        ConfigError: The file cannot be written, or exists and is not a trace: a slip must not cost a script.
    """

    def __init__(self, path: Path, script: Path | str, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._failed, self._end = False, 0
        facts = json.dumps({"began": time.time(), "script": str(script)})[1:]
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.pread(self._fd, len(_BEGIN), 0) not in (b"", _BEGIN):
                os.close(self._fd)
                raise ConfigError(
                    f"--trace: {path} exists and is not a trace, so it is not replaced; name another file"
                )
            os.ftruncate(self._fd, 0)
            head = _BEGIN + f', {facts}, "traceEvents": [\n'.encode()
            self._write(head, [name_of("thread_name", 1, SUPERVISOR, "supervisor")])
        except OSError as error:
            raise ConfigError(f"--trace: cannot write {path}: {error.strerror}; name another file") from error
        alive, self._alive = os.pipe()  # the mender reads, and nobody ever writes
        self._mender = fork(lambda: _await_end(alive, self._fd), keep={alive, self._fd}, tied=False)
        os.close(alive)

    def append(self, lines: Sequence[str]) -> None:
        """Write events, each a line of JSON; at least one."""
        if self._failed:
            return
        try:
            self._write(b",\n", lines)
        except OSError as error:
            self._failed = True
            self._say(f"--trace {self._path} can no longer be written: {error.strerror}; it ends here")

    def close(self) -> None:
        """Close the file."""
        os.close(self._alive)
        if self._mender.wait(_MENDING_S):
            self._mender.reap()
        else:
            self._mender.kill()
        os.close(self._fd)

    def _write(self, head: bytes, lines: Sequence[str]) -> None:
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
    """The body of the mender: wait until the process at the other end of a pipe is gone, then mend the file."""
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
