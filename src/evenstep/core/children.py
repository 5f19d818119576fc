"""Processes that are forked from this one: how they begin, what they write, how they end.

A child lives apart from its parent (a session, descriptors and streams of its own) and dies with it. Everything that a
parent waits for comes through one selector, `Children`; it has one thread and waits in one place.
"""

import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from evenstep.core.errors import EvenstepError
from evenstep.core.output import say
from evenstep.native import core

__all__ = ["Child", "Children", "default_signals", "fork", "signal_name"]

_LONGEST_LINE_BYTES = 1 << 20  # what comes without a line feed is handed on in pieces of this size


class Child:
    """A forked process, from its start to its end.

    Attributes:
        pid: Its number; nobody else's until it is reaped.
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
                os.kill(self.pid, number)  # not its own group yet; its number is its own until we reap it

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it."""
        with suppress(OSError, IndexError):  # it is just ending
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most so long; whether it came. Does not reap it."""
        if not self.alive:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def reap(self) -> int:
        """Wait for its end and, unless it went well, end what it started; its number is free only then."""
        if self.code is None:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert end is not None, "without WNOHANG waitid returns only when the child has ended"
            if end.si_code != os.CLD_EXITED or end.si_status != 0:
                with suppress(ProcessLookupError, PermissionError):  # no group of its own yet, or another user's by now
                    os.killpg(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.pidfd)
        return self.code

    def kill(self) -> None:
        """End it now, with what it started."""
        self.signal(signal.SIGKILL)
        self.reap()

    def describe_end(self) -> str:
        """How it ended, in words that follow its name."""
        assert self.code is not None, "the exit code is there once the child is reaped"
        return f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"


def signal_name(number: int) -> str:
    """A signal's name, or its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # most real-time signals have no name


def default_signals() -> None:
    """Let signals do what they do in any program, whatever the parent does with them."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def fork(
    main: Callable[[], int], *, streams: tuple[int, int] = (1, 2), keep: Collection[int] = (), tied: bool = True
) -> Child:
    """Fork a process that does one thing.

    Args:
        main: What it does; what it returns is its exit code. An error of ours is said in a sentence, any other shown
            whole.
        streams: What becomes its standard output and error.
        keep: Descriptors that it keeps beside them. All others are closed in it; its standard input is empty.
        tied: It is killed when the thread that forks it ends. If not, it has to look itself whether its parent lives.
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
        with suppress(OSError, ValueError):  # nobody reads them any more, or the script has closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)  # as the kernel would; a larger number raises, and this process would go on


def _live_apart(parent: int | None, streams: tuple[int, int], keep: Collection[int]) -> None:
    if parent is not None:
        core.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
    os.setsid()
    signal.set_wakeup_fd(-1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(streams[0], 1)
    os.dup2(streams[1], 2)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            with suppress(OSError):  # the directory's own descriptor is gone by now
                os.close(fd)
    sys.stdin = os.fdopen(0, closefd=False)
    out, err = sys.stdout.encoding, sys.stderr.encoding
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding=out, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding=err, errors="backslashreplace", closefd=False)


class _Source(Protocol):
    def fileno(self) -> int: ...


class _Pipe:
    """What a child writes into one of its pipes, by lines."""

    def __init__(self, child: Child, kind: str, fd: int) -> None:
        self.child, self.kind, self.fd = child, kind, fd
        self._begun = b""

    def read(self) -> tuple[list[bytes], bool]:
        """The whole lines of what has come, and whether that was all there will ever be."""
        data = os.read(self.fd, 65536)
        *lines, rest = (self._begun + data).split(b"\n")
        if rest and (not data or (len(rest) > _LONGEST_LINE_BYTES and self.kind != "events")):
            lines, rest = [*lines, rest], b""
        self._begun = rest
        return lines, not data

    def rest(self) -> list[bytes]:
        """The line that has begun, if any, though nobody has ended it."""
        rest, self._begun = self._begun, b""
        return [rest] if rest else []


class Children:
    """The children of this process, what they write, and whatever else it waits for. Use it as a context manager.

    Args:
        heard: Called with a child, the kind of a pipe, and whole lines that the child has written into it.
        ended: Called with a child that has ended and was reaped, when all that it wrote has been heard.
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
            keep: Which other descriptors it keeps.
        """
        pipes = {kind: os.pipe() for kind in kinds}
        writing = {kind: pipe[1] for kind, pipe in pipes.items()}
        streams = (writing.get("out", 1), writing.get("err", 2))
        child = fork(lambda: main(writing), streams=streams, keep={*keep, *writing.values()} - set(streams))
        for kind, (reading, theirs) in pipes.items():
            os.close(theirs)
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, _Pipe(child, kind, reading))
        self.adopt(child)
        return child

    def adopt(self, child: Child) -> None:
        """Look after a child that was forked elsewhere."""
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def end(self, child: Child) -> None:
        """End a child now, and hear no more of it."""
        if child in self._children:
            self._children.remove(child)
            if child.pidfd in self._selector.get_map():
                self._selector.unregister(child.pidfd)
            child.kill()

    def watch(self, source: _Source, ready: Callable[[], None]) -> None:
        """Call somebody whenever there is something to read from a source, which stays the caller's."""
        self._selector.register(source, selectors.EVENT_READ, ready)

    def forget(self, source: _Source) -> None:
        """Watch a source no longer."""
        self._selector.unregister(source)

    def turn(self, wait_s: float) -> bool:
        """Wait, at most so long, and hand on what has come; False if nothing has."""
        ready = self._selector.select(max(wait_s, 0.0))
        for key, _ in sorted(ready, key=lambda item: self._order(item[0].data)):
            now = self._selector.get_map().get(key.fd)
            if (
                now is not None and now.data is key.data
            ):  # else it was closed meanwhile, and its number may be another's
                self._handle(key.data)
        return bool(ready)

    def _order(self, source: Any) -> tuple[int, int]:
        """What a child prints comes before what it says of itself, and that before its end, the oldest's first."""
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
        """Hear what a child has written so far, into all of its pipes or some."""
        for pipe in self._pipes():
            if pipe.child is child and (not kinds or pipe.kind in kinds):
                with suppress(BlockingIOError):
                    while pipe.fd in self._selector.get_map():
                        self._read(pipe)

    def _pipes(self) -> list[_Pipe]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Pipe)]

    def finish(self, timeout_s: float) -> None:
        """Hear what is left when all have ended; what they started may still write, so only for a while."""
        deadline = time.monotonic() + timeout_s
        while self._pipes() and self.turn(0.0) and time.monotonic() < deadline:
            pass
        for pipe in self._pipes():
            if rest := pipe.rest():
                self._heard(pipe.child, pipe.kind, rest)

    def close(self) -> None:
        """End all children, and let go of everything."""
        for child in self._children:
            child.kill()
        for pipe in self._pipes():
            os.close(pipe.fd)
        self._children = []
        self._selector.close()
