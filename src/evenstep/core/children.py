"""Processes that are forked from this one: how they begin, what they write, how they end.

A child lives apart from its parent (a session, descriptors and streams of its own) and dies with it. Everything that a
parent waits for comes through one selector, `Children`; it has one thread and waits in one place.
"""

import os
import re
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from evenstep.core.errors import EvenstepError
from evenstep.core.output import say
from evenstep.native import core

__all__ = ["Child", "Children", "default_signals", "fork", "signal_name"]

_LONGEST_LINE_BYTES = 1 << 20  # longer lines are handed on in pieces of this size


class Child:
    """A forked process, from its start to its end.

    Attributes:
        pid: Its process id, which is not reused until it is reaped.
        pidfd: Readable when it has ended.
        code: Its exit code, or minus the signal that killed it; None until it is reaped.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.pidfd = pid, os.pidfd_open(pid)
        self.code: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.code is None

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it started."""
        if self.alive:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # it has no process group yet; its id is not reused until we reap it

    def interrupt(self, number: int) -> None:
        """Send a signal to its main thread alone, which handles it before it goes on, even if it was stopped."""
        if self.alive:
            core.interrupt(self.pid, number)

    def is_interrupted(self, number: int) -> bool:
        """Whether its main thread has yet to handle such a signal, or to come back from handling it."""
        with suppress(OSError):  # it may be ending right now
            status = Path(f"/proc/{self.pid}/task/{self.pid}/status").read_text()
            masks = re.findall(r"^Sig(?:Pnd|Blk):\s*(\w+)", status, re.MULTILINE)
            return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
        return False

    def is_stopped(self) -> bool:
        """Whether it has been stopped, such as by SIGSTOP."""
        with suppress(OSError, IndexError):  # it may be ending right now
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long for its end; return whether it came. Does not reap it."""
        if not self.alive:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def reap(self) -> int:
        """Wait for its end and, unless it exited with 0, kill what it started; only then is its id free."""
        if self.code is None:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None, "without WNOHANG waitid returns only when the child has ended"
            if end.si_code != os.CLD_EXITED or end.si_status != 0:
                with suppress(ProcessLookupError, PermissionError):  # no process group yet, or another user's by now
                    os.killpg(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.pidfd)
        return self.code

    def kill(self) -> None:
        """Kill it now, with what it started."""
        self.signal(signal.SIGKILL)
        self.reap()

    def describe_end(self) -> str:
        """How it ended, in words that follow its name."""
        assert self.code is not None, "a child has an exit code only once it is reaped"
        return f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"


def signal_name(number: int) -> str:
    """A signal's name, or its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # most real-time signals have no name


def default_signals() -> None:
    """Give all signals their default effect, whatever the parent did with them."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fork(
    main: Callable[[], int], *, streams: tuple[int, int] = (1, 2), keep: Collection[int] = (), tied: bool = True
) -> Child:
    """Fork a process that does one thing.

    Args:
        main: What it does; returns its exit code. Our own errors print one sentence, any other its traceback.
        streams: Its standard output and error.
        keep: Other descriptors that it keeps. The rest lead nowhere in it; its standard input is empty.
        tied: It is killed when the thread that forks it ends. If not, it must check itself whether its parent lives.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(main, parent if tied else None, streams, keep)
    return Child(pid)


def _become(main: Callable[[], int], parent: int | None, streams: tuple[int, int], keep: Collection[int]) -> NoReturn:
    code = 1
    try:
        _live_apart(parent, streams, keep)
        code = main()
    except EvenstepError as error:
        say(str(error))
        code = error.exit_code
    except BaseException:  # noqa: BLE001  # the border of the process: shown, and the exit code says so
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # their reader is gone, or the script has closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)  # as the kernel does; a larger number would raise, and this process would go on


def _live_apart(parent: int | None, streams: tuple[int, int], keep: Collection[int]) -> None:
    if parent is not None:
        core.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
    os.setsid()
    signal.set_wakeup_fd(-1)
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # the parent has no such stream
    os.dup2(null, 0)
    os.dup2(streams[0], 1)
    os.dup2(streams[1], 2)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in (null, *keep) and os.path.lexists(f"/proc/self/fd/{fd}"):  # the listing's own is gone
            # Not closed: objects that came along would write to, or close, what gets their number next.
            os.dup2(null, fd, inheritable=False)
    os.close(null)
    sys.stdin = os.fdopen(0, closefd=False)
    out, err = sys.stdout.encoding, sys.stderr.encoding
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding=out, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=err, errors="backslashreplace", closefd=False)


class _Readable(Protocol):
    def fileno(self) -> int: ...


