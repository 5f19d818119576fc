"""Facts about this machine that a run depends on, read without judging them.

What cannot be read is None: a container may hide it, another system may not have it.
"""

import os
import platform
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from evenstep.core import env

__all__ = ["Facts", "read_facts"]

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What was found; sizes are in bytes, and a limit is None where there is none.

    Attributes:
        kernel: The release of Linux.
        has_memfd: Whether anonymous memory can be shared.
        has_pidfd: Whether the end of a process can be waited for.
        sees_itself: Whether /proc shows this process under its own number.
        ptrace_scope: Which processes may be inspected; 0: all of one's own.
        shared_bytes: The size of /dev/shm.
        memory_bytes: The memory available.
        cores: How many there are.
        usable_cores: On how many this process may run.
        quota_cores: How many it may use at a time.
        load: Processes ready to run, averaged over the last minute.
        open_files: How many files a process may have open.
        file_bytes: How large a file may be.
        address_bytes: How much a process may map.
        gpus: Their names.
        mps: Whether NVIDIA's service that lets processes share a GPU is running.
    """

    kernel: str
    has_memfd: bool
    has_pidfd: bool
    sees_itself: bool
    ptrace_scope: int | None
    shared_bytes: int | None
    memory_bytes: int | None
    cores: int
    usable_cores: int
    quota_cores: float | None
    load: float
    open_files: int | None
    file_bytes: int | None
    address_bytes: int | None
    gpus: tuple[str, ...]
    mps: bool

    def to_json(self) -> dict[str, Any]:
        """The facts as plain values."""
        return asdict(self)


def read_facts(gpus: tuple[str, ...] = (), proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Facts:
    """Read the facts of this machine; the caller passes the names of its GPUs, which only torch knows."""
    shared = _tried(lambda: os.statvfs("/dev/shm"))
    scope = _tried(lambda: int((proc / "sys/kernel/yama/ptrace_scope").read_text()))
    return Facts(
        kernel=platform.release(),
        has_memfd=_opens(lambda: os.memfd_create("evenstep")),
        has_pidfd=_opens(lambda: os.pidfd_open(os.getpid())),
        sees_itself=_tried(lambda: os.readlink(proc / "self")) == str(os.getpid()),
        ptrace_scope=scope,
        shared_bytes=shared and shared.f_frsize * shared.f_blocks,
        memory_bytes=_tried(lambda: _memory(proc / "meminfo")),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=_tried(lambda: _quota(cgroups / "cpu.max")),
        load=os.getloadavg()[0],
        open_files=_limit(resource.RLIMIT_NOFILE),
        file_bytes=_limit(resource.RLIMIT_FSIZE),
        address_bytes=_limit(resource.RLIMIT_AS),
        gpus=gpus,
        mps=(env.mps_directory() / "control").exists(),
    )


def _tried(function: Callable[[], T]) -> T | None:
    try:
        return function()
    except (OSError, ValueError, AttributeError):
        return None


def _opens(function: Callable[[], int]) -> bool:
    descriptor = _tried(function)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _memory(meminfo: Path) -> int | None:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _quota(cpu_max: Path) -> float | None:
    quota, period = cpu_max.read_text().split()
    return None if quota == "max" else int(quota) / int(period)
