"""A channel over HTTP."""

import http.client
import json
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import SplitResult, urlencode

from torch import Tensor

from evenstep.core.errors import RefusedError, ServerError
from evenstep.server.client.channels import INTELLIGIBLE, Channel, Fields, Receiver, fields_of
from evenstep.server.wire.tensors import LENGTH_BYTES, TensorHead, encode, head_length
from evenstep.server.wire.text import read_json

__all__ = ["HttpChannel"]

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
            raise ConnectionResetError(f"the server's answer is not HTTP: {error!r}") from error

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
            head = TensorHead.parse(text, num_bytes - LENGTH_BYTES - len(text))
        pieces, found = Receiver().room_for(head, out)
        for piece in pieces:
            _fill(response.readinto, piece)
        response.read()  # reads nothing, but lets http.client use the connection again
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
