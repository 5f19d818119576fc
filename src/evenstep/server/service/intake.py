"""Room for updates that are being received: how many bytes at once."""

import threading

from evenstep.core.errors import RefusedError

__all__ = ["Intake"]


class Intake:
    """Room for the data of updates: so many bytes at once, so that many clients do not take many copies' memory."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._held = 0

    def take(self, num_bytes: int, limit: int, wait_s: float) -> None:
        """Have room for so many bytes, of so many for all.

        Raises:
            RefusedError: Others take it all for longer than that.
        """
        with self._free:
            if self._held and not self._free.wait_for(
                lambda: not self._held or self._held + num_bytes <= limit, wait_s
            ):
                raise RefusedError("the server is busy with the updates of others; try again", 503)
            self._held += num_bytes

    def give(self, num_bytes: int) -> None:
        """Let it go."""
        with self._free:
            self._held -= num_bytes
            self._free.notify_all()
