"""The client of a server that holds a whole model."""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from evenstep.core.errors import ConfigError, UnreachableError
from evenstep.server.client import updates
from evenstep.server.client.channels import Fields
from evenstep.server.client.client import Client
from evenstep.server.client.compress import Compressor
from evenstep.server.client.connection import Connection, Registration, patience

__all__ = ["WholeClient"]


class WholeClient(Client):
    """A worker's view of one server. See `Client`.

    Args:
        connection: The connection to the server; taken over.
        compressor: Compresses updates before they are sent.

    Attributes:
        connection: For other requests.
    """

    def __init__(self, connection: Connection, compressor: Compressor) -> None:
        super().__init__(connection.url, connection.worker, connection.timeout_s, compressor)
        self.connection = connection
        self._lock = threading.RLock()
        self._place = (0, 1)  # which of how many servers
        connection.on_registered = self._on_registered

    def _on_registered(self, said: Registration) -> None:
        self.sequence = max(self.sequence, said.sequence)
        self.staleness, self._locks, self.version = said.staleness, said.locks, said.version
        self._place = said.place[:2]

    def open(self, *, register: bool) -> None:
        """Connect, and check which server this is.

        Args:
            register: Whether to be counted among the workers.

        Raises:
            ConfigError: It is one of several servers.
        """
        self.connection.open(register=register)
        index, count = self._place if register else self.connection.ask("slice", {})["place"][:2]
        if count > 1:
            raise ConfigError(f"{self.url} is server {index} of {count}; give the addresses of all, joined by commas")

    def get_parameters(
        self,
        names: Iterable[str] | None = None,
        *,
        min_version: int = 0,
        since: int | None = None,
        out: Mapping[str, Tensor] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Tensor]:
        """See `Client`."""
        fields: Fields = {"min_version": min_version}
        if names is not None:
            fields["names"] = list(names)
        if since is not None:
            fields["since"] = since
        if self._compressor.bfloat16:
            fields["bfloat16"] = True
        deadline = self._deadline(timeout_s)
        raw = None if self._compressor.bfloat16 else out
        while True:
            reply, found = self.connection.pull({**fields, "wait_s": patience(deadline)}, raw, deadline)
            self.version = max(self.version, reply.get("version", 0))
            if not reply.get("pending"):
                return self._compressor.widen(found, out)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"version {min_version} of the parameters did not come in time; the server is at {self.version}"
                )

    def put_parameters(
        self,
        parameters: Mapping[str, Tensor],
        *,
        force: bool = False,
        buffers: Iterable[str] = (),
        sequence: int | None = None,
    ) -> int:
        """See `Client`."""
        tensors = {name: updates.sendable(value) for name, value in parameters.items()}
        fields: Fields = {"worker": self.worker, "force": force, "buffers": list(buffers)}
        if sequence is not None:
            fields["sequence"] = self._number(sequence)
        return int(self.connection.push("put", fields, tensors, self._deadline(None))["version"])

    def update(
        self,
        update: Mapping[str, Tensor],
        *,
        kind: str = "gradient",
        base: int | None = None,
        timeout_s: float | None = None,
        sequence: int | None = None,
        **more: Any,
    ) -> Fields:
        """See `Client`."""
        deadline = self._deadline(timeout_s)
        with self._lock:
            self.connection.open(register=True)
            tensors = {name: updates.sendable(value) for name, value in update.items()}
            if not self._locks and kind == "delta":
                reply = updates.subtract(self.connection, tensors)
            else:
                if self.staleness:
                    updates.await_turn(self.connection, deadline)
                fields: Fields = {"worker": self.worker, "sequence": self._number(sequence), "kind": kind, **more}
                fields["session"] = self.connection.session
                if base is not None:
                    fields["base"] = base
                reply = updates.deliver(self.connection, fields, self._compressor.pack(tensors), deadline)
            self.version = max(self.version, reply["version"])
            return reply

    def last_update(self) -> Fields:
        """See `Client`."""
        return updates.wait(self.connection, self._deadline(None), sequence=self.sequence)

    def status(self) -> Fields:
        """See `Client`."""
        return self.connection.ask("status", {}, self._deadline(None))

    def close(self) -> None:
        """See `Client`."""
        self.connection.close()
