"""What a reader of a store holds: parameters of one version."""

from collections.abc import Callable

from evenstep.server.images import Image
from evenstep.server.rounds import Tensors

__all__ = ["View"]


class View:
    """Parameters of one version, which nobody changes until it is closed. A context manager.

    Attributes:
        version: That of the parameters as a whole.
        versions: That of each.
        tensors: The parameters that were asked for.
        image: Where they lie.
    """

    def __init__(
        self, release: Callable[[Image], None], image: Image, tensors: Tensors, versions: dict[str, int], version: int
    ) -> None:
        self._release, self.image = release, image
        self.tensors, self.versions, self.version = tensors, versions, version
        self._open = True

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The reader has done."""
        if self._open:
            self._open = False
            self._release(self.image)
