"""The client of several servers that hold slices of one model; it behaves like the client of one.

An update goes to the followers, then to server 0, which decides, then the decision goes to the followers.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError, ServerError, UnreachableError
from evenstep.server.client import updates
from evenstep.server.client.channels import Fields
from evenstep.server.client.client import Client
from evenstep.server.client.compress import Compressor
from evenstep.server.client.connection import Connection, Registration, patience
from evenstep.server.client.server_set import ServerSet
from evenstep.server.wire.slices import LAYOUT, Slices, check_places
from evenstep.server.wire.tensors import ParameterLayout, Spec

__all__ = ["SlicedClient"]


class SlicedClient(Client):
    """A worker's view of several servers. See `Client`.

    Args:
        connections: Connections to each server, in order; taken over.
        compressor: Compresses updates before they are cut.

    Attributes:
        servers: All of them.
    """

    def __init__(self, connections: Sequence[Connection], compressor: Compressor) -> None:
        self.servers, first = ServerSet(connections), connections[0]
        super().__init__(self.servers.url, first.worker, first.timeout_s, compressor)
        self._leader, self._session = first, first.session
        self._lock = threading.RLock()
        self._slices: Slices | None = None
        self._split, self._registers = True, False
        for connection in connections:
            connection.on_registered = partial(self._on_registered, connection is first)

    # ---- who is there ----

    def open(self, *, register: bool) -> None:
        """Connect, and check which servers these are.

        Args:
            register: Whether to be counted among the workers.

        Raises:
            ConfigError: These are not all the servers of one set, in order.
        """
        deadline = self._deadline(None)
        self.servers.each(lambda n, connection: connection.open(deadline, register=register))
        abouts = self.servers.each(lambda n, connection: connection.ask("slice", {}, deadline))
        check_places([connection.url for connection in self.servers.connections], [about["place"] for about in abouts])
        self._split, self._locks = abouts[0]["place"][3], abouts[0]["lock"]
        self._registers = register

    def _on_registered(self, leads: bool, said: Registration) -> None:
        self.sequence = max(self.sequence, said.sequence)
        if leads:
            self.staleness, self._locks, self.version = said.staleness, said.locks, max(self.version, said.version)

    def _layout(self, deadline: float) -> Slices:
        """How the parameters lie over the servers; waits until they were put."""
        if self._slices is None:
            while self._leader.pull({"names": [], "wait_s": patience(deadline)}, None, deadline)[0].get("pending"):
                if time.monotonic() >= deadline:
                    raise UnreachableError(f"nothing was put to {self.url} in time")
            about = self._leader.ask("slice", {"layout": True}, deadline)
            specs = Slices.unpack(about["layout"])
            self._slices = Slices(ParameterLayout(specs), len(self.servers.connections), split=self._split)
            if self._slices.fingerprint != about["fingerprint"]:
                raise ServerError(
                    f"{self.url} cuts the parameters differently from this client; use the same version of evenstep"
                )
        return self._slices

    # ---- the verbs ----

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
        deadline = self._deadline(timeout_s)
        slices = self._layout(deadline)
        wanted = list(slices.layout.specs) if names is None else list(dict.fromkeys(names))
        for name in wanted:
            spec = slices.layout.find(name)
            if out is not None and (name not in out or Spec.of(out[name]) != spec or not out[name].is_contiguous()):
                have = Spec.of(out[name]) if name in out else "nothing"
                raise ConfigError(f"out['{name}'] is {have}, expected a contiguous {spec}")
        whole, pieces = slices.room(wanted, out)
        fields: Fields = {"min_version": min_version}
        if since is not None:
            fields["since"] = since
        if self._compressor.bfloat16:
            fields["bfloat16"] = True
        asked = [n for n in range(slices.count) if pieces[n] or not wanted]
        with self._lock:
            came = self.servers.read(pieces, asked, fields, deadline, locked=self._locks)
            self.version = max(self.version, *(self.servers.at[n] for n in asked))
        if since is None:
            return whole
        found = {
            piece.parameter
            for n, names in zip(asked, came, strict=True)
            for piece in slices.pieces[n]
            if piece.name in names
        }
        return {name: whole[name] for name in wanted if name in found}

    def put_parameters(
        self,
        parameters: Mapping[str, Tensor],
        *,
        force: bool = False,
        buffers: Iterable[str] = (),
        sequence: int | None = None,
    ) -> int:
        """See `Client`."""
        deadline = self._deadline(None)
        tensors = {name: updates.sendable(value) for name, value in parameters.items()}
        untrained = set(buffers)
        slices = Slices(
            ParameterLayout({name: Spec.of(value) for name, value in tensors.items()}),
            len(self.servers.connections),
            split=self._split,
        )
        text = torch.frombuffer(bytearray(slices.text), dtype=torch.uint8)
        with self._lock:
            number = self._number(sequence)
            cut = [{**part, LAYOUT: text} for part in slices.cut(tensors)]
            fields = [
                {
                    "worker": self.worker, "session": self._session, "sequence": number, "force": force,
                    "buffers": [piece.name for piece in slices.pieces[n] if piece.parameter in untrained],
                }
                for n in range(slices.count)
            ]  # fmt: skip
            self.servers.stage([{**each, "kind": "put"} for each in fields], cut, deadline, register=self._registers)
            put = {**fields[0], "staged": slices.count}
            version = int(self._leader.push("put", put, cut[0], deadline)["version"])
            self.servers.spread(deadline)
            self.version = max(self.version, version)
            return version

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
            self.servers.each(lambda n, connection: connection.open(register=True))
            self._registers = True
            tensors = {name: updates.sendable(value) for name, value in update.items()}
            if self._slices is None and self._leader.ask("slice", {}, deadline).get("fingerprint") is None:
                raise RefusedError("nothing was put yet, so there is nothing to update", 409)
            slices = self._layout(deadline)
            if not self._locks and kind == "delta":
                parts = slices.cut(tensors)
                replies = self.servers.each(lambda n, connection: updates.subtract(connection, parts[n]))
                self.version = max(self.version, *(reply["version"] for reply in replies))
                return replies[0]
            if self.staleness:
                updates.await_turn(self._leader, deadline)
            buffers = list(more.pop("buffers", []))
            cut = slices.cut(self._compressor.pack(tensors), nodes="shards" in more, buffers=buffers)
            more |= {"kind": kind, "sequence": self._number(sequence)}
            return self._update(slices, base, cut, buffers, more, deadline)

    def _update(
        self,
        slices: Slices,
        base: int | None,
        cut: list[dict[str, Tensor]],
        buffers: list[str],
        more: Fields,
        deadline: float,
    ) -> Fields:
        common = {"worker": self.worker, "session": self._session, **more}
        fields = [{**common, "buffers": slices.names(n, buffers)} for n in range(slices.count)]
        for each in fields[1:]:
            each.pop("note", None)  # only server 0 replies with notes
        stage = partial(self.servers.stage, fields, cut, deadline, register=self._registers)
        stage()
        last: Fields = {**fields[0], "staged": slices.count, "since": min(self.servers.at[1:])}
        if base is not None:
            last["base"] = base
        reply = updates.deliver(self._leader, last, cut[0], deadline)
        self.version = max(self.version, reply["version"])
        said = {key: reply.pop(key) for key in ("newest", "order", "alive")}
        self.servers.spread(deadline, said=said, restage=stage)
        return reply

    def last_update(self) -> Fields:
        """See `Client`."""
        return updates.wait(self._leader, self._deadline(None), sequence=self.sequence)

    def settle(self, timeout_s: float) -> None:
        """Bring all servers to the version of server 0.

        Raises:
            UnreachableError: One of them misses an update.
        """
        self.servers.spread(self._deadline(timeout_s))

    def status(self) -> Fields:
        """The status of server 0, with the parameters of all, and the status of each under "servers"."""
        found = self.servers.each(lambda n, connection: connection.ask("status", {}))
        added_up = ("num_bytes", "received_bytes", "sent_bytes")
        merged = {**found[0], **{key: sum(status[key] for status in found) for key in added_up}}
        merged["servers"] = [
            {
                "url": connection.url,
                **{key: status[key] for key in ("version", "num_bytes", "copies", "broken", "requests")},
            }
            for connection, status in zip(self.servers.connections, found, strict=True)
        ]
        merged["events"] = sorted(
            [at, text if not n else f"server {n}: {text}"]
            for n, status in enumerate(found)
            for at, text in status["events"]
        )
        if merged["owner"] is not None:
            merged["parameters"] = self._layout(self._deadline(None)).join(found)
        return merged

    def close(self) -> None:
        """See `Client`."""
        self.servers.close()
