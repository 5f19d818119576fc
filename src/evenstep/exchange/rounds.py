"""What a group needs from the carrier of its exchanges: to post, to collect, and failure that reaches everyone."""

from collections.abc import Sequence
from typing import Protocol

from evenstep.exchange.generations import Generation

__all__ = ["Rounds"]


class Rounds(Protocol):
    """The exchanges of a run, as one worker takes part in them.

    Memory is given by address: posted memory may be reused at once, memory to collect into must stay until the call
    returns. Sequence numbers are the group's: a worker posts one only after it has collected everything before it.

    Attributes:
        worker: The number of this worker.
        most_bytes: The most that one post may carry.
        timeout_s: How long any wait for another worker may take.
        waited_s: How long this worker has waited for others altogether.
    """

    worker: int
    most_bytes: int
    timeout_s: float
    waited_s: float

    def begin(self, generation: Generation) -> None:
        """Begin a generation that this worker is in."""

    def post(self, seq: int, tag: str, address: int, num_bytes: int, among: Sequence[int]) -> None:
        """Offer bytes to the participating workers, which include this one. Does not wait."""

    def collect(self, worker: int, seq: int, tag: str, address: int, num_bytes: int, deadline: float) -> None:
        """Take what a worker offers; blocks until it has offered it.

        Args:
            worker: Whose offer to take.
            seq: The number of the exchange.
            tag: The exchange in words; the offer must have the same tag.
            address: Where the bytes go.
            num_bytes: How many the worker must have offered.
            deadline: When to give up, by the monotonic clock.

        Raises:
            MismatchError: The worker is at another exchange.
            PeerError: A worker failed or died.
            SilenceError: The worker did not come in time.
        """

    def follow(self, worker: int, seq: int, tag: str, deadline: float) -> None:
        """Wait until a worker has offered something under this number or a later one; take nothing.

        The arguments and errors are those of `collect`.
        """

    def check(self) -> None:
        """Check for failures; for callers that wait for something other than an exchange.

        Raises:
            PeerError: A worker failed or died.
        """

    def check_process(self) -> None:
        """Check that this process is the worker.

        Raises:
            ConfigError: It is a forked copy of it.
        """

    def fail(self, text: str) -> None:
        """Tell everyone that this worker failed; only the first failure of a group counts."""

    def leave(self) -> None:
        """Take part in no more exchanges of this generation.

        Raises:
            PeerError: This worker has failed, so it cannot enter another generation.
        """

    def close(self) -> None:
        """Close the descriptors."""
