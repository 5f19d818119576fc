"""One message for a machine: clients of a relay are one worker to the server behind it.

A relay is a synchronous server on the clients' machine. When all of them have contributed, it adds up what they sent,
sends that on as one contribution, and serves the parameters that come back. Means are weighted by sample counts, and
their sum goes on with the number of all samples. Tree nodes are merged as far as the tree allows, so that the server
ends on the bits that it would have without the relay.

A relay keeps nothing on the disk: when it is gone, its clients are without a server.
"""

from types import TracebackType
from typing import Any

from torch import Tensor

from evenstep.core.errors import EvenstepError, ServerError
from evenstep.server.checks import check_contribution
from evenstep.server.config import ServerConfig
from evenstep.server.connecting import connect
from evenstep.server.options import Options
from evenstep.server.rounds import Contribution, Round
from evenstep.server.single import SingleServer
from evenstep.server.state import Applied
from evenstep.server.store import Store

__all__ = ["Relay"]


class Relay:
    """Adds up what the workers of this machine send, and sends it on. A context manager: starts, and stops.

    Args:
        server: The address of the server, or of several.
        workers: How many workers of this machine make one contribution.
        token: What the server printed, if it wants one. Clients of the relay need it too.
        worker: What the relay calls itself at the server.
        transports: By which its clients reach it.
        timeout_s: How long to wait for the server, and there for other workers.

    Raises:
        UnreachableError: The server is not there, or nothing was put to it.
    """

    def __init__(
        self,
        server: str,
        workers: int,
        *,
        token: str | None = None,
        worker: str | None = None,
        transports: tuple[str, ...] = ("memory",),
        timeout_s: float = 60.0,
    ) -> None:
        self._config = ServerConfig(workers=workers, transports=transports, token=token)
        self._client = connect(server, worker=worker, token=token, timeout_s=timeout_s)
        try:
            store = _RelayStore(self._config.options(), self._client)
            self._single = SingleServer(self._config, token, (None, None), store=store)
        except BaseException:
            self._client.close()
            raise

    @property
    def url(self) -> str:
        """Where the workers of this machine connect to."""
        return next(iter(self._single.urls.values()))

    def start(self) -> None:
        """Begin to serve."""
        self._single.start()

    def close(self) -> None:
        """Stop for good, and leave the server."""
        self._single.close()
        self._client.close()

    def __enter__(self) -> "Relay":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RelayStore(Store):
    """A store whose updates are made elsewhere."""

    def __init__(self, options: Options, client: Any) -> None:
        super().__init__(options)
        self._client = client
        values, status = client.get_parameters(), client.status()
        self.put(values, str(status["owner"]), buffers=[n for n, p in status["parameters"].items() if p["buffer"]])
        self.state.version = client.version
        self._has_optimizer = status["optimizer"] is not None

    def _check_part(self, kind: str, part: Contribution) -> None:
        """A gradient is for the optimizer of the server behind; all else is as for a delta."""
        as_kind = "delta" if kind == "gradient" and self._has_optimizer else kind
        check_contribution(self.state, as_kind, part, finite=self.options.reject_nonfinite)

    def _complete(self) -> None:
        """Send what all have contributed."""
        parts = self._round.parts
        if len(parts) < self.options.workers or not self.workers.registered.keys() <= parts.keys():
            return
        round_, sequences, sessions = self._round, self._sequences, self._sessions
        self._round, self._sequences, self._sessions = Round(), {}, {}
        try:
            version, notes = self._send_on(round_)
            values = self._client.get_parameters(min_version=version)
        except EvenstepError as error:
            self._broken = f"the server behind it did not take the update: {error}"
            self._changed.notify_all()
            raise ServerError(self._broken) from error
        applied = Applied("put", self._client.version, values, {}, sequences, notes, sessions=sessions)
        self.replay(applied)

    def _send_on(self, round_: Round) -> tuple[int, list[Any]]:
        first = next(iter(round_.parts.values()))
        buffers, notes = round_.buffers(), round_.notes()
        more: dict[str, Any] = {"kind": round_.kind, "buffers": list(buffers), "options": round_.options()}
        update: dict[str, Tensor] = dict(buffers)
        if first.num_shards is None:
            update |= round_.total()
            more["samples"] = sum(part.samples for part in round_.parts.values())
        else:
            nodes = round_.merged()
            more |= {"shards": first.num_shards, "spans": [list(span) for span, _ in nodes]}
            for (a, b), held in nodes:
                update |= {f"{a}-{b}/{name}": tensor for name, tensor in held.items()}
        if any(note is not None for note in notes):
            more["note"] = notes
        more = {key: value for key, value in more.items() if value is not None}
        reply = self._client.update(update, **more)
        found = reply.get("notes", [])
        return int(reply["version"]), [note for of_machine in found for note in (of_machine or [])]
