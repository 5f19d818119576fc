"""An HTTP connection until a request is understood: who may have one, and how much may come before a body.

uvicorn parses requests and runs the application. This adds:

- a connection has its place from the `Door`, even before the TLS handshake, and strangers must identify themselves;
- what comes before a body is counted as it arrives, whether or not the parser has used it yet;
- a write is done only when the system has taken all of it.
"""

import asyncio
import logging
import socket
import ssl
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from evenstep.server.service.limits import Limits
from evenstep.server.transports.door import Door
from evenstep.server.wire.text import write_json

__all__ = ["HEAD_BYTES", "HttpConnection", "Reception"]

HEAD_BYTES = 32 << 10
_STEP_BYTES = 4 << 10  # how much is fed to the parser at once before a body
_HEAD_S = 30.0  # how long the head of a request may take, once it has begun
_FULL_S = 0.05
log = logging.getLogger("evenstep.server")


class HttpConnection(HttpToolsProtocol):
    """One connection.

    Args:
        door: Says which connections may stay.
        **given: What uvicorn passes to a protocol.
    """

    def __init__(self, door: Door["HttpConnection"], **given: Any) -> None:
        super().__init__(**given)
        self._door = door
        self._connecting: asyncio.Task[None] | None = None
        self._in_head = False  # of a request that has begun
        self._head_bytes = 0  # of it so far
        self._body_left = 0  # of a body that says how long it is
        self._stranger_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    # ---- who may stay ----

    def arrive(self, connecting: asyncio.Task[None], greeting_s: float) -> None:
        """Take a place, or be turned away.

        Args:
            connecting: The task that makes the connection.
            greeting_s: How long it may be a stranger.
        """
        self._connecting = connecting
        self._stranger_timer = self.loop.call_later(greeting_s, self.turn_away)
        goes = self._door.enter(self, self.loop.time())
        if goes is not None:
            goes.turn_away()

    def admitted(self) -> None:
        """Note that one of its requests was admitted."""
        if self._stranger_timer is not None:
            self._stranger_timer.cancel()
            self._stranger_timer = None
            self._door.admit(self)

    def turn_away(self) -> None:
        """End the connection at once."""
        self.depart()
        if self.transport is not None:
            self.transport.abort()
        elif self._connecting is not None:
            self._connecting.cancel()

    def depart(self) -> None:
        """Give the place back."""
        self._door.leave(self)
        for timer in (self._stranger_timer, self._head_timer):
            if timer is not None:
                timer.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as there
        """See asyncio."""
        super().connection_made(transport)
        secure = (
            transport.get_extra_info("sslcontext") is not None
        )  # TLS copies what it sends, and a limit of 0 would stop it for good
        transport.set_write_buffer_limits(high=int(secure), low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self.depart()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """See uvicorn. Does not wait for a client to agree that a secure connection is over."""
        if self.cycle is None or self.cycle.response_complete:
            self.turn_away()
        else:
            super().shutdown()

    # ---- what may come before a body ----

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        left = memoryview(data)
        while left and self.parser is not None and not self.transport.is_closing():
            size = self._body_left or _STEP_BYTES
            piece, left = left[:size], left[size:]
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any bytes
            if self._in_head:
                self._head_bytes += len(piece)
                if self._head_bytes > HEAD_BYTES:
                    self._refuse_head()
        if self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self.turn_away)

    def _refuse_head(self) -> None:
        text = write_json({"status": 431, "error": f"more than {HEAD_BYTES} bytes came before the body of a request"})
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
        self.transport.write(STATUS_LINE[431] + head + text)
        self.transport.close()

    def on_message_begin(self) -> None:
        """See httptools."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._body_left = int(next((value for name, value in self.headers if name == b"content-length"), 0))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._body_left = max(self._body_left - len(body), 0)
        super().on_body(body)


class Reception:
    """Accepts connections, and gives those that may stay to uvicorn.

    Args:
        server: uvicorn's, which runs in the same loop.
        listener: A listening socket.
        limits: How many connections there may be, and how long one may be a stranger.
        context: For TLS, if wanted.
    """

    def __init__(
        self, server: uvicorn.Server, listener: socket.socket, limits: Limits, context: ssl.SSLContext | None
    ) -> None:
        self._server, self._listener, self._context = server, listener, context
        self._greeting_s = limits.greeting_s
        self._door: Door[HttpConnection] = Door(limits.connections, limits.greeting_s)
        self._handshakes: set[asyncio.Task[None]] = set()
        listener.setblocking(False)

    async def run(self) -> None:
        """Accept until cancelled; then end connections still in their handshake."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    stream, _ = await loop.sock_accept(self._listener)
                except OSError:
                    await asyncio.sleep(_FULL_S)  # out of descriptors, until some connection ends
                else:
                    self._receive(stream)
        finally:
            for task in self._handshakes:
                task.cancel()

    async def end(self) -> None:
        """End the remaining connections."""
        while left := list(self._server.server_state.connections):
            for connection in left:
                connection.transport.abort()
            await asyncio.sleep(0)

    def _receive(self, stream: socket.socket) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        connection = HttpConnection(
            self._door, config=server.config, server_state=server.server_state, app_state={}, _loop=loop
        )
        task = loop.create_task(self._connect(connection, stream))
        self._handshakes.add(task)
        task.add_done_callback(lambda _: self._finish(task, connection, stream))
        connection.arrive(task, self._greeting_s)

    def _finish(self, task: asyncio.Task[None], connection: HttpConnection, stream: socket.socket) -> None:
        self._handshakes.discard(task)
        if task.cancelled():  # it may have been before it began
            connection.depart()
            stream.close()

    async def _connect(self, connection: HttpConnection, stream: socket.socket) -> None:
        """Do the TLS handshake, if any; from then on the connection takes care of itself."""
        timeout_s = self._greeting_s if self._context is not None else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, stream, ssl=self._context, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            log.debug("a connection ended before its first request: %s", str(error))
            connection.depart()
