"""One worker as the supervisor sees it: a process, what it said of its end, and whether it is about to be killed."""

from dataclasses import dataclass

from evenstep.core.children import Child

__all__ = ["WorkerProcess"]


@dataclass
class WorkerProcess:
    """A worker's process.

    Attributes:
        number: Its place; a worker that replaces it has the same.
        child: The process.
        error: What it said of its own end.
        given_up: Why it is going to be killed, if it is.
        kill_at: When that will be.
        stopped_since: When it was first seen stopped.
        starved: Whether the system killed it because there was no memory left.
        where: On which machine it is, if there are others.
    """

    number: int
    child: Child
    error: str | None = None
    given_up: str | None = None
    kill_at: float | None = None
    stopped_since: float | None = None
    starved: bool = False
    where: str = ""

    def describe(self) -> str:
        """Which one."""
        return f"worker {self.number} (pid {self.child.pid}{self.where})"

    def describe_end(self) -> str:
        """How it ended, as a sentence."""
        return f"{self.describe()} {self.child.describe_end()}{' (out of memory)' if self.starved else ''}"
