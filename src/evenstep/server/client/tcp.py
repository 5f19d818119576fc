"""A channel over a raw socket."""

import contextlib
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import SplitResult

from torch import Tensor

from evenstep.server.client.channels import INTELLIGIBLE, Channel, Fields, Receiver, fields_of
from evenstep.server.wire.frames import Frames, receive_head
from evenstep.server.wire.tensors import Sender

__all__ = ["TcpChannel"]

_MAY_HAVE_SAID_WHY = contextlib.suppress(
    BrokenPipeError, ConnectionResetError
)  # a server that closes may have answered first


class TcpChannel(Channel):
    """Frames over a TCP connection.

    Args:
        url: Its host and port.
        token: For the server.
        context: For TLS.
        timeout_s: The connection counts as broken after silence for this long.
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
