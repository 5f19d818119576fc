"""The parameter server as a user sees it: start it, give out its address, stop it."""

import json
import logging
import math
import secrets
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.fleet import Fleet, check_directory
from evenstep.server.hosting.host import Host
from evenstep.server.service.service import Service
from evenstep.server.store.optimizers import MakeOptimizer
from evenstep.server.store.store import Store

__all__ = ["JsonFormatter", "ParameterServer"]

_LOOK_S = 0.5
log = logging.getLogger("evenstep.server")


class _Host(Protocol):
    urls: dict[str, str]

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def check(self) -> None: ...
    def figures(self) -> dict[str, Any]: ...


class ParameterServer:
    """Keeps the parameters of a model, updates them, and serves them over HTTP, raw sockets and shared memory.

    It runs in threads of this process; with `servers=2` or more, in that many processes, each with a slice of the
    parameters, which end with this one. A context manager that starts and stops it.

    Args:
        model: The model whose parameters and buffers to serve; they move into the server's memory. With several
            servers the model gets their values back when they are closed. None: the first client puts them.
        optimizer: Steps on incoming gradients: one over the model's parameters, or a function that makes one from a
            list of parameters. None: only deltas are accepted.
        **options: See `ServerConfig`.

    Raises:
        ConfigError: An option makes no sense.
        UnsupportedError: The optimizer sees all parameters at once, and there are several servers.
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
        if self.config.directory is not None:
            check_directory(Path(self.config.directory), self.config.servers)
        kind = Host if self.config.servers == 1 else Fleet
        self._host: _Host = kind(self.config, token, (model, optimizer))

    @property
    def store(self) -> Store:
        """The state of the server.

        Raises:
            ConfigError: There are several, in other processes.
        """
        return self.service.store

    @property
    def service(self) -> Service:
        """What answers requests, over all transports.

        Raises:
            ConfigError: There are several, in other processes.
        """
        if not isinstance(self._host, Host):
            raise ConfigError("several servers are other processes; ask them: connect(server.url).status()")
        return self._host.service

    @property
    def urls(self) -> dict[str, str]:
        """The address for each transport; those of several servers are joined by commas. Empty if not started."""
        return self._host.urls

    @property
    def url(self) -> str:
        """The first address: that of HTTP, if it is served.

        Raises:
            ConfigError: The server is not started.
        """
        if not self.urls:
            raise ConfigError("the server is not started; call start() first")
        return next(iter(self.urls.values()))

    def start(self) -> None:
        """Begin to serve; returns when clients can connect. A server that was stopped keeps its state and addresses.

        Raises:
            ConfigError: An address is not available, a certificate cannot be read, or `evenstep[server]` is missing.
        """
        self._host.start()

    def stop(self) -> None:
        """End all connections. The state stays, and clients that try again find it after the next `start`."""
        self._host.stop()

    def close(self) -> None:
        """Stop for good: the model's parameters become ordinary memory again."""
        self._host.close()

    def run(self) -> None:
        """Serve in the foreground until SIGINT or SIGTERM. Prints the addresses, and the token if one was made.

        Raises:
            ServerError: One of several servers died, and cannot be started again where it was.
        """
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
            told_s, every_s = time.monotonic(), self.config.log_every_s or math.inf
            while not over.wait(min(_LOOK_S, every_s)):
                self._host.check()
                if time.monotonic() - told_s >= every_s:
                    told_s += every_s
                    log.info("figures", extra={"figures": self._host.figures()})
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


class JsonFormatter(logging.Formatter):
    """Log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """One line: time, level, event; and the version, worker and figures if it has them."""
        found = {"time": self.formatTime(record), "level": record.levelname.lower(), "event": record.getMessage()}
        for key in ("version", "worker", "figures"):
            if (value := getattr(record, key, None)) is not None:
                found[key] = value
        return json.dumps(found)
