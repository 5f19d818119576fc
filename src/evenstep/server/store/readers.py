"""Readers of the parameters, and writers that wait for them."""

from collections.abc import Iterable

from evenstep.server.store.attendance import Attendance
from evenstep.server.store.images import ServerImage, View
from evenstep.server.store.state import ParameterState

__all__ = ["Readers"]

_READERS_S = 1.0
_DRAIN_S = 0.2
_LARGE_BYTES = 4 << 20


class Readers:
    """Keeps track of who reads which image.

    Args:
        state: The parameters.
        attendance: The lock, and who is registered.
    """

    def __init__(self, state: ParameterState, attendance: Attendance) -> None:
        self._state, self._attendance, self._changed = state, attendance, attendance.changed
        self._num_writers = 0

    def get(
        self, names: Iterable[str] | None = None, *, min_version: int = 0, since: int | None = None, wait_s: float = 0.0
    ) -> View | None:
        """Parameters of one version; waits until they were put and have at least `min_version`.

        Args:
            names: Which ones; None for all.
            min_version: The oldest acceptable version.
            since: Only what changed after this version.
            wait_s: How long to wait.

        Returns:
            A view that the caller closes; None if it does not exist yet.

        Raises:
            RefusedError: There is no such parameter.
        """
        state = self._state
        with self._changed:
            if not self._attendance.wait(lambda: state.layout is not None and state.version >= min_version, wait_s):
                return None
            if self._num_writers:
                self._changed.wait_for(lambda: not self._num_writers, _DRAIN_S)
            assert state.layout is not None, "the wait above ends only when there is a layout"
            assert state.images is not None, "there are images as soon as there is a layout"
            if names is None and since is None:
                image = state.images.hold()
                return View(self._release, image, image.tensors, dict(state.versions), state.version)
            wanted = list(state.layout.specs) if names is None else list(dict.fromkeys(names))
            for name in wanted:
                state.layout.find(name)
            if since is not None:
                wanted = [name for name in wanted if state.versions[name] > since]
            image = state.images.hold()
            tensors = {name: image.tensors[name] for name in wanted}
            return View(self._release, image, tensors, {name: state.versions[name] for name in wanted}, state.version)

    def _release(self, image: ServerImage) -> None:
        with self._changed:
            if self._state.images is not None:
                self._state.images.release(image)
                if not image.readers:
                    self._changed.notify_all()

    def make_way(self) -> None:
        """Wait for readers, briefly, rather than copy large parameters or take memory for another copy.

        For a caller that is about to change the parameters and holds the lock.
        """
        images, layout = self._state.images, self._state.layout
        if images is None or layout is None:
            return
        if images.current.readers and layout.num_bytes >= _LARGE_BYTES:
            self._num_writers += 1  # new readers wait too, or there would always be one
            try:
                self._changed.wait_for(lambda: not images.current.readers, _DRAIN_S)
            finally:
                self._num_writers -= 1
                self._changed.notify_all()
        self._changed.wait_for(images.has_room, _READERS_S)
