"""What /proc says about the processes of a test: who descends from whom, who holds which descriptor."""

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a process whose parent dies becomes our child, so that no grandchild can hide."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int | None = None) -> dict[int, str]:
    """Living descendants of a process (default: this one): pid -> command line. Zombies do not count."""
    found: list[int] = []
    asked = [pid or os.getpid()]
    while asked:
        for thread in _files(f"/proc/{asked.pop()}/task"):
            with contextlib.suppress(OSError):
                children = [int(child) for child in Path(f"{thread}/children").read_text().split()]
                found += children
                asked += children
    return {child: command_line(child) for child in sorted(found) if is_alive(child)}


def _files(folder: str) -> list[str]:
    """What is in a folder that may be gone at any time."""
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def command_line(pid: int) -> str:
    """The command line of a process, or nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def memfds() -> dict[int, str]:
    """The descriptors of this process that belong to a memfd."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if "memfd:" in target:
                found[int(entry)] = target
    return found


def reap_orphans() -> None:
    """Collect adopted children that have ended. Call it only when nobody waits for a child of his own."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


_PORTS = itertools.count(31 * os.getpid())


def take_other_ports() -> None:
    """From now on this process looks for ports elsewhere than the one that it was forked from."""
    global _PORTS
    _PORTS = itertools.count(31 * os.getpid())


def free_port() -> int:
    """A port that nobody has, from below those that the system gives out: nobody gets it by chance meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for number in _PORTS:
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", 2048 + number % max(first - 2048, 2048)))
            return int(trial.getsockname()[1])
    raise AssertionError("the numbers never end")


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Poll until the condition holds; False if it does not within the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
