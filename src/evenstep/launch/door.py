"""Where other machines connect to a head: who is let in, and whether they are alike enough.

Both sides prove that they know the token without sending it; then the newcomer is told what it would run, describes
itself, and is let in or refused with a sentence. Nobody waits for a newcomer: it has a few seconds for all of this.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evenstep.core.errors import ConfigError
from evenstep.launch.connection import Lost, MachineConnection

__all__ = ["PROTOCOL", "Arrival", "HeadDoor", "Listen", "is_loopback", "proof_of", "read_token", "split_address"]

PROTOCOL = 2
_PATIENCE_S = 20.0  # for all of it: the newcomer may have to read and hash files on a slow disk
_MOST_ARRIVING = 64


@dataclass(frozen=True)
class Listen:
    """How other machines connect to a head.

    Attributes:
        host: Where it listens; a name or an address of this machine.
        port: The port; 0: any that is free.
        token: The secret that every machine must know; empty: none, which is allowed only for loopback.
        machines: How many machines, the head included, must be there before any worker is started.
        workers: How many workers the other machines must have offered before that.
        between: The torch.distributed backend by which bytes move between machines.
        silence_s: How long a machine may be silent before it is given up.
        certfile: The certificate for TLS on the control connection.
        keyfile: Its key, if that is in another file.
        fd: A socket that is listening there already; None: one is opened, and the user is told.
    """

    host: str
    port: int = 0
    token: str = ""
    machines: int = 1
    workers: int = 0
    between: str = "gloo"
    silence_s: float = 2.0
    certfile: Path | None = None
    keyfile: Path | None = None
    fd: int | None = None

    def tls(self) -> ssl.SSLContext | None:
        """What wraps connections, if there is a certificate.

        Raises:
            ConfigError: The certificate cannot be used.
        """
        if self.certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--certfile {self.certfile} cannot be used: {error.strerror or error}") from error
        return context


class Arrival(Protocol):
    """What a newcomer that knows the token asks of a head."""

    def job(self) -> dict[str, Any]:
        """What it would run."""

    def admit(self, connection: MachineConnection, said: dict[str, Any]) -> str | None:
        """Let a newcomer in, given its description of itself; or say why not, in a sentence."""


def split_address(text: str, option: str) -> tuple[str, int]:
    """The host and port of HOST:PORT.

    Raises:
        ConfigError: The text is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option} {text}, expected HOST:PORT, such as 10.0.0.1:7777")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can connect to an address."""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).split("%")[0]).is_loopback for each in found)


def read_token(path: Path | None) -> str:
    """The token in a file; empty: there is none.

    Raises:
        ConfigError: The file cannot be read, or is empty.
    """
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not token:
        raise ConfigError(f"--token-file {path} is empty; put a secret into it, such as from `openssl rand -hex 32`")
    return token


def proof_of(token: str, who: str, nonce: str) -> str:
    """Proves knowledge of the token without revealing it."""
    return hmac.new(token.encode(), f"{who} {nonce}".encode(), hashlib.sha256).hexdigest()


@dataclass
class _Arriving:
    connection: MachineConnection
    nonce: str
    since: float
    proved: bool = False


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # the rest repeats the address
        raise ConfigError(f"--listen {host}:{port}: {why}; name a free address") from error


class HeadDoor:
    """Listens; everything happens in `turn`, which never waits.

    Args:
        listen: Where to listen.
        arrival: Answers newcomers.
        say: Takes sentences for the user.

    Raises:
        ConfigError: The address cannot be listened on, or needs a token.
    """

    def __init__(self, listen: Listen, arrival: Arrival, say: Callable[[str], None]) -> None:
        self._token, self._arrival, self._say, self._tls = listen.token, arrival, say, listen.tls()
        if not listen.token and not is_loopback(listen.host):
            raise ConfigError(
                f"--listen {listen.host}:{listen.port} can be reached from other machines, so it needs a token: "
                "--token-file FILE, the same on every machine"
            )
        self.socket = _listening(listen.host, listen.port) if listen.fd is None else socket.socket(fileno=listen.fd)
        self.socket.setblocking(False)
        self.port = int(self.socket.getsockname()[1])
        self._arriving: list[_Arriving] = []

    def close(self) -> None:
        """Stop listening."""
        for each in self._arriving:
            each.connection.close()
        self.socket.close()

    def accept(self) -> None:
        """Accept a newcomer, if it has not gone again."""
        with suppress(OSError):
            sock, _ = self.socket.accept()
            if len(self._arriving) >= _MOST_ARRIVING:
                sock.close()
                return
            nonce = secrets.token_hex(16)
            each = _Arriving(MachineConnection(sock, self._tls, server=True), nonce, time.monotonic())
            self._arriving.append(each)
            each.connection.send({"protocol": PROTOCOL, "nonce": nonce})

    def turn(self, now: float) -> None:
        """Read what newcomers say, and answer."""
        for each in list(self._arriving):
            try:
                if now - each.since > _PATIENCE_S:
                    raise Lost(f"did not describe itself within {_PATIENCE_S:g} s")
                each.connection.flush()
                for message, _ in each.connection.receive():
                    self._hear(each, message)
            except Lost as error:
                self._arriving.remove(each)
                if each.proved:
                    self._say(f"a machine at {each.connection.there} {error}; it was not let in")
                each.connection.close()

    def _hear(self, each: _Arriving, message: dict[str, Any]) -> None:
        connection = each.connection
        if each not in self._arriving:
            return None
        if not each.proved:
            if message.get("protocol") != PROTOCOL:
                return self._refuse(
                    each,
                    f"it does not speak protocol {PROTOCOL}; install the same version of evenstep on every machine",
                )
            proof, nonce = message.get("proof"), message.get("nonce")
            if not isinstance(proof, str) or not isinstance(nonce, str):
                raise Lost("sent something that is not a message")
            if not hmac.compare_digest(proof.encode(), proof_of(self._token, "join", each.nonce).encode()):
                return self._refuse(each, "it does not know the token; give it the --token-file of the head")
            each.proved = True
            connection.trust()
            connection.send({"proof": proof_of(self._token, "head", nonce), "job": self._arrival.job()})
            return None
        self._arriving.remove(each)
        refusal = self._arrival.admit(connection, message)
        if refusal is not None:
            self._arriving.append(each)
            return self._refuse(each, refusal)
        return None

    def _refuse(self, each: _Arriving, why: str) -> None:
        self._arriving.remove(each)
        self._say(f"a machine at {each.connection.there} was refused: {why}")
        each.connection.send({"refused": why})
        each.connection.close()