class _Pipe:
    """What a child writes into one of its pipes, by lines."""

    def __init__(self, child: Child, kind: str, fd: int) -> None:
        self.child, self.kind, self.fd = child, kind, fd
        self._begun = b""

    def read(self) -> tuple[list[bytes], bool]:
        """The complete lines that have arrived, and whether the pipe has ended."""
        data = os.read(self.fd, 65536)
        *lines, rest = (self._begun + data).split(b"\n")
        if self.kind != "events" and rest and (not data or len(rest) > _LONGEST_LINE_BYTES):
            lines, rest = [*lines, rest], b""  # an incomplete event is dropped: its writer was killed
        self._begun = rest
        return lines, not data

    def rest(self) -> list[bytes]:
        """The last line, if it never got its line feed."""
        rest, self._begun = self._begun, b""
        return [rest] if rest and self.kind != "events" else []


class Children:
    """The children of this process, what they write, and whatever else it waits for. Use it as a context manager.

    Args:
        heard: Called with a child, the kind of a pipe, and complete lines that the child has written into it.
        ended: Called with a child that has ended and was reaped, once everything it wrote has been heard.
    """

    def __init__(self, heard: Callable[[Child, str, Sequence[bytes]], None], ended: Callable[[Child], None]) -> None:
        self._heard, self._ended = heard, ended
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, main: Callable[[Mapping[str, int]], int], kinds: Sequence[str], keep: Collection[int] = ()
    ) -> Child:
        """Fork a child that writes into pipes.

        Args:
            main: What it does, given the descriptors of its pipes by kind; see `fork`.
            kinds: Which pipes it has. "out" and "err" are its standard output and error.
            keep: Other descriptors that it keeps.
        """
        pipes = {kind: os.pipe() for kind in kinds}
        writing = {kind: pipe[1] for kind, pipe in pipes.items()}
        streams = (writing.get("out", 1), writing.get("err", 2))
        child = fork(lambda: main(writing), streams=streams, keep={*keep, *writing.values()} - set(streams))
        for _, theirs in pipes.values():
            os.close(theirs)
        self.adopt(child, {kind: reading for kind, (reading, _) in pipes.items()})
        return child

    def adopt(self, child: Child, pipes: Mapping[str, int] = MappingProxyType({})) -> None:
        """Take on a child that was forked elsewhere, and the ends of pipes from which to read what it writes."""
        for kind, reading in pipes.items():
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, _Pipe(child, kind, reading))
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def end(self, child: Child) -> None:
        """Kill a child now, and report nothing more of it."""
        if child in self._children:
            self._children.remove(child)
            if child.alive:  # otherwise its descriptor is closed, and its number may be another's
                self._selector.unregister(child.pidfd)
                child.kill()

    def watch(self, source: _Readable, ready: Callable[[], None]) -> None:
        """Call `ready` whenever there is something to read from a source, which stays the caller's."""
        self._selector.register(source, selectors.EVENT_READ, ready)

    def forget(self, source: _Readable) -> None:
        """Stop watching a source."""
        self._selector.unregister(source)

    def turn(self, wait_s: float) -> bool:
        """Wait at most this long, and hand on what has arrived; False if nothing has."""
        ready = self._selector.select(max(wait_s, 0.0))
        for key, _ in sorted(ready, key=lambda item: self._order(item[0].data)):
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:  # otherwise it was closed, and its number may be another's
                self._handle(key.data)
        return bool(ready)

    def _order(self, source: Any) -> tuple[int, int]:
        """A child's output comes before its events, and those before its end; older children come first."""
        if isinstance(source, _Pipe):
            return (1 if source.kind == "events" else 0, 0)
        return (2, self._children.index(source)) if isinstance(source, Child) else (3, 0)

    def _handle(self, source: Any) -> None:
        if isinstance(source, _Pipe):
            self._read(source)
        elif isinstance(source, Child):
            self._selector.unregister(source.pidfd)
            self.drain(source)
            source.reap()
            self._ended(source)
        else:
            source()

    def _read(self, pipe: _Pipe) -> None:
        lines, over = pipe.read()
        if over:
            self._selector.unregister(pipe.fd)
            os.close(pipe.fd)
        if lines:
            self._heard(pipe.child, pipe.kind, lines)

    def drain(self, child: Child, *kinds: str) -> None:
        """Hand on what a child has written so far, to all of its pipes or to some."""
        for pipe in self._pipes():
            if pipe.child is child and (not kinds or pipe.kind in kinds):
                with suppress(BlockingIOError):
                    while pipe.fd in self._selector.get_map():
                        self._read(pipe)

    def _pipes(self) -> list[_Pipe]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Pipe)]

    def finish(self, timeout_s: float) -> None:
        """Hand on what is left when all have ended; what they started may still write, hence the timeout."""
        deadline = time.monotonic() + timeout_s
        while self._pipes() and self.turn(0.0) and time.monotonic() < deadline:
            pass
        for pipe in self._pipes():
            if rest := pipe.rest():
                self._heard(pipe.child, pipe.kind, rest)

    def close(self) -> None:
        """Kill all children, and release everything."""
        for child in self._children:
            child.kill()
        for pipe in self._pipes():
            os.close(pipe.fd)
        self._children = []
        self._selector.close()
