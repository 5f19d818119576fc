"""The resources that processes use, sampled from time to time, and whether they grow."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Growth", "Usage", "Watch", "usage"]

_WARM_LOOKS = 10  # until a process has everything it will need
_LEAST_LOOKS = 40  # a process with fewer samples after that says nothing about growth
_MEMORY_MIB = 16.0  # how much caches and allocators may grow in the long run
_MEMORY_SHARE = 0.05
_FEW = 5  # descriptors and threads that may be there by chance: a leak soon has more
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Usage:
    """The resources of a process at one moment.

    Attributes:
        memory_mib: Its private memory.
        descriptors: How many files, sockets and the like it has open.
        threads: How many threads it has.
    """

    memory_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """How a process's minimum use changed from the first third of its life to the last; of several, the worst.

    Attributes:
        lives: How many processes there were.
        before: Its minimum use at first.
        after: Its minimum use at the end.
        peak_mib: The most memory that any used.
        grown: What grew by more than allowed, in words.
    """

    lives: int
    before: Usage
    after: Usage
    peak_mib: float
    grown: tuple[str, ...]


def usage(pid: int) -> Usage | None:
    """Look at a process; None if it is gone."""
    try:
        resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
        threads = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[17])
        return Usage((resident - shared) * _PAGE_MIB, len(os.listdir(f"/proc/{pid}/fd")), threads)
    except (OSError, IndexError):
        return None


class Watch:
    """Remembers what all processes used."""

    def __init__(self) -> None:
        self._lives: dict[str, dict[int, list[Usage]]] = defaultdict(lambda: defaultdict(list))

    def look(self, subjects: Mapping[str, Iterable[int]]) -> None:
        """Sample the present processes of each name."""
        for name, pids in subjects.items():
            for pid in pids:
                found = usage(pid)
                if found is not None:
                    self._lives[name][pid].append(found)

    @property
    def names(self) -> list[str]:
        """The names of processes so far."""
        return list(self._lives)

    def growth(self, name: str) -> Growth:
        """The growth of the processes of a name."""
        lives = self._lives[name]
        found = [_growth(looks) for looks in lives.values()]
        before, after = max(found, key=lambda pair: _excess(*pair))
        peak = max(look.memory_mib for looks in lives.values() for look in looks)
        return Growth(len(lives), before, after, peak, _grown(before, after))


def _growth(looks: list[Usage]) -> tuple[Usage, Usage]:
    warm = looks[_WARM_LOOKS:]
    if len(warm) < _LEAST_LOOKS:
        return looks[-1], looks[-1]
    third = len(warm) // 3
    return _floor(warm[:third]), _floor(warm[-third:])


def _floor(looks: list[Usage]) -> Usage:
    """What was used at the quietest moments, which a leak raises, whatever comes and goes."""
    low = len(looks) // 10
    return Usage(
        sorted(look.memory_mib for look in looks)[low],
        sorted(look.descriptors for look in looks)[low],
        sorted(look.threads for look in looks)[low],
    )


def _excess(before: Usage, after: Usage) -> float:
    """How far it exceeds what is allowed; to find the worst of several processes."""
    memory = (after.memory_mib - before.memory_mib) / (_MEMORY_MIB + _MEMORY_SHARE * before.memory_mib)
    few = max(after.descriptors - before.descriptors, after.threads - before.threads) / _FEW
    return max(memory, few)


def _grown(before: Usage, after: Usage) -> tuple[str, ...]:
    found = []
    if after.memory_mib > before.memory_mib * (1 + _MEMORY_SHARE) + _MEMORY_MIB:
        found.append("memory")
    if after.descriptors > before.descriptors + _FEW:
        found.append("descriptors")
    if after.threads > before.threads + _FEW:
        found.append("threads")
    return tuple(found)
