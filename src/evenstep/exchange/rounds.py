"""What a group needs of whatever carries its exchanges: to post, to collect, and failure that reaches everyone."""

from collections.abc import Sequence
from typing import Protocol

from evenstep.exchange.generations import Generation

__all__ = ["Rounds"]


class Rounds(Protocol):
    """The exchanges of a run, as one worker takes part in them.

    Memory is given by address: of what is posted it may be used again at once, to what is collected it must stay until
    the call returns. Sequence numbers are the group's: whoever posts one has collected all that came before it.

    Attributes:
        worker: The number of this worker.
        most_bytes: What one post may carry.
        timeout_s: How long any wait for another worker may take.
        waited_s: How long this worker has waited for others in all.
    """

    worker: int
    most_bytes: int
    timeout_s: float
    waited_s: float

    def begin(self, generation: Generation) -> None:
        """A generation begins; this worker is in it."""

    def post(self, seq: int, tag: str, address: int, num_bytes: int, among: Sequence[int]) -> None:
        """Offer bytes to the workers that take part, this one among them. Does not wait."""

    def collect(self, worker: int, seq: int, tag: str, address: int, num_bytes: int, deadline: float) -> None:
        """Take what a worker has offered; blocks until it has.

        Args:
            worker: Whose.
            seq: Which exchange this is.
            tag: The same, in words; what the worker has offered must come with it.
            address: Where the bytes go.
            num_bytes: How many the worker must have offered.
            deadline: When to give up, by the monotonic clock.

        Raises:
            MismatchError: The worker is at another exchange.
            PeerError: A worker failed or died.
            SilenceError: The worker did not come in time.
        """

    def check(self) -> None:
        """For who waits elsewhere than in an exchange.

        Raises:
            PeerError: A worker failed or died.
        """

    def check_process(self) -> None:
        """See that this process is the worker.

        Raises:
            ConfigError: It is a forked copy of it.
        """

    def fail(self, text: str) -> None:
        """Tell everyone that this worker failed; the first failure of a group is the one that counts."""

    def leave(self) -> None:
        """This worker takes part in no more exchanges of this generation.

        Raises:
            PeerError: It has failed, so there is no next one for it.
        """

    def close(self) -> None:
        """Let go of the descriptors."""
