"""Memory for updates that are being received: bounded, and reused, since fresh pages take time."""

import threading

from evenstep.core.errors import RefusedError
from evenstep.server.wire.areas import Area
from evenstep.server.wire.tensors import KEPT_BYTES, fresh

__all__ = ["UpdateMemory"]


class UpdateMemory:
    """Bounds what all clients together may be sending, so that many clients do not need memory for many copies."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken_bytes = 0
        self._spare: list[Area] = []

    def take(self, num_bytes: int, most_bytes: int, wait_s: float) -> None:
        """Wait until there is room for this many bytes.

        Raises:
            RefusedError: Others used all of it for that long.
        """
        with self._changed:
            if self._taken_bytes and not self._changed.wait_for(
                lambda: not self._taken_bytes or self._taken_bytes + num_bytes <= most_bytes, wait_s
            ):
                raise RefusedError("the server is busy with the updates of others; try again", 503)
            self._taken_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """Release this many bytes."""
        with self._changed:
            self._taken_bytes -= num_bytes
            self._changed.notify_all()

    def area(self, num_bytes: int) -> Area:
        """Memory for this many bytes, reused from an earlier update if possible."""
        with self._changed:
            for n, area in enumerate(self._spare):
                if len(area.data) == max(num_bytes, 1):
                    return self._spare.pop(n)
        return Area(fresh(num_bytes))

    def recycle(self, area: Area, *, lasting: bool) -> None:
        """Keep memory for the next update, unless a tensor is still made of it.

        Args:
            area: The memory.
            lasting: Whether nobody holds its tensors, so that they can be reused.
        """
        with self._changed:
            held = sum(len(other.data) for other in self._spare) + len(area.data)
            if (not self._spare or held <= KEPT_BYTES) and area.is_free(lasting=lasting):
                self._spare.append(area)
