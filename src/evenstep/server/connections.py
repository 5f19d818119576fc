"""Serving clients that speak frames: a thread for each connection, one request after the other."""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from evenstep.core.errors import RefusedError, ServerError
from evenstep.server.frames import Frames
from evenstep.server.service import Call, Reply, Service
from evenstep.server.wire import LENGTH_BYTES, Head, head_length

__all__ = ["Connections", "Conversation"]

log = logging.getLogger("evenstep.server")


class Conversation:
    """One connection: the raw socket transport. Others override how tensors come and go."""

    def __init__(self, service: Service, stream: socket.socket) -> None:
        self.service = service
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
                call = service.admit(str(fields.get("verb")), fields, body_bytes, _text(fields.get("token")))
            except RefusedError as error:
                if error.status in (401, 413):  # we do not read what such a one sends
                    frames.send(service.refused(error))
                    return False
                frames.drain(body_bytes)
                raise
            self.receive(call, fields)
            reply = call.run()
            frames.within(service.limits.transfer_s(reply.num_bytes))
            self.reply(reply)
        except RefusedError as error:
            frames.within(service.limits.idle_s)
            frames.send(service.refused(error))
        except ServerError as error:
            frames.within(service.limits.idle_s)
            frames.send({"status": 500, "error": str(error)})
        finally:
            if call is not None:
                call.close(reply)
        return True

    def receive(self, call: Call, fields: dict[str, Any]) -> None:
        """Read the tensors of a request into the memory that the call gives for them."""
        del fields
        left = call.body_bytes
        if not left:
            return
        try:
            prefix = self.frames.take(min(LENGTH_BYTES, left))
            left -= len(prefix)
            text = self.frames.take(head_length(prefix, call.body_bytes))
            left -= len(text)
            buffer = call.expect(Head.parse(text, left))
        except RefusedError:
            self.frames.drain(left)
            raise
        self.frames.fill([buffer])

    def reply(self, reply: Reply) -> None:
        """Send a reply. What it refers to is held until this returns."""
        self.frames.send(reply.fields, reply.parts)

    def close(self) -> None:
        """The connection is over."""


class Connections:
    """Accepts connections and serves each in a thread of its own.

    Args:
        service: What to serve.
        listener: A listening socket; taken over.
        name: Of the threads.
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
        self._open: dict[socket.socket, threading.Thread] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name=f"evenstep-{name}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                if not self._stopping:
                    time.sleep(0.05)  # no descriptor is left: some connection will end
                continue
            with self._lock:
                if self._stopping or len(self._open) >= self._service.limits.connections:
                    stream.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(stream,), name=f"evenstep-{self._name}", daemon=True
                )
                self._open[stream] = thread
            thread.start()

    def _serve(self, stream: socket.socket) -> None:
        held = stream
        try:
            stream.settimeout(self._service.limits.idle_s)
            if self._context is not None:
                held = self._context.wrap_socket(stream, server_side=True)
            conversation = self._conversation(self._service, held)
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
                self._open.pop(stream, None)
            held.close()

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            left = dict(self._open)
            for stream in left:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
        for thread in left.values():
            thread.join()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
