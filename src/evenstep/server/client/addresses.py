"""`connect`: from an address to a client, whether one server is there or several."""

import os
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from evenstep.core.errors import ConfigError
from evenstep.server.client.channels import Channel
from evenstep.server.client.client import Client
from evenstep.server.client.compress import Compressor
from evenstep.server.client.connection import Connection
from evenstep.server.client.http import HttpChannel
from evenstep.server.client.memory import MemoryChannel
from evenstep.server.client.sliced import SlicedClient
from evenstep.server.client.tcp import TcpChannel
from evenstep.server.client.whole import WholeClient

__all__ = ["connect", "connect_whole"]

_SILENCE_S = 60.0


def connect(
    url: str | Sequence[str],
    *,
    worker: str | None = None,
    token: str | None = None,
    timeout_s: float = 60.0,
    cafile: str | None = None,
    bfloat16: bool = False,
    top_k: float | None = None,
    register: bool = True,
) -> Client:
    """Connect to a parameter server, or to several that hold slices of one model.

    Args:
        url: `http://host:port`, `https://`, `tcp://host:port`, `tcps://`, or `memory://name` on the server's machine.
            Several in their order, as a list or joined by commas.
        worker: The name of this worker; another one with the same name would be taken for it.
        token: The token that the server printed, if it needs one.
        timeout_s: How long to try when the server cannot be reached, and to wait for other workers.
        cafile: For TLS: the authorities to trust, if not the system's.
        bfloat16: Send and get parameters in bfloat16, which halves what travels and loses precision.
        top_k: Send only this share of each gradient, the largest, and keep the rest for later.
        register: Whether to be counted among the workers. False for readers, for which nobody waits.

    Raises:
        ConfigError: An argument makes no sense, or these are not all servers of one set in order.
        UnreachableError: No server is there.
    """
    urls = [part.strip() for part in url.split(",")] if isinstance(url, str) else list(url)
    compressor = Compressor(bfloat16, top_k)
    connections = _connections(urls, worker, token, timeout_s, cafile)
    if len(connections) == 1:
        client = WholeClient(connections[0], compressor)
        return _opened(client, lambda: client.open(register=register))
    several = SlicedClient(connections, compressor)
    return _opened(several, lambda: several.open(register=register))


def connect_whole(
    url: str, *, worker: str | None = None, token: str | None = None, timeout_s: float = 60.0, register: bool = True
) -> WholeClient:
    """Connect to a server that is known to hold a whole model. Arguments as for `connect`."""
    (connection,) = _connections([url], worker, token, timeout_s, None)
    client = WholeClient(connection, Compressor(False, None))
    _opened(client, lambda: connection.open(register=register))
    return client


def _opened(client: Client, opening: Callable[[], object]) -> Client:
    try:
        opening()
    except BaseException:
        client.close()
        raise
    return client


def _connections(
    urls: Sequence[str], worker: str | None, token: str | None, timeout_s: float, cafile: str | None
) -> list[Connection]:
    worker = worker or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    session = secrets.token_hex(8)
    return [Connection(url, _opener(url, token, cafile), worker, session, timeout_s) for url in urls]


def _opener(url: str, token: str | None, cafile: str | None) -> Callable[[], Channel]:
    """A function that opens a channel to an address."""
    parts = urlsplit(url)
    context = None
    if parts.scheme in ("https", "tcps"):
        try:
            context = ssl.create_default_context(cafile=cafile)
        except OSError as error:
            raise ConfigError(f"cafile={cafile!r} cannot be read: {error}") from error
    if parts.scheme in ("http", "https", "tcp", "tcps") and parts.port is not None:
        kind = HttpChannel if parts.scheme.startswith("http") else TcpChannel
        return lambda: kind(parts, token, context, _SILENCE_S)
    if parts.scheme == "memory":
        return lambda: MemoryChannel(parts, token, _SILENCE_S)
    raise ConfigError(f"{url!r} is not the address of a server; expected http://host:port, tcp://... or memory://name")
