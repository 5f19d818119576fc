"""A worker's view of parameter servers, however many there are: the verbs."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

from torch import Tensor

from evenstep.server.client.channels import Fields
from evenstep.server.client.compress import Compressor

__all__ = ["Client"]


class Client(ABC):
    """A worker's view of a server, or of several. May be used from several threads; one request at a time.

    Args:
        url: Where it is; several joined by commas.
        worker: The name of this worker.
        timeout_s: How long to try when the server cannot be reached, and to wait for other workers.
        compressor: Compresses updates before they are sent.

    Attributes:
        staleness: The server's staleness; see `ParameterServer`.
        version: The newest version that this client has heard of.
        sequence: The number of the last update under this worker's name.
    """

    def __init__(self, url: str, worker: str, timeout_s: float, compressor: Compressor) -> None:
        self.url, self.worker, self.timeout_s = url, worker, timeout_s
        self.staleness: int | None = 0
        self.version = self.sequence = 0
        self._compressor = compressor
        self._locks = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def get_parameters(
        self,
        names: Iterable[str] | None = None,
        *,
        min_version: int = 0,
        since: int | None = None,
        out: Mapping[str, Tensor] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Tensor]:
        """Parameters of one version, by name. Waits until they were put, and have at least `min_version`.

        Args:
            names: Which ones; None for all.
            min_version: The oldest acceptable version.
            since: Only those that changed after this version.
            out: Tensors to put the values into, instead of new ones.
            timeout_s: How long to wait.

        Raises:
            UnreachableError: The server is gone, or the version did not come in time.
            RefusedError: There is no such parameter.
            ConfigError: A tensor in `out` has another shape or dtype.
        """

    @abstractmethod
    def put_parameters(
        self,
        parameters: Mapping[str, Tensor],
        *,
        force: bool = False,
        buffers: Iterable[str] = (),
        sequence: int | None = None,
    ) -> int:
        """Give the parameters their values; return the version.

        Args:
            parameters: All of them.
            force: Replace values that are there.
            buffers: Which of them the optimizer does not train.
            sequence: As for `update_parameters`.

        Raises:
            RefusedError: They have values already, and `force` is not set.
        """

    def update_parameters(
        self,
        update: Mapping[str, Tensor],
        *,
        kind: str = "gradient",
        samples: int = 1,
        base: int | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> int:
        """Send an update; return the version that it made. Blocks until it is applied.

        Args:
            update: Gradients, or deltas, by parameter.
            kind: "gradient": the server's optimizer steps. "delta": weights before minus after, to be subtracted.
            samples: How many samples this is a mean over; its weight in a synchronous update.
            base: The version it was computed from; a synchronous server refuses any but its own.
            timeout_s: How long to wait for the other workers.
            **more: Further fields: tree nodes, buffers, a note; `sequence`, the number of this update if it is not
                simply the next one: an update already sent under this number is not applied again; `options`, the
                options of the server's optimizer from this update on, as a list with a dict for each group.

        Raises:
            RefusedError: The server refused it; it was not applied.
            UnreachableError: The server is gone, or other workers did not come in time.
        """
        return int(self.update(update, kind=kind, samples=samples, base=base, timeout_s=timeout_s, **more)["version"])

    @abstractmethod
    def update(
        self,
        update: Mapping[str, Tensor],
        *,
        kind: str = "gradient",
        base: int | None = None,
        timeout_s: float | None = None,
        sequence: int | None = None,
        **more: Any,
    ) -> Fields:
        """As `update_parameters`, but returns everything that the server says."""

    @abstractmethod
    def last_update(self) -> Fields:
        """The server's reply to the last update under this worker's name, whichever process sent it."""

    def wait(self, version: int, timeout_s: float | None = None) -> int:
        """Wait until the parameters have at least this version; return theirs."""
        self.get_parameters([], min_version=version, timeout_s=timeout_s)
        return self.version

    @abstractmethod
    def status(self) -> Fields:
        """Everything that the server shows of itself."""

    @abstractmethod
    def close(self) -> None:
        """Leave, if registered, and end the connection."""

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _number(self, sequence: int | None) -> int:
        """The number of the next request: the next one, or the caller's."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        return self.sequence
