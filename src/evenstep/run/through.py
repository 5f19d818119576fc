"""Whether and how a run goes through a server: one value, and what all engines that do so need."""

from dataclasses import dataclass
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.server.client.addresses import connect
from evenstep.server.client.client import Client

__all__ = ["Through", "options_of"]


@dataclass(frozen=True)
class Through:
    """Whether a run goes through a server, and how.

    Attributes:
        sync: "exchange" or "server".
        server: Its address.
        staleness: What the server was started with.
        update_every: Batches between two updates, or "epoch".
        token: For the server.
        aggregate: Whether the workers of this machine send one update together; None: if they are synchronous.
    """

    sync: str = "exchange"
    server: str | None = None
    staleness: int | None = 0
    update_every: int | str = 1
    token: str | None = None
    aggregate: bool | None = None

    def check(self) -> None:
        """See that it makes sense.

        Raises:
            ConfigError: It does not.
        """
        if self.sync not in ("exchange", "server"):
            raise ConfigError(f"sync={self.sync!r}, expected 'exchange' or 'server'")
        if (self.sync == "server") != (self.server is not None):
            raise ConfigError('sync="server" and server="http://..." go together: say both, or neither')
        every = self.update_every
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise ConfigError(f"update_every={every!r}, expected a number of batches above 0, or 'epoch'")
        if every != 1 and self.server is None:
            raise ConfigError(f'update_every={every!r} is for sync="server": without a server every batch is an update')
        if self.aggregate is not None and self.server is None:
            raise ConfigError(
                f'aggregate={self.aggregate!r} is for sync="server": without a server all add up together'
            )
        if self.aggregate and every != 1:
            raise ConfigError(f"aggregate=True sends the update of every batch; update_every={every!r} does not")

    @property
    def together(self) -> bool:
        """Whether the workers of this machine are one worker to the server."""
        wanted = self.aggregate if self.aggregate is not None else self.staleness == 0 and self.update_every == 1
        return self.server is not None and wanted

    def connect(self, worker: str, timeout_s: float) -> Client:
        """Connect to the server.

        Raises:
            ConfigError: It has another staleness.
            UnreachableError: Nobody is there.
        """
        assert self.server is not None, "it goes with sync"
        client = connect(self.server, worker=worker, token=self.token, timeout_s=timeout_s)
        if client.staleness != self.staleness:
            client.close()
            raise ConfigError(
                f"the server at {self.server} has staleness {client.staleness} but the script says "
                f"Run(staleness={self.staleness}); it decides what the arithmetic is, so both must say the same"
            )
        return client


def options_of(prepared: PreparedOptimizer) -> list[dict[str, Any]]:
    """The options that an optimizer steps with, without what schedulers note beside them."""
    known = prepared.optimizer.defaults
    return [{key: value for key, value in group.items() if key in known} for group in prepared.hyperparameters()]
