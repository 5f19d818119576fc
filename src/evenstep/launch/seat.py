"""One worker as the supervisor sees it, on whichever machine: what it said about its end, and how it ended."""

from dataclasses import dataclass

from evenstep.launch.machine import End

__all__ = ["Seat"]


@dataclass
class Seat:
    """The present or last worker of a place.

    Attributes:
        number: The place; a worker that replaces it has the same.
        error: The error with which it ended, if it reported one.
        given_up: Whether it is about to be killed because it makes no progress.
        begins_again: Whether it has said that another worker must take its place and repeat more than the last step.
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
        assert self.end is not None, "asked only of a worker that has ended"
        return self.end
