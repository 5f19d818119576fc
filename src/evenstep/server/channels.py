"""The client's end of a connection, one class for each transport.

A channel sends one request and returns its reply. It raises OSError when the connection is of no use any more, and
RefusedError or ServerError for what the server says. It knows nothing of retries: that is the client's.
"""

import contextlib
import http.client
import json
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, urlencode

from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.server.frames import Frames, receive_head
from evenstep.server.wire import (
    KEPT_BYTES,
    LENGTH_BYTES,
    Head,
    Sender,
    Spec,
    bytes_of,
    encode,
    fresh,
    head_length,
    read_json,
)

__all__ = ["INTELLIGIBLE", "Channel", "HttpChannel", "Receiver", "TcpChannel", "fields_of"]

Fields = dict[str, Any]
_ROUTES = {
    "register": ("POST", "/register"),
    "leave": ("POST", "/leave"),
    "put": ("PUT", "/parameters"),
    "get": ("GET", "/parameters"),
    "update": ("POST", "/update"),
    "wait": ("GET", "/wait"),
    "status": ("GET", "/status"),
    "slice": ("GET", "/slice"),
    "stage": ("POST", "/stage"),
    "order": ("POST", "/order"),
    "pause": ("POST", "/pause"),
}


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
    """The fields of a reply, if it is a good one.

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
    """Says where the data of replies goes: into tensors that are given, or into new ones.

    Tensors that lie where they lay the last time are not looked at again.
    """

    def __init__(self) -> None:
        self._head: Head | None = None
        self._known: list[Any] = []
        self._pieces: list[memoryview] = []

    def room_for(self, head: Head, out: Mapping[str, Tensor] | None) -> tuple[list[memoryview], dict[str, Tensor]]:
        """Where to read the data of a reply to, piece by piece, and the tensors that it makes up.

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
    """What makes no sense in an answer means that the connection is of no use any more. A context manager."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, RefusedError):
            raise ConnectionError(f"the server's answer makes no sense: {error}") from error


INTELLIGIBLE = _Intelligible()
_MAY_HAVE_SAID_WHY = contextlib.suppress(BrokenPipeError, ConnectionResetError)  # before it closed the connection


class TcpChannel(Channel):
    """Frames over a TCP connection.

    Args:
        url: Its host and port.
        token: For the server.
        context: For TLS.
        timeout_s: Longer silence than that means the connection is broken.
    """

    def __init__(self, url: SplitResult, token: str | None, context: ssl.SSLContext | None, timeout_s: float) -> None:
        host, port = url.hostname or "127.0.0.1", url.port or 0
        stream = socket.create_connection((host, port), timeout_s)
        if context is not None:
            stream = context.wrap_socket(stream, server_hostname=host)
        self._frames = Frames(stream, timeout_s)
        self._sender, self._receiver = Sender(), Receiver()
        self._token, self._timeout_s = token, timeout_s

    def _send(self, verb: str, fields: Fields, parts: list[memoryview]) -> tuple[Fields, int]:
        request = {"verb": verb, **fields}
        if self._token is not None:
            request["token"] = self._token
        self._frames.within(self._timeout_s)
        with _MAY_HAVE_SAID_WHY:
            self._frames.send(request, parts)
        with INTELLIGIBLE:
            begun = self._frames.begin()
        if begun is None:
            raise ConnectionResetError("the server closed the connection")
        return begun

    def ask(self, verb: str, fields: Fields) -> Fields:
        """See `Channel`."""
        return fields_of(self._send(verb, fields, [])[0])

    def push(self, verb: str, fields: Fields, tensors: Mapping[str, Tensor]) -> Fields:
        """See `Channel`."""
        return fields_of(self._send(verb, fields, self._sender.encode(tensors))[0])

    def pull(self, fields: Fields, out: Mapping[str, Tensor] | None) -> tuple[Fields, dict[str, Tensor]]:
        """See `Channel`."""
        reply, num_bytes = self._send("get", fields, [])
        reply = fields_of(reply)
        if not num_bytes:
            return reply, {}
        with INTELLIGIBLE:
            head = receive_head(self._frames, num_bytes)
        pieces, found = self._receiver.room_for(head, out)
        self._frames.fill(pieces)
        return reply, found

    def close(self) -> None:
        """See `Channel`."""
        self._frames.close()


class HttpChannel(Channel):
    """Requests over HTTP/1.1 with keep-alive; arguments as for `TcpChannel`."""

    def __init__(self, url: SplitResult, token: str | None, context: ssl.SSLContext | None, timeout_s: float) -> None:
        host, port = url.hostname or "127.0.0.1", url.port
        if context is not None:
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=context
            )
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}

    def _send(self, verb: str, fields: Fields, parts: list[memoryview]) -> http.client.HTTPResponse:
        method, path = _ROUTES[verb]
        query = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
        headers = dict(self._headers)
        if parts:
            headers["Content-Type"] = "application/octet-stream"
            headers["Content-Length"] = str(sum(len(part) for part in parts))
        try:
            self._http.request(method, f"{path}?{urlencode(query)}", body=parts or None, headers=headers)
            return self._http.getresponse()
        except http.client.HTTPException as error:
            raise ConnectionResetError(f"the server's answer is no HTTP: {error!r}") from error

    def _fields(self, response: http.client.HTTPResponse) -> Fields:
        text = response.read()
        if response.getheader("content-type") != "application/json":
            if response.status == 503:
                raise RefusedError("the server has too many connections; try again", 503)
            raise ServerError(f"the server answered {response.status}: {text[:200].decode(errors='replace')}")
        return fields_of({**read_json(text, "the server's answer"), "status": response.status})

    def ask(self, verb: str, fields: Fields) -> Fields:
        """See `Channel`."""
        return self._fields(self._send(verb, fields, []))

    def push(self, verb: str, fields: Fields, tensors: Mapping[str, Tensor]) -> Fields:
        """See `Channel`."""
        return self._fields(self._send(verb, fields, encode(tensors)))

    def pull(self, fields: Fields, out: Mapping[str, Tensor] | None) -> tuple[Fields, dict[str, Tensor]]:
        """See `Channel`."""
        response = self._send("get", fields, [])
        if response.status != 200:
            return self._fields(response), {}
        num_bytes = int(response.getheader("content-length") or 0)
        with INTELLIGIBLE:
            _fill(response.readinto, memoryview(prefix := bytearray(LENGTH_BYTES)))
            text = bytearray(head_length(prefix, num_bytes))
            _fill(response.readinto, memoryview(text))
            head = Head.parse(text, num_bytes - LENGTH_BYTES - len(text))
        pieces, found = Receiver().room_for(head, out)
        for piece in pieces:
            _fill(response.readinto, piece)
        response.read()  # nothing: but so the connection knows that it is free
        return read_json((response.getheader("x-evenstep-fields") or "{}").encode(), "the server's answer"), found

    def close(self) -> None:
        """See `Channel`."""
        self._http.close()


def _fill(read: Callable[[memoryview], int], buffer: memoryview) -> None:
    while buffer:
        count = read(buffer)
        if not count:
            raise ConnectionResetError("the server closed the connection in the middle of an answer")
        buffer = buffer[count:]
