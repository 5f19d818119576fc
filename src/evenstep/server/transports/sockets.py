"""Serving clients that speak frames: a thread for each connection, one request after another."""

import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from evenstep.core.errors import RefusedError, ServerError
from evenstep.server.service.fields import read_whole
from evenstep.server.service.service import Reply, Service, ServiceCall
from evenstep.server.transports.door import Door
from evenstep.server.wire.frames import Frames
from evenstep.server.wire.tensors import LENGTH_BYTES, TensorHead, head_length

__all__ = ["Connections", "Conversation", "SharedTensors"]

log = logging.getLogger("evenstep.server")


class Conversation:
    """One connection of the raw socket transport. Others override how tensors come and go.

    Attributes:
        admitted: Called when a request was admitted.
    """

    def __init__(self, service: Service, stream: socket.socket) -> None:
        self.service = service
        self.admitted: Callable[[], None] = lambda: None
        self.frames = Frames(stream, service.limits.idle_s, service.limits.fields_bytes)

    def run(self) -> None:
        """Answer until the other side closes.

        Raises:
            OSError: It is gone, or too slow.
        """
        while True:
            try:
                begun = self.frames.begin(patient=True)  # a client may be silent for as long as it computes
            except RefusedError as error:
                self.frames.within(self.service.limits.idle_s)
                self.frames.send(self.service.refused(error))
                return  # we do not know where the next frame begins
            if begun is None or not self._answer(*begun):
                return

    def _answer(self, fields: dict[str, Any], body_bytes: int) -> bool:
        """Answer one request; False if the connection cannot go on."""
        service, frames, call, reply = self.service, self.frames, None, None
        frames.within(service.limits.transfer_s(body_bytes))
        try:
            try:
                verb, token, placed = _text(fields, "verb"), _text(fields, "token"), SharedTensors.taken_from(fields)
                call = service.admit(verb or "", fields, body_bytes, token)
            except RefusedError as error:
                if error.status in (401, 413):  # what such a client sends is not read
                    frames.send(service.refused(error))
                    return False
                frames.drain(body_bytes)
                raise
            self.admitted()
            self.receive(call, placed)
            reply = call.run()
            frames.within(service.limits.transfer_s(reply.num_bytes))
            self.reply(reply)
        except RefusedError as error:
            frames.within(service.limits.idle_s)
            frames.send(service.refused(error))
        except ServerError as error:
            frames.within(service.limits.idle_s)
            frames.send({"status": 500, "error": str(error)})
        except OSError:
            raise
        except Exception as error:
            frames.within(service.limits.idle_s)
            frames.send({"status": 500, "error": f"the server failed: {error!r}; its log says where"})
            raise
        finally:
            if call is not None:
                call.close(reply)
        return True

    def receive(self, call: ServiceCall, placed: "SharedTensors | None") -> None:
        """Read the tensors of a request into the memory that the call gives for them.

        Raises:
            RefusedError: They are not what the request may carry, or claim to be in shared memory that does not exist.
        """
        if placed is not None:
            raise RefusedError("there is no shared memory on this connection; send the tensors")
        left = call.body_bytes
        if not left:
            return
        try:
            prefix = self.frames.take(min(LENGTH_BYTES, left))
            left -= len(prefix)
            text = self.frames.take(head_length(prefix, call.body_bytes))
            left -= len(text)
            buffer = call.expect(TensorHead.parse(text, left))
        except RefusedError:
            self.frames.drain(left)
            raise
        self.frames.fill([buffer])

    def reply(self, reply: Reply) -> None:
        """Send a reply. What it refers to is held until this returns."""
        self.frames.send(reply.fields, reply.parts)

    def close(self) -> None:
        """Clean up after the connection."""


class _Connection:
    """A connection as the accepting thread sees it.

    Attributes:
        stream: Its socket; once there is TLS, the one around it.
    """

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream

    def end(self) -> None:
        """End it, even while a thread waits for it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.stream, socket.SHUT_RDWR)


class Connections:
    """Accepts connections and serves each in its own thread.

    Args:
        service: What to serve.
        listener: A listening socket; taken over.
        name: The name of the threads.
        context: For TLS, if wanted.
        conversation: What to do on a connection.
    """

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        name: str,
        context: ssl.SSLContext | None = None,
        conversation: Callable[[Service, socket.socket], Conversation] = Conversation,
    ) -> None:
        self._service, self._listener, self._name, self._context = service, listener, name, context
        self._conversation = conversation
        self._lock = threading.Lock()
        self._open: dict[_Connection, threading.Thread] = {}
        self._door: Door[_Connection] = Door(service.limits.connections, service.limits.greeting_s)
        self._stopping = False
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._accept, name=f"evenstep-{name}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._stopping:
            with self._lock:
                late, end_s = self._door.overdue(time.monotonic()), self._door.next_end_s()
            for connection in late:
                connection.end()
            if not poll.poll(None if end_s is None else 1e3 * max(end_s - time.monotonic(), 0.0) + 1):
                continue
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError:
                if not self._stopping:
                    time.sleep(0.05)  # out of descriptors, until some connection ends
                continue
            self._receive(_Connection(stream))

    def _receive(self, connection: _Connection) -> None:
        with self._lock:
            goes = connection if self._stopping else self._door.enter(connection, time.monotonic())
            if goes is not connection:
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name=f"evenstep-{self._name}", daemon=True
                )
                self._open[connection] = thread
                thread.start()
        if goes is connection:
            connection.stream.close()
        elif goes is not None:
            goes.end()

    def _admitted(self, connection: _Connection) -> None:
        with self._lock:
            self._door.admit(connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.stream.settimeout(self._service.limits.greeting_s)
            if self._context is not None:
                secure = self._context.wrap_socket(connection.stream, server_side=True, do_handshake_on_connect=False)
                connection.stream = secure
                secure.do_handshake()
            conversation = self._conversation(self._service, connection.stream)
            conversation.admitted = lambda: self._admitted(connection)
            try:
                conversation.run()
            finally:
                conversation.close()
        except OSError as error:
            log.debug("a connection ended: %s", str(error))
        except Exception:
            log.exception("a connection failed")
            raise
        finally:
            with self._lock:
                self._open.pop(connection, None)
                self._door.leave(connection)
                connection.stream.close()

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            left = dict(self._open)
            for connection in left:
                connection.end()
        for thread in left.values():
            thread.join()


def _text(fields: dict[str, Any], name: str) -> str | None:
    """Take a text out of the fields of a frame.

    Raises:
        RefusedError: It is not text.
    """
    value = fields.pop(name, None)
    if value is not None and type(value) is not str:
        raise RefusedError(f"{name} is not text")
    return value


class SharedTensors(NamedTuple):
    """The tensors of a request that are in shared memory instead of following it.

    Attributes:
        head: Their head, as JSON.
        data_bytes: The size of their data.
    """

    head: str
    data_bytes: int

    @classmethod
    def taken_from(cls, fields: dict[str, Any]) -> "SharedTensors | None":
        """Take it out of the fields of a frame, if it is there.

        Raises:
            RefusedError: It makes no sense.
        """
        head, num_bytes = _text(fields, "head"), fields.pop("data_bytes", None)
        if head is None and num_bytes is None:
            return None
        return cls(head or "", read_whole("data_bytes", num_bytes))
