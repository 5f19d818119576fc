"""The parameter server as a user sees it: start it, give its address away, stop it."""

import json
import logging
import secrets
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.server.config import ServerConfig
from evenstep.server.connections import Connections
from evenstep.server.durable import Keeper
from evenstep.server.memory import MemoryServer
from evenstep.server.service import Service
from evenstep.server.store import Store

__all__ = ["ParameterServer"]

log = logging.getLogger("evenstep.server")
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_SOCKET_BYTES = 4 << 20


class _Transport(Protocol):
    def close(self) -> None: ...


class ParameterServer:
    """Keeps the parameters of a model, updates them, and serves them over HTTP, raw sockets and shared memory.

    It runs in threads of this process. A context manager: starts, and stops.

    Args:
        model: Whose parameters and buffers to serve; they live in the server's memory from now on. None: the first
            client puts them.
        optimizer: Steps on the gradients that come: one over the model's parameters, or a function that makes one
            from a list of parameters. None: only deltas are taken.
        **options: See `ServerConfig`.

    Raises:
        ConfigError: An option makes no sense.
        CheckpointError: The directory holds a snapshot that is torn, or of another model.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | MakeOptimizer | None = None, **options: Any
    ) -> None:
        try:
            self.config = ServerConfig(**options)
        except TypeError as error:
            raise ConfigError(f"ParameterServer: {error}") from None
        if isinstance(optimizer, Optimizer) and model is None:
            raise ConfigError("an optimizer without its model; pass both, or a function that makes the optimizer")
        token = self.config.token
        if token is None and not self.config.on_loopback:
            token = secrets.token_urlsafe(24)
        self.token = token
        made = (lambda _: optimizer) if isinstance(optimizer, Optimizer) else optimizer
        self.store = Store(self.config.options(), made)
        self._keeper = None
        if self.config.directory is not None:
            self._keeper = Keeper(
                self.store, Path(self.config.directory), self.config.snapshot_every, self.config.durable
            )
        if model is not None:
            parameters = dict(model.named_parameters())
            buffers = dict(model.named_buffers())
            tensors = {name: tensor.detach().cpu() for name, tensor in {**parameters, **buffers}.items()}
            self.store.put(tensors, "the server", parameters=parameters, buffers=buffers)
        if self._keeper is not None:
            self._keeper.restore()
        self._service = Service(self.store, self.config.limits, token)
        self._transports: list[_Transport] = []
        self._ports: dict[str, int] = {}
        self._name = f"evenstep-{secrets.token_hex(8)}"
        self.urls: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The first of the addresses: HTTP's, unless there is none.

        Raises:
            ConfigError: The server is not started.
        """
        if not self.urls:
            raise ConfigError("the server is not started; call start() first")
        return next(iter(self.urls.values()))

    def start(self) -> None:
        """Begin to serve; returns when clients can connect. A server that was stopped keeps its state and addresses.

        Raises:
            ConfigError: An address cannot be had, a certificate cannot be read, or `evenstep[server]` is missing.
        """
        if self._transports:
            return
        self.store.hurry(False)
        try:
            for name in self.config.transports:
                self._start(name)
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str) -> None:
        secure = "s" if self.config.certfile else ""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        if name == "memory":
            self._transports.append(MemoryServer(self._service, self._name))
            self.urls[name] = f"memory://{self._name}"
            return
        context = self._context() if secure else None
        beside_http = name == "tcp" and "http" in self.config.transports and self.config.port > 0
        wanted = self.config.port + int(beside_http)
        listener = self._listen(self._ports.get(name, wanted))
        self._ports[name] = port = listener.getsockname()[1]
        if name == "tcp":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._transports.append(Connections(self._service, listener, "tcp", context))
        else:
            self._transports.append(self._http(listener))
        self.urls[name] = f"{name}{secure}://{host}:{port}"

    def _http(self, listener: socket.socket) -> _Transport:
        try:
            from evenstep.server.http import HttpServer  # here: it needs packages that not everyone has
        except ImportError as error:
            listener.close()
            raise ConfigError(
                f"HTTP needs {error.name}: pip install 'evenstep[server]', or say transports=('tcp', 'memory')"
            ) from error
        hosts = frozenset({"127.0.0.1", "localhost", "::1", self.config.host}) if self.config.on_loopback else None
        return HttpServer(self._service, listener, self.config.certfile, self.config.keyfile, hosts)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(str(self.config.certfile), self.config.keyfile)
        except OSError as error:
            raise ConfigError(f"the certificate {self.config.certfile} cannot be used: {error}") from error
        return context

    def _listen(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio looks for it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.config.host, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise ConfigError(f"{self.config.host}:{port} cannot be had: {error.strerror or error}") from error
        return listener

    def stop(self) -> None:
        """End all connections. The state stays, and clients that try again find it after the next `start`."""
        self.store.hurry(True)
        for transport in self._transports:
            transport.close()
        self._transports = []
        self.urls = {}
        if self._keeper is not None:
            self._keeper.snapshot()

    def close(self) -> None:
        """Stop for good: the model's parameters become ordinary memory again."""
        self.stop()
        if self._keeper is not None:
            self._keeper.close()
        self.store.close()

    def run(self) -> None:
        """Serve in the foreground until SIGINT or SIGTERM. Prints the addresses, and the token if one was made."""
        over = threading.Event()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, lambda *_: over.set())
        try:
            self.start()
            for url in self.urls.values():
                print(f"evenstep: serving at {url}", flush=True)
            if self.token is not None and self.config.token is None:
                print(f"evenstep: token {self.token}", flush=True)
            while not over.wait(self.config.log_every_s):
                log.info("figures", extra={"figures": self._service.figures()})
        finally:
            self.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> "ParameterServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonLines(logging.Formatter):
    """Log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """One line: time, level, event; the version and the worker that it is about, and figures, where it has them."""
        found = {"time": self.formatTime(record), "level": record.levelname.lower(), "event": record.getMessage()}
        for key in ("version", "worker", "figures"):
            if (value := getattr(record, key, None)) is not None:
                found[key] = value
        return json.dumps(found)
