"""What talks to a parameter server: `connect(url)` and the verbs, with patience.

A client that loses its server says so, tries again with growing pauses, and gives up after `timeout_s`. An update has a
number, so one that was sent twice is applied once. While a client that has registered lives, a thread of its own tells
the server so from time to time.
"""

import logging
import os
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError, UnreachableError
from evenstep.server.channels import Channel, Fields, HttpChannel, TcpChannel
from evenstep.server.compress import Compressor
from evenstep.server.memory import MemoryChannel

__all__ = ["Client", "connect"]

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_ASK_AGAIN_S = 5.0  # the server answers a longer wait with "not yet"
_SILENCE_S = 60.0
log = logging.getLogger("evenstep.server")


def connect(
    url: str,
    *,
    worker: str | None = None,
    token: str | None = None,
    timeout_s: float = 60.0,
    cafile: str | None = None,
    bfloat16: bool = False,
    top_k: float | None = None,
    register: bool = True,
) -> "Client":
    """Connect to one server; see `connecting.connect`."""
    parts = urlsplit(url)
    context = None
    if parts.scheme in ("https", "tcps"):
        try:
            context = ssl.create_default_context(cafile=cafile)
        except OSError as error:
            raise ConfigError(f"cafile={cafile!r} cannot be read: {error}") from error
    if parts.scheme in ("http", "https", "tcp", "tcps") and parts.port is not None:
        kind = HttpChannel if parts.scheme.startswith("http") else TcpChannel
        client = Client(url, lambda: kind(parts, token, context, _SILENCE_S), worker, timeout_s)
    elif parts.scheme == "memory":
        client = Client(url, lambda: MemoryChannel(parts, token, _SILENCE_S), worker, timeout_s)
    else:
        raise ConfigError(f"{url!r} is no address of a server; expected http://host:port, tcp://... or memory://name")
    client._compressor = Compressor(bfloat16, top_k)
    try:
        client._call(lambda _: None, register=register)
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """A worker's connection to a server. May be used from several threads; one request at a time.

    Attributes:
        url: Where the server is.
        worker: What this worker calls itself.
        staleness: What the server says; see `ParameterServer`.
        version: The newest version that this client has heard of.
        place: Which of several servers this one is: [number, of how many, of which set, whether parameters are cut].
    """

    def __init__(self, url: str, open_channel: Callable[[], Channel], worker: str | None, timeout_s: float) -> None:
        self.url = url
        self.worker = worker or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.timeout_s = timeout_s
        self.staleness: int | None = 0
        self.version = 0
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._sequence = 0
        self._session = secrets.token_hex(8)  # tells this life of the worker from others under its name
        self.place: list[Any] = [0, 1, "", True]
        self._registered = False
        self._locked = True
        self._lost = False
        self._compressor = Compressor(False, None)
        self._over = threading.Event()
        self._beat: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Parameters of one version, by name. Waits until they were put, and have at least a version.

        Args:
            names: Which ones; None for all.
            min_version: At least this version.
            since: Only those that changed after this version.
            out: Tensors to put the values into, instead of new ones.
            timeout_s: How long to wait.

        Raises:
            UnreachableError: The server is gone, or the version did not come in time.
            RefusedError: There is no such parameter.
            ConfigError: A tensor in `out` has another shape or dtype.
        """
        fields: Fields = {"min_version": min_version}
        if names is not None:
            fields["names"] = list(names)
        if since is not None:
            fields["since"] = since
        if self._compressor.bfloat16:
            fields["bfloat16"] = True
        deadline = self._deadline(timeout_s)
        raw = None if self._compressor.bfloat16 else out

        def pull(channel: Channel) -> tuple[Fields, dict[str, Tensor]]:
            return channel.pull({**fields, "wait_s": _patience(deadline)}, raw)

        while True:
            reply, found = self._call(pull, deadline)
            self.version = max(self.version, reply.get("version", 0))
            if not reply.get("pending"):
                return self._compressor.widen(found, out)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"version {min_version} of the parameters did not come in time; the server is at {self.version}"
                )

    @property
    def sequence(self) -> int:
        """The number of the last update under this worker's name."""
        return self._sequence

    def _number(self, sequence: int | None) -> int:
        """The number of what is sent next: the next one, or what the caller says."""
        self._sequence = self._sequence + 1 if sequence is None else sequence
        return self._sequence

    def put_parameters(
        self,
        parameters: Mapping[str, Tensor],
        *,
        force: bool = False,
        buffers: Iterable[str] = (),
        sequence: int | None = None,
    ) -> int:
        """Give the parameters their values; return the version.

        Args:
            parameters: All of them.
            force: Replace values that are there.
            buffers: Which of them the optimizer does not train.
            sequence: As for `update_parameters`.

        Raises:
            RefusedError: They have values already, and `force` is not set.
        """
        tensors = {name: _plain(value) for name, value in parameters.items()}
        fields = {"worker": self.worker, "force": force, "buffers": list(buffers)}
        if sequence is not None:
            fields["sequence"] = self._number(sequence)
        return int(self._call(lambda channel: channel.push("put", fields, tensors))["version"])

    def update_parameters(
        self,
        update: Mapping[str, Tensor],
        *,
        kind: str = "gradient",
        samples: int = 1,
        base: int | None = None,
        timeout_s: float | None = None,
        **more: Any,
    ) -> int:
        """Send an update; return the version that it made. Blocks until it is applied.

        Args:
            update: Gradients, or deltas, by parameter.
            kind: "gradient": the server's optimizer steps. "delta": weights before minus after, to be subtracted.
            samples: How many samples this is a mean over; its weight in a synchronous update.
            base: Which version it was computed from; a synchronous server refuses any but its own.
            timeout_s: How long to wait for the other workers.
            **more: Further fields: tree nodes, buffers, a note; `sequence`, the number of this update if it is not
                just the next one: an update that was sent under this number before is not applied again; `options`,
                what the server's optimizer steps with from this update on, as a list with a dict for each group.

        Raises:
            RefusedError: The server does not want it; it was not applied.
            UnreachableError: The server is gone, or other workers did not come in time.
        """
        return int(self.update(update, kind=kind, samples=samples, base=base, timeout_s=timeout_s, **more)["version"])

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
        """As `update_parameters`, but returns everything that the server says."""
        deadline = self._deadline(timeout_s)
        with self._lock:
            self._register()
            tensors = {name: _plain(value) for name, value in update.items()}
            if not self._locked and kind == "delta":
                return self._change(tensors)
            self._await_turn(deadline)
            fields: Fields = {"worker": self.worker, "sequence": self._number(sequence), "kind": kind, **more}
            fields["session"] = self._session
            if base is not None:
                fields["base"] = base
            return self._deliver(fields, self._compressor.pack(tensors), deadline)

    def _deliver(self, fields: Fields, packed: Mapping[str, Tensor], deadline: float) -> Fields:
        """Send an update, and again if the server has lost it, until it is applied."""
        sequence, again = fields["sequence"], True
        while again:
            reply = self._call(
                lambda channel: channel.push("update", {**fields, "wait_s": _patience(deadline)}, packed),
                deadline, register=True,
            )  # fmt: skip
            again = False
            while reply.get("pending") and not again:
                if time.monotonic() >= deadline:
                    raise UnreachableError(f"update {sequence} of '{self.worker}' waits for other workers in vain")
                try:
                    reply = self._wait(deadline, sequence=sequence)
                except RefusedError as error:
                    if error.status != 404:
                        raise
                    again = True  # it was started anew meanwhile, and knows only what had been applied
        self.version = max(self.version, reply["version"])
        return reply

    def _await_turn(self, deadline: float) -> None:
        """Wait until this worker is not too far ahead."""
        while self.staleness:
            if not self._wait(deadline).get("pending"):
                return
            if time.monotonic() >= deadline:
                raise UnreachableError(f"worker '{self.worker}' waits for slower workers in vain")

    def _wait(self, deadline: float, **which: int) -> Fields:
        fields = {"worker": self.worker, "wait_s": _patience(deadline), **which}
        return self._call(lambda channel: channel.ask("wait", fields), deadline, register=True)

    def _change(self, deltas: Mapping[str, Tensor]) -> Fields:
        """Subtract in shared memory, without asking."""

        def change(channel: Channel) -> Fields:
            if not isinstance(channel, MemoryChannel):
                raise RefusedError("a server with lock=False takes updates through shared memory only", 409)
            channel.change(deltas)
            return channel.ask("changed", {"worker": self.worker, "names": list(deltas)})

        reply = self._call(change, register=True)
        self.version = max(self.version, reply["version"])
        return reply

    def last_update(self) -> Fields:
        """What the server said to the last update under this worker's name, whoever sent it."""
        return self._wait(self._deadline(None), sequence=self._sequence)

    def wait(self, version: int, timeout_s: float | None = None) -> int:
        """Wait until the parameters have at least a version; return theirs."""
        self.get_parameters([], min_version=version, timeout_s=timeout_s)
        return self.version

    def status(self) -> Fields:
        """Everything that the server shows of itself."""
        return self._call(lambda channel: channel.ask("status", {}))

    def close(self) -> None:
        """Leave, if registered, and end the connection."""
        self._over.set()
        if self._beat is not None:
            self._beat.join()
            self._beat = None
        with self._lock:
            try:
                if self._registered and self._channel is not None:
                    self._channel.ask("leave", {"worker": self.worker})
            except (OSError, RefusedError):
                log.debug("the server was gone before '%s' could leave", self.worker)
            self._registered = False
            self._drop()

    # ---- patience ----

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _call(self, action: Callable[[Channel], T], deadline: float | None = None, *, register: bool = False) -> T:
        """Do something on the connection; make a new one, and try again, until the deadline."""
        deadline = self._deadline(None) if deadline is None else deadline
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                found = self._try(action, register)
            except RefusedError as error:
                if error.status != 503 and not (error.status == 410 and register):
                    raise
                reason: Exception = error
            except OSError as error:
                reason = error
                if not self._lost:
                    log.warning("lost the server %s (%s): trying again", self.url, str(error))
                    self._lost = True
            else:
                if self._lost:
                    log.warning("the server %s is back", self.url)
                    self._lost = False
                return found
            if time.monotonic() + pause_s > deadline or self._over.wait(pause_s * random.uniform(0.5, 1.0)):
                raise UnreachableError(f"the server {self.url} cannot be reached: {reason}") from reason
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(self, action: Callable[[Channel], T], register: bool) -> T:
        with self._lock:
            try:
                if self._channel is None:
                    self._channel = self._open_channel()
                if register and not self._registered:
                    self._introduce(self._channel)
                return action(self._channel)
            except RefusedError as error:
                if error.status == 410:
                    self._registered = False  # dropped: register anew
                raise
            except BaseException:
                self._drop()  # whatever it was, an answer may still be on its way
                raise

    def _register(self) -> None:
        if not self._registered:
            self._call(lambda _: None, register=True)

    def _introduce(self, channel: Channel) -> None:
        reply = channel.ask("register", {"worker": self.worker, "session": self._session})
        self._registered = True
        self.place = reply["place"]
        self._sequence = max(self._sequence, reply["sequence"])
        self.staleness, self._locked, self.version = reply["staleness"], reply["lock"], reply["version"]
        if self._beat is None:
            self._beat = threading.Thread(
                target=self._live, args=(reply["lease_s"] / 4,), name="evenstep-lease", daemon=True
            )
            self._beat.start()

    def _live(self, every_s: float) -> None:
        """Tell the server from time to time that this worker lives; over a connection of its own."""
        channel: Channel | None = None
        while not self._over.wait(every_s):
            try:
                channel = channel or self._open_channel()
                if self._registered:
                    channel.ask("register", {"worker": self.worker, "session": self._session})
            except (OSError, RefusedError):
                if channel is not None:
                    channel.close()
                channel = None
        if channel is not None:
            channel.close()

    def _drop(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that can be sent as it lies in memory."""
    if tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous():
        return tensor
    return tensor.detach().cpu().contiguous()


def _patience(deadline: float) -> float:
    return max(min(deadline - time.monotonic(), _ASK_AGAIN_S), 0.0)
