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
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, urlencode

from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.server.frames import Frames, receive_head
from evenstep.server.wire import LENGTH_BYTES, Head, Spec, bytes_of, encode, fresh, head_length, read_json

__all__ = ["Channel", "HttpChannel", "TcpChannel", "fields_of", "intelligible", "room_for"]

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


def room_for(head: Head, out: Mapping[str, Tensor] | None) -> tuple[list[memoryview], dict[str, Tensor]]:
    """Where to read the data of a reply to, piece by piece, and the tensors that it makes up.

    Raises:
        ConfigError: A tensor in `out` is not what came.
    """
    if out is None:
        data = fresh(head.data_bytes)
        return [data[: head.data_bytes]], head.tensors(data)
    pieces, found = [], {}
    for name, spec in head.specs.items():
        tensor = out.get(name)
        if tensor is None or Spec.of(tensor) != spec or not tensor.is_contiguous():
            have = "nothing" if tensor is None else str(Spec.of(tensor))
            raise ConfigError(f"out['{name}'] is {have}, expected a contiguous {spec}")
        found[name] = tensor
        if spec.num_elements:
            pieces.append(bytes_of(tensor))
    return pieces, found


@contextlib.contextmanager
def intelligible() -> Iterator[None]:
    """What makes no sense in an answer means that the connection is of no use any more."""
    try:
        yield
    except RefusedError as error:
        raise ConnectionError(f"the server's answer makes no sense: {error}") from error


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
        self._token, self._timeout_s = token, timeout_s

    def _send(self, verb: str, fields: Fields, parts: list[memoryview]) -> tuple[Fields, int]:
        request = {"verb": verb, **fields}
        if self._token is not None:
            request["token"] = self._token
        self._frames.within(self._timeout_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it closed
            self._frames.send(request, parts)
        with intelligible():
            begun = self._frames.begin()
        if begun is None:
            raise ConnectionResetError("the server closed the connection")
        return begun

    def ask(self, verb: str, fields: Fields) -> Fields:
        """See `Channel`."""
        return fields_of(self._send(verb, fields, [])[0])

    def push(self, verb: str, fields: Fields, tensors: Mapping[str, Tensor]) -> Fields:
        """See `Channel`."""
        return fields_of(self._send(verb, fields, encode(tensors))[0])

    def pull(self, fields: Fields, out: Mapping[str, Tensor] | None) -> tuple[Fields, dict[str, Tensor]]:
        """See `Channel`."""
        reply, num_bytes = self._send("get", fields, [])
        reply = fields_of(reply)
        if not num_bytes:
            return reply, {}
        with intelligible():
            head = receive_head(self._frames, num_bytes)
        pieces, found = room_for(head, out)
        for piece in pieces:
            self._frames.fill(piece)
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
        with intelligible():
            _fill(response.readinto, memoryview(prefix := bytearray(LENGTH_BYTES)))
            text = bytearray(head_length(prefix, num_bytes))
            _fill(response.readinto, memoryview(text))
            head = Head.parse(text, num_bytes - LENGTH_BYTES - len(text))
        pieces, found = room_for(head, out)
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
