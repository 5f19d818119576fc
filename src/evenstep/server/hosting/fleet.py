"""Several servers in processes of their own, as seen from the process that started them."""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any

import torch

from evenstep.core import errors
from evenstep.core.children import Child, fork
from evenstep.core.errors import CheckpointError, EvenstepError, ServerError
from evenstep.core.files import read_regular, write_new
from evenstep.server.client.addresses import connect
from evenstep.server.client.sliced import SlicedClient
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.host import Origin
from evenstep.server.hosting.processes import FleetPlan, Messages, watch_servers
from evenstep.server.store.optimizers import can_split
from evenstep.server.store.status import without_lists
from evenstep.server.wire.slices import ServerPlace

__all__ = ["Fleet", "check_directory"]

_NAME = "servers.json"
_READY_S = 120.0  # how long servers may take to start: they may have a long log to read back
_END_S = 30.0
log = logging.getLogger("evenstep.server")


class Fleet:
    """Several servers. They are started by `start`, and live until `close`.

    Args:
        config: The options of each.
        token: The secret that every request must carry.
        origin: The model and its optimizer.

    Raises:
        UnsupportedError: The optimizer sees all parameters at once.
        CheckpointError: The directory cannot be used.
    """

    def __init__(self, config: ServerConfig, token: str | None, origin: Origin) -> None:
        self._config, self._token, self._model = config, token, origin[0]
        name = secrets.token_hex(8)
        if config.directory is not None:
            name = _name_in(Path(config.directory), config.servers)
        self._plan = FleetPlan(config, token, origin, ServerPlace(0, config.servers, name, can_split(origin[1])))
        self._watcher: Child | None = None
        self._messages: Messages | None = None
        self._inside = ""  # the addresses by which this process reaches them
        self.urls: dict[str, str] = {}

    def start(self) -> None:
        """Start them, or make them serve again; returns when clients can connect.

        Raises:
            ServerError: They cannot be started, or one misses updates that another has.
        """
        if self.urls:
            return
        if self._messages is None:
            self._fork()
        else:
            self._messages.say({"do": "start"})
        try:
            found = self._gather("start")
            urls = [found[n]["urls"] for n in range(self._config.servers)]
            joined = {transport: ",".join(each[transport] for each in urls) for transport in urls[0]}
            self._inside = joined["memory"]
            self.urls = {transport: joined[transport] for transport in self._config.transports}
            self._settle()
        except BaseException:
            self._end()
            raise

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        if "http" in self._config.transports:
            with contextlib.suppress(ImportError):  # the servers will report it
                import evenstep.server.transports.http  # noqa: F401  # once here, rather than in every server
        parent = os.getpid()
        self._watcher = fork(  # not tied: the calling thread may end long before the servers
            lambda: watch_servers(self._plan, theirs, parent), keep={theirs.fileno()}, tied=False
        )
        theirs.close()
        self._messages = Messages(ours)

    def _gather(self, what: str) -> dict[int, dict[str, Any]]:
        """Wait until every server reports that it has done something."""
        assert self._messages is not None, "servers are asked only after they were started"
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _READY_S
        while len(found) < self._config.servers:
            try:
                said = self._messages.hear(max(deadline - time.monotonic(), 0.01))
            except TimeoutError:
                raise ServerError(f"the servers did not {what} within {_READY_S:g} s") from None
            if said is None:
                raise self._orphaned()
            _raise_if_wrong(said)
            if said.get("done") == what:
                found[said["server"]] = said
        return found

    def _settle(self) -> None:
        """Bring all of them to one version: a server that was killed may have missed something."""
        with self._client() as client:
            if client.status()["owner"] is None:
                return
            try:
                client.settle(10.0)
            except errors.UnreachableError as error:
                raise ServerError(
                    f"{error}; the machine failed before it was on the disk: start from an older copy of the "
                    "directory, or from the model, and use durable=True"
                ) from error

    def _client(self) -> SlicedClient:
        client = connect(self._inside, token=self._token, register=False)
        assert isinstance(client, SlicedClient), "several addresses make a client of slices"
        return client

    def check(self) -> None:
        """Check that they are all alive.

        Raises:
            ServerError: One died, and all ended.
        """
        if self._messages is None or not self.urls:
            return
        while select.select([self._messages.stream], [], [], 0)[0]:
            said = self._messages.hear(1.0)
            if said is None:
                raise self._orphaned()
            _raise_if_wrong(said)

    def _orphaned(self) -> ServerError:
        """The error for the loss of the process that starts the servers, and so of the servers."""
        assert self._watcher is not None, "servers that are lost were started by a watcher"
        if not self._watcher.wait(1.0):  # it closed the connection, so it is about to end
            self._watcher.kill()
        self._watcher.reap()
        how, what_now = self._watcher.describe_end(), "start them again"
        if self._config.directory is not None:
            what_now += " with the same directory"
        who = f"the process that starts the servers (pid {self._watcher.pid})"
        text = f"{who} {how}, and all servers ended with it; {what_now}"
        log.error("%s", text)
        return ServerError(text)

    def figures(self) -> dict[str, Any]:
        """The figures of all of them, for a log."""
        with self._client() as client:
            return without_lists(client.status())

    def stop(self) -> None:
        """Stop serving, but keep their state and addresses."""
        if self._messages is None or not self.urls:
            return
        self.urls = {}
        self._messages.say({"do": "stop"})
        self._gather("stop")

    def close(self) -> None:
        """End them; the model gets their values."""
        try:
            if self._messages is not None and self._model is not None:
                self._bring_back()
        finally:
            self._end()

    def _bring_back(self) -> None:
        """Give the model the servers' values; if the servers are gone, it keeps its own."""
        model = self._model
        assert model is not None, "close calls this only with a model"
        try:
            self.check()
            self.start()
            with self._client() as client:
                values = client.get_parameters(timeout_s=_END_S)
        except EvenstepError as error:
            log.warning("the model keeps the values that it had before the servers were started: %s", str(error))
            return
        with torch.no_grad():
            for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
                tensor.copy_(values[name])

    def _end(self) -> None:
        if self._messages is None or self._watcher is None:
            return
        self.urls = {}
        self._messages.say({"do": "close"})
        with contextlib.suppress(OSError):  # it may have ended already
            self._messages.stream.shutdown(socket.SHUT_WR)
        if not self._watcher.wait(_END_S):
            self._watcher.kill()
        self._watcher.reap()
        self._messages.stream.close()
        self._messages = None


