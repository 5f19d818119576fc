"""The client of several servers that hold slices of one model; it behaves like that of one.

An update goes to the followers, then to server 0, which decides, then the decision goes to the followers. A get asks
all servers at once; those that answer with an older version than another are asked again for the newer one. If updates
come so fast that this does not end, server 0 is asked to pause for a moment.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError, ServerError, UnreachableError
from evenstep.server.client import updates
from evenstep.server.client.channels import Fields
from evenstep.server.client.client import Client
from evenstep.server.client.compress import Compressor
from evenstep.server.client.connection import Connection, Registration, patience
from evenstep.server.wire.slices import LAYOUT, Slices, check_places
from evenstep.server.wire.tensors import ParameterLayout, Spec

__all__ = ["SlicedClient"]

T = TypeVar("T")
_TRIES = 4  # to read one version from all, before server 0 is asked to pause
_SOON_S = 0.05  # how long a follower may lag behind before it is told what it missed


class SlicedClient(Client):
    """A worker's view of several servers. See `Client`.

    Args:
        connections: To each server, in order; taken over.
        compressor: What is done to updates before they are cut.
    """

    def __init__(self, connections: Sequence[Connection], compressor: Compressor) -> None:
        first = connections[0]
        url = ",".join(connection.url for connection in connections)
        super().__init__(url, first.worker, first.timeout_s, compressor)
        self.connections, self._leader, self._session = list(connections), first, first.session
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(len(connections), "evenstep-client")
        self._slices: Slices | None = None
        self._at = [-1] * len(connections)  # the versions that the servers are known to have
        self._split, self._registers = True, False
        for connection in connections:
            connection.on_registered = partial(self._on_registered, connection is first)

    # ---- who is there ----

    def open(self, *, register: bool) -> None:
        """See who is there.

        Args:
            register: Be counted among the workers, here and from now on.

        Raises:
            ConfigError: These are not all the servers of one set, in order.
        """
        deadline = self._deadline(None)
        self._each(lambda n, connection: connection.open(deadline, register=register))
        abouts = self._each(lambda n, connection: connection.ask("slice", {}, deadline))
        check_places([connection.url for connection in self.connections], [about["place"] for about in abouts])
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
            self._slices = Slices(ParameterLayout(specs), len(self.connections), split=self._split)
            if self._slices.fingerprint != about["fingerprint"]:
                raise ServerError(f"{self.url} cut the parameters otherwise than this client; use the same version")
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
        with self._lock:
            found = self._read(slices, wanted, pieces, min_version, since, deadline)
        return whole if since is None else {name: whole[name] for name in wanted if name in found}

    def _read(
        self,
        slices: Slices,
        wanted: Sequence[str],
        pieces: Sequence[dict[str, Tensor]],
        min_version: int,
        since: int | None,
        deadline: float,
    ) -> set[str]:
        """Read the pieces of one version; return which parameters came."""
        asked = [n for n in range(slices.count) if pieces[n] or not wanted]
        came: dict[int, set[str]] = {}
        late, wish = asked, min_version
        for tries in count():
            paused = tries >= _TRIES
            if paused:
                late, wish = asked, max(wish, self._pause(True, deadline))
            try:
                pull = partial(self._pull, pieces, wish, since, deadline)
                found = self._each(pull, late)
            finally:
                if paused:
                    self._pause(False, deadline)
            came.update(zip(late, found, strict=True))
            newest = max(self._at[n] for n in asked)
            late, wish = [n for n in asked if self._at[n] < newest], newest
            if not late or not self._locks:
                self.version = max(self.version, newest)
                return {piece.parameter for n in asked for piece in slices.pieces[n] if piece.name in came[n]}
            if time.monotonic() >= deadline:
                break
        raise UnreachableError(f"no version could be read from all of {self.url}: updates come too fast")

    def _pull(
        self,
        wanted: Sequence[dict[str, Tensor]],
        wish: int,
        since: int | None,
        deadline: float,
        n: int,
        connection: Connection,
    ) -> set[str]:
        """Read from one server what has at least a version; tell it what it missed, if it does not have it soon."""
        pieces, patience_s = wanted[n], _SOON_S if n else math.inf
        while True:
            wait_s = min(patience(deadline), patience_s)
            fields: Fields = {"names": list(pieces), "min_version": wish, "wait_s": wait_s}
            if since is not None:
                fields["since"] = since
            if self._compressor.bfloat16:
                fields["bfloat16"] = True
            reply, found = self._fill(connection, fields, pieces, deadline)
            if not reply.get("pending"):
                self._at[n] = int(reply["version"])
                return set(found)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"version {wish} of the parameters did not come in time; the server is at {reply['version']}"
                )
            if n:
                self._spread(deadline, [n], patient=False)
                patience_s *= 2

    def _fill(
        self, connection: Connection, fields: Fields, pieces: dict[str, Tensor], deadline: float
    ) -> tuple[Fields, dict[str, Tensor]]:
        if not self._compressor.bfloat16:
            return connection.pull(fields, pieces, deadline)
        reply, found = connection.pull(fields, None, deadline)
        return reply, {name: pieces[name].copy_(value) for name, value in found.items()}

    def _pause(self, on: bool, deadline: float) -> int:
        return int(self._leader.ask("pause", {"on": on}, deadline)["version"])

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
            len(self.connections),
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
            self._stage([{**each, "kind": "put"} for each in fields], cut, deadline)
            put = {**fields[0], "staged": slices.count}
            version = int(self._leader.push("put", put, cut[0], deadline)["version"])
            self._spread(deadline)
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
            self._each(lambda n, connection: connection.open(register=True))
            self._registers = True
            tensors = {name: updates.sendable(value) for name, value in update.items()}
            if self._slices is None and self._leader.ask("slice", {}, deadline).get("fingerprint") is None:
                raise RefusedError("nothing was put yet, so there is nothing to update", 409)
            slices = self._layout(deadline)
            if not self._locks and kind == "delta":
                parts = slices.cut(tensors)
                replies = self._each(lambda n, connection: updates.subtract(connection, parts[n]))
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
            each.pop("note", None)  # only server 0 answers with it
        self._stage(fields, cut, deadline)
        last: Fields = {**fields[0], "staged": slices.count, "since": min(self._at[1:])}
        if base is not None:
            last["base"] = base
        reply = updates.deliver(self._leader, last, cut[0], deadline)
        self.version = max(self.version, reply["version"])
        said = {key: reply.pop(key) for key in ("newest", "order", "alive")}
        self._spread(deadline, said=said, restage=lambda: self._stage(fields, cut, deadline))
        return reply

    def _stage(self, fields: Sequence[Fields], cut: Sequence[dict[str, Tensor]], deadline: float) -> None:
        """Have all followers keep an update."""

        def stage(n: int, connection: Connection) -> None:
            reply = connection.push("stage", fields[n], cut[n], deadline, register=self._registers)
            self._at[n] = int(reply["version"])

        self._each(stage, range(1, len(self.connections)))

    def _spread(
        self,
        deadline: float,
        which: Sequence[int] | None = None,
        *,
        said: Fields | None = None,
        restage: Callable[[], None] | None = None,
        patient: bool = True,
    ) -> bool:
        """Tell followers what server 0 has decided, and wait until it is applied there.

        Args:
            deadline: How long to wait.
            which: Which followers; all if None.
            said: What server 0 has said already.
            restage: Sends this client's own update again, should a follower have lost it.
            patient: False: tell them once, and do not wait.

        Returns:
            Whether they have applied it.
        """
        late = list(range(1, len(self.connections))) if which is None else list(which)
        while late:
            said = said or self._leader.ask("order", {"since": min(self._at[n] for n in late)}, deadline)
            wait_s = max(min(deadline - time.monotonic(), _SOON_S * 4), 0.0) if patient else 0.0
            newest, told = int(said["newest"]), {"order": said["order"], "alive": said["alive"], "wait_s": wait_s}

            def tell(n: int, connection: Connection) -> bool:
                reply = connection.ask("order", told, deadline)  # noqa: B023  # it is done before the next turn
                self._at[n] = int(reply["version"])
                return self._at[n] < newest  # noqa: B023  # likewise

            late = [n for n, behind in zip(late, self._each(tell, late), strict=True) if behind]
            said = None
            if late and not patient:
                return False
            if late and time.monotonic() >= deadline:
                raise UnreachableError(f"server {late[0]} of {self.url} misses an update that server 0 has applied")
            if late and restage is not None:
                restage()
        return True

    def last_update(self) -> Fields:
        """See `Client`."""
        return updates.wait(self._leader, self._deadline(None), sequence=self.sequence)

    def settle(self, timeout_s: float) -> None:
        """Bring all servers to the version of server 0.

        Raises:
            UnreachableError: One of them misses an update.
        """
        self._spread(self._deadline(timeout_s))

    def status(self) -> Fields:
        """Server 0's, with the parameters of all, and under "servers" what each says of itself."""
        found = self._each(lambda n, connection: connection.ask("status", {}))
        added_up = ("num_bytes", "received_bytes", "sent_bytes")
        merged = {**found[0], **{key: sum(status[key] for status in found) for key in added_up}}
        merged["servers"] = [
            {
                "url": connection.url,
                **{key: status[key] for key in ("version", "num_bytes", "copies", "broken", "requests")},
            }
            for connection, status in zip(self.connections, found, strict=True)
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
        for connection in self.connections:
            connection.close()
        self._pool.shutdown()

    # ---- all at once ----

    def _each(self, action: Callable[[int, Connection], T], which: Iterable[int] | None = None) -> list[T]:
        """Do something with several servers at once; in this thread with the first of them."""
        first, *others = range(len(self.connections)) if which is None else which or [-1]
        if first < 0:
            return []
        futures = [self._pool.submit(action, n, self.connections[n]) for n in others]
        try:
            found = [action(first, self.connections[first])]
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [*found, *(future.result() for future in futures)]
