"""One worker as the supervisor sees it, wherever its process is: what it said of its end, and how it ended."""

from dataclasses import dataclass

from evenstep.launch.machine import End

__all__ = ["Seat"]


@dataclass
class Seat:
    """The present or last worker of a place.

    Attributes:
        number: The place; a worker that replaces it has the same.
        error: What it said of its own end.
        given_up: Whether it is about to be killed because it does nothing any more.
        begins_again: Whether it has said that another has to take its place, and do more again.
        end: How its process ended, if it has.
    """

    number: int
    error: str | None = None
    given_up: bool = False
    begins_again: bool = False
    end: End | None = None

    @property
    def ended(self) -> End:
        """How its process ended."""
        assert self.end is not None, "it has"
        return self.end
