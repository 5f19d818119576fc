"""The control connection between the head and another machine: messages over TCP, optionally with TLS.

A message is a JSON object, optionally with bytes; nothing that is received is ever executed or unpickled. Nothing in
here blocks: what cannot be sent at once is kept, and goes out when the other end takes it. Both ends *beat* a few times
a second, so an end that hears nothing for a while knows that the other is lost, stopped or cut off.
"""

import json
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Any

from evenstep.core.errors import EvenstepError
from evenstep.launch.clocks import Clock

__all__ = ["Lost", "MachineConnection", "Message"]

Message = tuple[dict[str, Any], bytes]
_HEAD = struct.Struct("<IQ")  # the sizes of the text and of the bytes that follow it
_CHUNK = 1 << 18
_MOST_CHUNKS = 256  # that are read in one call, so that other connections get their turn
_BEAT_S = 0.4
_AWAY_S = 1.0  # an end that has not looked for this long, and for half the silence, was itself stopped
FEW_BYTES = 1 << 16
"""How large a message may be before the other end has proved who it is."""
_MANY_BYTES = 1 << 34


class Lost(EvenstepError):
    """The other end is gone, or does not belong to this run. The message says how, phrased to follow its name."""


class MachineConnection:
    """One end of it.

    Args:
        sock: A connected socket.
        tls: What wraps it, if anything.
        server: Whether this is the end that accepted the connection.
        host: With TLS, at the end that connected: the name it connected to.

    Attributes:
        most_bytes: How large a message may be.
        heard_at: When something was last received.
        clock: The other end's clock.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, *, server: bool = False, host: str | None = None
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._greeted = tls is None
        if tls is not None:
            sock = tls.wrap_socket(
                sock, server_side=server, do_handshake_on_connect=False, server_hostname=None if server else host
            )
        self._socket = sock
        self.most_bytes = FEW_BYTES
        self.heard_at, self.clock = time.monotonic(), Clock()
        self._looked_at = self.heard_at
        self._beat_at = 0.0
        self._in, self._out = bytearray(), bytearray()
        self._kept: list[Message] = []  # messages that arrived together with the one waited for
        self._lost: str | None = None  # how the other end was lost; what it said before is heard first

    def trust(self) -> None:
        """The other end has proved who it is: messages may be as large as they need to be."""
        self.most_bytes = _MANY_BYTES

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """The address of the other end."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "an address that is gone"

    @property
    def has_more(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Send a message, now or when the other end takes it. If it is gone, `receive` will say so."""
        text = json.dumps(message).encode()
        self._out += _HEAD.pack(len(text), len(data)) + text + data
        self.flush()

    def beat(self, now: float) -> None:
        """Let the other end know that this one is alive, if a beat is due, and send what is left."""
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            self.send({"beat": self.clock.beat()})
        else:
            self.flush()

    def is_silent(self, now: float, silence_s: float) -> bool:
        """Whether nothing has arrived for `silence_s` while this end was running. Ask several times a second."""
        if now - self._looked_at > max(silence_s / 2, _AWAY_S):
            self.heard_at = now  # this end was stopped, and perhaps the other one with it
        self._looked_at = now
        return now - self.heard_at > silence_s

    def flush(self) -> None:
        """Send as much of what is left as the other end takes."""
        try:
            while self._out:
                self._greet()
                sent = self._socket.send(self._out[:_CHUNK])
                del self._out[:sent]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except (OSError, ValueError) as error:
            self._lost = self._lost or f"can no longer be reached: {_words(error)}"
        if self._lost is not None:
            self._out.clear()

    def receive(self) -> list[Message]:
        """The messages that have arrived, without beats; does not wait.

        Raises:
            Lost: The other end is gone and all it said was heard, or it has sent something that is not a message.
        """
        try:
            for _ in range(_MOST_CHUNKS):
                self._greet()
                data = self._socket.recv(_CHUNK)
                if not data:
                    self._lost = "is lost: its connection closed"
                    break
                self._in += data
                self.heard_at = time.monotonic()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except (OSError, ValueError) as error:
            self._lost = self._lost or f"is lost: {_words(error)}"
        found, self._kept = self._kept, []
        for message, beside in iter(self._next, None):
            if "beat" in message:
                self.clock.heard(message["beat"])
            else:
                found.append((message, beside))
        if self._lost is not None and not found:
            raise Lost(self._lost)
        return found  # if it is lost, the next call says so

    def is_over(self) -> bool:
        """Whether the other end has closed, having heard everything; what it still sends is dropped."""
        self.flush()
        try:
            self.receive()
        except Lost:
            return True
        return False

    def wait(self, timeout_s: float) -> Message:
        """Wait for a message, for callers with nothing else to do.

        Raises:
            Lost: None arrived in time, or as in `receive`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.receive()
            if found:
                self._kept = found[1:]
                return found[0]
            self.flush()
            time.sleep(0.005)
        raise Lost(f"did not answer within {timeout_s:g} s")

    def close(self) -> None:
        """Close it; what the other end has not taken yet is dropped."""
        self.flush()
        with suppress(OSError):
            self._socket.close()

    def _greet(self) -> None:
        """Continue the TLS handshake, if there is one; it may have to wait for the other end."""
        if not self._greeted:
            assert isinstance(self._socket, ssl.SSLSocket), "only TLS has a handshake"
            self._socket.do_handshake()
            self._greeted = True

    def _next(self) -> Message | None:
        """The next whole message in what was received."""
        if len(self._in) < _HEAD.size:
            return None
        text_bytes, data_bytes = _HEAD.unpack_from(self._in)
        if text_bytes + data_bytes > self.most_bytes:
            raise Lost("sent something that is not a message")
        end = _HEAD.size + text_bytes
        if len(self._in) < end + data_bytes:
            return None
        try:
            message = json.loads(self._in[_HEAD.size : end])
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Lost("sent something that is not a message")
        data = bytes(self._in[end : end + data_bytes])
        del self._in[: end + data_bytes]
        return message, data


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
