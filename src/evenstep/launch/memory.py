"""When memory runs out, the kernel kills a process: it should be a worker, which can be replaced, and the user is told.

A cgroup counts the processes killed in it; where it does not, the machine does.
"""

import contextlib
from pathlib import Path

__all__ = ["Starvation", "go_first"]

_ROOM_BYTES = 512 << 20  # more memory than a supervisor can use beyond what its workers share with it


def go_first(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    """Let the kernel kill this process before its supervisor, which takes as much memory, but not before others."""
    limits = [*_numbers(proc, cgroups, "memory.max", "memory.limit_in_bytes"), _number(proc / "meminfo", "MemTotal:")]
    known = [limit for limit in limits if limit]
    with contextlib.suppress(OSError, ValueError):
        least = min(known, default=_ROOM_BYTES)
        path = proc / "self/oom_score_adj"
        path.write_text(str(min(int(path.read_text()) + -(-1000 * _ROOM_BYTES // least), 1000)))


class Starvation:
    """How often the kernel has killed a process here because memory had run out."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._seen = self._count()

    def struck(self) -> bool:
        """Whether the count has grown. Call it once for every process that was killed: it is true for as many."""
        found = self._count() > self._seen
        self._seen += found
        return found

    def _count(self) -> int:
        counts = _numbers(self._proc, self._cgroups, "memory.events", "memory.oom_control", word="oom_kill")
        return max(counts, default=_number(self._proc / "vmstat", "oom_kill") or 0)


def _numbers(proc: Path, cgroups: Path, unified: str, separate: str, word: str = "") -> list[int]:
    """The numbers in files of this process's cgroup, of either version, as far as they exist."""
    found = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number == "0":
                found += [_number(root / path.lstrip("/") / unified, word) for root in (cgroups, cgroups / "unified")]
            elif "memory" in kinds.split(","):
                found.append(_number(cgroups / "memory" / path.lstrip("/") / separate, word))
    return [number for number in found if number is not None]


def _number(path: Path, word: str) -> int | None:
    """The number in a file: the whole file, or what follows `word` at the start of a line (kB converted to bytes)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            if not word:
                return int(words[0])
            if words[0] == word:
                return int(words[1]) << (10 if words[-1] == "kB" else 0)
    return None
