"""Memory for updates that are being received: how much at once, and used again."""

import sys
import threading

from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server.wire import Head

__all__ = ["Intake", "Room"]

_UNUSED = 2  # references to memory that no tensor is made of: one of its room, one of the count itself


class Room:
    """Memory for the tensors of an update, and the tensors if they are to be used again.

    Attributes:
        data: The memory.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._head: Head | None = None
        self._tensors: dict[str, Tensor] = {}

    def tensors(self, head: Head) -> dict[str, Tensor]:
        """The tensors of a message whose data is here."""
        if head is not self._head:
            self._head, self._tensors = head, head.tensors(self.data)
        return dict(self._tensors)

    def is_free(self, *, lasting: bool) -> bool:
        """Whether nobody holds its tensors.

        Args:
            lasting: That is known, so they need not be made anew for the next update.
        """
        if not lasting:
            self._head, self._tensors = None, {}
            return sys.getrefcount(self.data) <= _UNUSED
        return True


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
