"""The client's end of a connection: what every transport has.

A channel sends one request and returns its reply. It raises OSError when the connection is no longer usable, and
RefusedError or ServerError for what the server says. Retries are the connection's business, not the channel's.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.server.wire.tensors import KEPT_BYTES, Spec, TensorHead, bytes_of, fresh

__all__ = ["INTELLIGIBLE", "Channel", "Fields", "Receiver", "fields_of"]

Fields = dict[str, Any]


class Channel(ABC):
    """A connection to a server."""

    @abstractmethod
    def ask(self, verb: str, fields: Fields) -> Fields:
        """Send a request without tensors; return the fields of the reply."""

    @abstractmethod
    def push(self, verb: str, fields: Fields, tensors: Mapping[str, Tensor]) -> Fields:
        """Send a request with tensors; return the fields of the reply."""

    @abstractmethod
    def pull(self, fields: Fields, out: Mapping[str, Tensor] | None) -> tuple[Fields, dict[str, Tensor]]:
        """Get parameters: into tensors that are given, by name, or into new ones."""

    @abstractmethod
    def close(self) -> None:
        """End the connection."""


def fields_of(reply: Fields) -> Fields:
    """The fields of a reply, if it reports success.

    Raises:
        RefusedError: The server refused.
        ServerError: The server cannot go on.
    """
    status = reply.pop("status", 200)
    if status < 300:
        return reply
    if status >= 500 and status != 503:
        raise ServerError(str(reply.get("error")))
    raise RefusedError(str(reply.get("error")), status)


class Receiver:
    """Decides where the data of replies go: into given tensors, or into new ones.

    Tensors at the same addresses as last time are not checked again.
    """

    def __init__(self) -> None:
        self._head: TensorHead | None = None
        self._known: list[Any] = []
        self._pieces: list[memoryview] = []

    def room_for(
        self, head: TensorHead, out: Mapping[str, Tensor] | None
    ) -> tuple[list[memoryview], dict[str, Tensor]]:
        """Where to read the data of a reply to, piece by piece, and the tensors made of them.

        Raises:
            ConfigError: A tensor in `out` is not what came.
        """
        if out is None:
            data = fresh(head.data_bytes)
            return [data[: head.data_bytes]], head.tensors(data)
        try:
            found = {name: out[name] for name in head.specs}
        except KeyError as error:
            name = error.args[0]
            raise ConfigError(f"out['{name}'] is nothing, expected a contiguous {head.specs[name]}") from None
        known = [(t.data_ptr(), t.dtype, t.shape, t.is_contiguous()) for t in found.values()]
        if head is self._head and known == self._known:
            return self._pieces, found
        for name, spec in head.specs.items():
            if Spec.of(found[name]) != spec or not found[name].is_contiguous():
                raise ConfigError(f"out['{name}'] is {Spec.of(found[name])}, expected a contiguous {spec}")
        pieces = [bytes_of(found[name]) for name, spec in head.specs.items() if spec.num_elements]
        if head.data_bytes <= KEPT_BYTES:
            self._head, self._known, self._pieces = head, known, pieces
        return pieces, found


class _Intelligible:
    """Turns an answer that makes no sense into a broken connection. A context manager."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RefusedError):
            raise ConnectionError(f"the server's answer makes no sense: {error}") from error


INTELLIGIBLE = _Intelligible()
