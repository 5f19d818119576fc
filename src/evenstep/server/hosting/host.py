"""One server in threads of this process: a store, its directory, and the transports around them."""

import secrets
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.service.service import Service
from evenstep.server.store.commits import First
from evenstep.server.store.keeper import Keeper
from evenstep.server.store.optimizers import MakeOptimizer, sliced
from evenstep.server.store.store import Store
from evenstep.server.transports.memory import MemoryServer
from evenstep.server.transports.sockets import Connections
from evenstep.server.wire.slices import ServerPlace, Slices
from evenstep.server.wire.tensors import ParameterLayout, Spec

__all__ = ["Host", "Origin", "all_tensors"]

Origin = tuple[nn.Module | None, Optimizer | MakeOptimizer | None]
"""What a server begins with: a model and its optimizer, or a function that makes one."""

_SOCKET_BYTES = 4 << 20


class _Transport(Protocol):
    def close(self) -> None: ...


class Host:
    """A server in threads of this process.

    Args:
        config: Its options.
        token: The secret that every request must carry.
        origin: The model and its optimizer.
        place: Which of several servers it is; then it serves pieces of the model, which stays as it is.
        ports: The ports that it had before, by transport.
        name: The name of its shared memory, if it had one before.

    Raises:
        CheckpointError: The directory holds a snapshot that is torn, or of another model.
    """

    def __init__(
        self,
        config: ServerConfig,
        token: str | None,
        origin: Origin,
        place: ServerPlace = ServerPlace(),  # noqa: B008  # a frozen value
        ports: Mapping[str, int] | None = None,
        name: str | None = None,
    ) -> None:
        self.config, self.token, self._place = config, token, place
        optimizer = origin[1]
        made = (lambda _: optimizer) if isinstance(optimizer, Optimizer) else optimizer
        self.store = Store(config.options(), made, place=place)
        self._keeper = None
        if config.directory is not None:
            self._keeper = Keeper(
                self.store, Path(config.directory), config.snapshot_every, config.durable, set_aside=config.set_aside
            )
        try:
            if origin[0] is not None:
                self._put(origin[0], optimizer)
            if self._keeper is not None:
                self._keeper.restore()
        except BaseException:
            self._let_go()
            raise
        self.service = Service(self.store, config.limits, token)
        self._transports: list[_Transport] = []
        self.ports: dict[str, int] = dict(ports or {})
        self.name = name or f"evenstep-{secrets.token_hex(8)}"
        self.urls: dict[str, str] = {}

    def _put(self, model: nn.Module, optimizer: Optimizer | MakeOptimizer | None) -> None:
        tensors, parameters, buffers = all_tensors(model), dict(model.named_parameters()), dict(model.named_buffers())
        if self._place.count == 1:
            self.store.put(First(tensors, "the server", buffers, given=parameters))
            return
        layout = ParameterLayout({name: Spec.of(tensor) for name, tensor in tensors.items()})
        slices = Slices(layout, self._place.count, split=self._place.split)
        pieces = slices.pieces[self._place.index]
        values = {piece.name: piece.of(tensors[piece.parameter].contiguous()) for piece in pieces}
        own = {
            piece.name: nn.Parameter(values[piece.name], requires_grad=parameters[piece.parameter].requires_grad)
            for piece in pieces
            if piece.parameter in parameters
        }
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            optimizer = optimizer([p for p in parameters.values() if p.requires_grad])
        if optimizer is not None:
            part = sliced(optimizer, {p: name for name, p in parameters.items()}, pieces, own)
            self.store.state.make_optimizer = lambda _: part
        untrained = [piece.name for piece in pieces if piece.parameter in buffers]
        self.store.put(First(values, "the server", untrained, slices, given=own))

    def start(self) -> None:
        """Begin to serve; returns when clients can connect. A server that was stopped keeps its state and addresses.

        Raises:
            ConfigError: An address is not available, a certificate cannot be read, or `evenstep[server]` is missing.
        """
        if self._transports:
            return
        self._hurry(False)
        try:
            for name in self.config.transports:
                self._start(name)
            if self._place.count > 1 and "memory" not in self.config.transports:
                self._start("memory")  # for the process that started them
        except BaseException:
            self.stop()
            raise

    def _start(self, name: str) -> None:
        secure = "s" if self.config.certfile else ""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        if name == "memory":
            self._transports.append(MemoryServer(self.service, self.name))
            self.urls[name] = f"memory://{self.name}"
            return
        context = self._context() if secure else None
        network: list[str] = [each for each in ("http", "tcp") if each in self.config.transports]
        offset = self._place.index * len(network) + network.index(name)
        wanted = self.config.port + offset if self.config.port else 0
        listener = self._listen(self.ports.get(name, wanted))
        self.ports[name] = port = listener.getsockname()[1]
        if name == "tcp":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._transports.append(Connections(self.service, listener, "tcp", context))
        else:
            self._transports.append(self._http(listener, context))
        self.urls[name] = f"{name}{secure}://{host}:{port}"

    def _http(self, listener: socket.socket, context: ssl.SSLContext | None) -> _Transport:
        try:
            from evenstep.server.transports.http import (
                HttpServer,
            )  # not at the top: it needs packages that not everyone has installed
        except ImportError as error:
            listener.close()
            raise ConfigError(
                f"HTTP needs {error.name}: pip install 'evenstep[server]', or use transports=('tcp', 'memory')"
            ) from error
        hosts = frozenset({"127.0.0.1", "localhost", "::1", self.config.host}) if self.config.on_loopback else None
        return HttpServer(self.service, listener, context, hosts)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(str(self.config.certfile), self.config.keyfile)
        except OSError as error:
            raise ConfigError(f"the certificate {self.config.certfile} cannot be used: {error}") from error
        return context

    def _listen(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio checks the protocol
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.config.host, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise ConfigError(f"{self.config.host}:{port} is not available: {error.strerror or error}") from error
        return listener

    def stop(self) -> None:
        """End all connections. The state stays, and clients that try again find it after the next `start`."""
        self._hurry(True)
        for transport in self._transports:
            transport.close()
        self._transports = []
        self.urls = {}
        if self._keeper is not None:
            self._keeper.snapshot()

    def _hurry(self, hurried: bool) -> None:
        self.store.attendance.hurry(hurried)
        self.service.meetings.hurry(hurried)

    def figures(self) -> dict[str, Any]:
        """Its figures, for a log."""
        return self.service.figures()

    def check(self) -> None:
        """Nothing to do: what happens to this server happens to this process."""

    def close(self) -> None:
        """Stop for good: the model's parameters become ordinary memory again."""
        try:
            self.stop()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self.store.close()


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, on the CPU."""
    both = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in both.items()}