def _raise_if_wrong(said: dict[str, Any]) -> None:
    if "error" in said:
        kind = getattr(errors, said["kind"], ServerError)
        raise kind(said["error"])


def check_directory(directory: Path, count: int) -> None:
    """Check that a directory, if it holds anything, belongs to this number of servers.

    Raises:
        CheckpointError: It belongs to another number.
    """
    found = None
    if (directory / "server.json").exists():
        found = 1
    elif (directory / _NAME).exists():
        found = _read(directory)[1]
    if found not in (None, count):
        raise CheckpointError(f"{directory} is of {found} servers, expected {count}; start the same number of servers")


def _read(directory: Path) -> tuple[str, int]:
    """The name and size of the set of servers that a directory belongs to."""
    path = directory / _NAME
    try:
        facts = json.loads(read_regular(path, 1 << 16))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    match facts:
        case {"name": str(name), "count": int(count)}:
            return name, count
    raise CheckpointError(f"{path} was altered; bring back a copy, or start in another directory")


def _name_in(directory: Path, count: int) -> str:
    """The name of the set of servers that a directory belongs to; a new one if there is none."""
    path = directory / _NAME
    if not path.exists():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            write_new(partial, json.dumps({"name": secrets.token_hex(8), "count": count}).encode())
            os.replace(partial, path)
        except OSError as error:
            raise CheckpointError(f"the directory {directory} cannot be written: {error.strerror}") from error
    return _read(directory)[0]
