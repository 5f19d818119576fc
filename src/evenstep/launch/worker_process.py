"""One worker as its machine sees it: a process, and whether it is about to be killed."""

from dataclasses import dataclass

from evenstep.core.children import Child

__all__ = ["WorkerProcess"]


@dataclass
class WorkerProcess:
    """A worker's process.

    Attributes:
        number: Its place; a worker that replaces it has the same.
        child: The process.
        given_up: Why it is about to be killed, if it is.
        kill_at: When it is killed, if it has not written its stack before.
        writes: Whether it has begun to write its stack.
        stopped_since: When it was first seen stopped.
        starved: Whether the system killed it because memory had run out.
        where: The machine that it is on, if there are others.
    """

    number: int
    child: Child
    given_up: str | None = None
    kill_at: float | None = None
    writes: bool = False
    stopped_since: float | None = None
    starved: bool = False
    where: str = ""

    def describe(self) -> str:
        """Its name for the user."""
        return f"worker {self.number} (pid {self.child.pid}{self.where})"

    def describe_end(self) -> str:
        """How it ended, as a sentence."""
        return f"{self.describe()} {self.child.describe_end()}{' (out of memory)' if self.starved else ''}"
