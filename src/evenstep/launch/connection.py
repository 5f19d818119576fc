"""The control connection between the head and another machine: messages over TCP, perhaps inside of TLS.

A message is a JSON object and perhaps bytes beside it; nothing that comes is ever executed or unpickled. Nobody waits
in here: what cannot be sent at once is kept, and goes out when the other end takes it. Both ends *beat* a few times a
second, so that whoever hears nothing for a while knows that the other one is lost, stopped or cut off.
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
_HEAD = struct.Struct("<IQ")  # bytes of the text, bytes beside it
_CHUNK = 1 << 18
_MOST_CHUNKS = 256  # that are read at once: others want to be heard too
_BEAT_S = 0.4
FEW_BYTES = 1 << 16
"""What a message may have while it is not known who is there."""
_MANY_BYTES = 1 << 34


class Lost(EvenstepError):
    """The other end is gone, or is nobody of ours. The message says how, and follows its name."""


class MachineConnection:
    """One end.

    Args:
        sock: Connected.
        tls: What wraps it, if anything.
        server: Whether this is the end that was connected to.
        host: With TLS, at the other end: by which name it was called.

    Attributes:
        most_bytes: What a message may have.
        heard_at: When something last came.
        clock: The other end's.
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
        self._beat_at = 0.0
        self._in, self._out = bytearray(), bytearray()
        self._kept: list[Message] = []  # what came together with what was waited for

    def trust(self) -> None:
        """It is known who is there: messages may be as long as they need to."""
        self.most_bytes = _MANY_BYTES

    def fileno(self) -> int:
        """What to wait for."""
        return self._socket.fileno()

    @property
    def here(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def there(self) -> str:
        """The address of the other one."""
        try:
            return str(self._socket.getpeername()[0])
        except OSError:
            return "somebody who is gone"

    @property
    def has_more(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Send a message, now or when the other end takes it.

        Raises:
            Lost: It is gone.
        """
        text = json.dumps(message).encode()
        self._out += _HEAD.pack(len(text), len(data)) + text + data
        self.flush()

    def beat(self, now: float) -> None:
        """Let the other end know that this one lives, if it is time to, and send what is left.

        Raises:
            Lost: It is gone.
        """
        if now - self._beat_at >= _BEAT_S:
            self._beat_at = now
            self.send({"beat": self.clock.beat()})
        else:
            self.flush()

    def flush(self) -> None:
        """Send as much of what is left as the other end takes.

        Raises:
            Lost: It is gone.
        """
        try:
            while self._out:
                self._greet()
                sent = self._socket.send(self._out[:_CHUNK])
                del self._out[:sent]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except (OSError, ValueError) as error:
            raise Lost(f"cannot be reached any more: {_words(error)}") from error

    def receive(self) -> list[Message]:
        """The messages that have come, beats left out; does not wait.

        Raises:
            Lost: The other end is gone, or sends what is no message.
        """
        over = False
        try:
            for _ in range(_MOST_CHUNKS):
                self._greet()
                data = self._socket.recv(_CHUNK)
                over = not data
                if over:
                    break
                self._in += data
                self.heard_at = time.monotonic()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except (OSError, ValueError) as error:
            raise Lost(f"is lost: {_words(error)}") from error
        found, self._kept = self._kept, []
        for message, beside in iter(self._next, None):
            if "beat" in message:
                self.clock.heard(message["beat"])
            else:
                found.append((message, beside))
        if over and not found:
            raise Lost("is lost: its connection closed")
        return found  # if it is over, the next call says so

    def wait(self, timeout_s: float) -> Message:
        """Wait for a message, for those who have nothing else to do.

        Raises:
            Lost: It did not come in time, or as in `receive`.
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
        """Close it; what was sent is on its way if the other end has taken it."""
        with suppress(Lost):
            self.flush()
        with suppress(OSError):
            self._socket.close()

    def _greet(self) -> None:
        """Go on with the handshake of TLS, if there is one, which may want to wait."""
        if not self._greeted:
            assert isinstance(self._socket, ssl.SSLSocket), "else there is no handshake"
            self._socket.do_handshake()
            self._greeted = True

    def _next(self) -> Message | None:
        """The next whole message of what has come."""
        if len(self._in) < _HEAD.size:
            return None
        text_bytes, data_bytes = _HEAD.unpack_from(self._in)
        if text_bytes + data_bytes > self.most_bytes:
            raise Lost("sends what is no message of ours")
        end = _HEAD.size + text_bytes
        if len(self._in) < end + data_bytes:
            return None
        try:
            message = json.loads(self._in[_HEAD.size : end])
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Lost("sends what is no message of ours")
        data = bytes(self._in[end : end + data_bytes])
        del self._in[: end + data_bytes]
        return message, data


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
