"""Whether the processes that are waited for are still alive, and how eagerly to wait for them."""

import os
import select

__all__ = ["Liveness", "look_count", "spin_count"]


class Liveness:
    """Watches processes by their ids. A process that has ended stays ended even if its id is reused."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._ended: set[int] = set()

    def watch(self, pid: int) -> None:
        """Begin to watch a process now, before its id could be reused."""
        if pid not in self._pidfds and pid not in self._ended:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(pid)

    def ended(self, pid: int) -> bool:
        """Whether it has ended."""
        self.watch(pid)
        if pid in self._ended:
            return True
        poll = select.poll()  # not select.select: it cannot look at descriptors above 1023
        poll.register(self._pidfds[pid], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching all processes."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def look_count(num_processes: int) -> int:
    """How often to look at the mark of a process on another core before giving this one away: for some microseconds."""
    return 400 if num_processes <= len(os.sched_getaffinity(0)) else 0


def spin_count(num_processes: int) -> int:
    """How often to look at a mark before sleeping: spinning is a gain only while each process has a core of its own."""
    return 2000 if num_processes <= len(os.sched_getaffinity(0)) else 320
