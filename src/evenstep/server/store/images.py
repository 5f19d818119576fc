"""Copies of all parameters, each in its own memfd, so that a process on the same machine can map it.

The store has one *current* image. A reader holds the image that was current when it came as long as it needs to send
it, without a lock. A writer gets an image that nobody reads: the current one if it is free, otherwise another with the
same values. So nobody sees a tensor half changed, no slow reader delays an update, and unless reading and writing
overlap there is one copy.

The caller serialises all calls but `ServerImage.tensors`.
"""

import fcntl
import os
from collections.abc import Callable, Mapping

from torch import Tensor

from evenstep.server.wire.areas import map_image, places
from evenstep.server.wire.tensors import Spec, encode

__all__ = ["Images", "ServerImage", "View"]

_KEPT = 2  # images kept when nobody reads them: the current one, and one to switch to


class ServerImage:
    """One copy of all parameters.

    Attributes:
        number: Its identifier.
        fd: The descriptor of its memory.
        tensors: The parameters by name.
        parts: The buffers to send for all of them.
        readers: How many readers hold it.
    """

    def __init__(self, number: int, specs: Mapping[str, Spec]) -> None:
        self.number = number
        self.readers = 0
        self.fd = -1
        self.fd = os.memfd_create("evenstep-parameters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, places(specs)[1])
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.tensors = map_image(self.fd, specs)
        self.parts = encode(self.tensors)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. The tensors stay valid until they are gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Images:
    """The current image, those still being read, and a spare one.

    Attributes:
        current: The newest committed values.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self._specs = dict(specs)
        self._made = 0
        self._others: list[ServerImage] = []
        self.current = self._make()

    @property
    def count(self) -> int:
        """How many copies there are."""
        return 1 + len(self._others)

    def _make(self) -> ServerImage:
        self._made += 1
        return ServerImage(self._made, self._specs)

    def hold(self) -> ServerImage:
        """The current image, which will not change until `release`."""
        self.current.readers += 1
        return self.current

    def release(self, image: ServerImage) -> None:
        """Release an image that a reader held."""
        image.readers -= 1
        self._tidy()

    def has_room(self) -> bool:
        """Whether an update needs no additional copy."""
        return not self.current.readers or self.count < _KEPT or any(not image.readers for image in self._others)

    def writable(self) -> ServerImage:
        """The current image or, if it is being read, another with its values, which becomes the current one."""
        if self.current.readers:
            free = next((image for image in self._others if not image.readers), None)
            if free is None:
                free = self._make()
                self._others.append(free)
            for name, tensor in self.current.tensors.items():
                free.tensors[name].copy_(tensor)
            self._others[self._others.index(free)] = self.current
            self.current = free
        return self.current

    def _tidy(self) -> None:
        for image in self._others[::-1]:
            if self.count > _KEPT and not image.readers:
                self._others.remove(image)
                image.close()

    def close(self) -> None:
        """Close all descriptors."""
        for image in (self.current, *self._others):
            image.close()


class View:
    """Parameters of one version, which nobody changes until it is closed. A context manager.

    Attributes:
        version: The version of the parameters as a whole.
        versions: The version of each.
        tensors: The requested parameters.
        image: The image that holds them.
    """

    def __init__(
        self,
        release: Callable[[ServerImage], None],
        image: ServerImage,
        tensors: Mapping[str, Tensor],
        versions: dict[str, int],
        version: int,
    ) -> None:
        self._release, self.image = release, image
        self.tensors, self.versions, self.version = tensors, versions, version
        self._open = True

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the view."""
        if self._open:
            self._open = False
            self._release(self.image)
