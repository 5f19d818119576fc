"""The parameter server of a run: everything that a script says about it, as one value."""

from dataclasses import dataclass
from typing import Any, Literal

from evenstep.core.errors import ConfigError
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.server.client.addresses import connect
from evenstep.server.client.client import Client

__all__ = ["Server", "options_for_server"]


@dataclass(frozen=True)
class Server:
    """A parameter server at which the workers of a run meet: it holds the parameters and their optimizer.

    Args:
        address: Where it is, such as "http://127.0.0.1:7000".
        staleness: The staleness of the server. With 0 the result is that of a run without a server, to the bit.
        update_every: Batches between two updates, or "epoch". With more than one batch each worker trains on its own in
            between, with the optimizer that it prepares, and sends what that changed; the server then needs none.
        token: The server's token.
        aggregate: Whether the workers of this machine add up their gradients and send one update, so that they are one
            worker to the server. None: only if `staleness` is 0 and every batch is an update, when it changes no bit.

    Raises:
        ConfigError: An argument makes no sense.
    """

    address: str
    staleness: int | None = 0
    update_every: int | Literal["epoch"] = 1
    token: str | None = None
    aggregate: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise ConfigError(f"Server({self.address!r}); expected an address such as 'http://127.0.0.1:7000'")
        every = self.update_every
        if every != "epoch" and (not isinstance(every, int) or every < 1):
            raise ConfigError(f"update_every={every!r}, expected a number of batches above 0, or 'epoch'")
        if self.aggregate and every != 1:
            raise ConfigError(f"aggregate=True sends the update of every batch; update_every={every!r} does not")

    @staticmethod
    def of(said: "Server | str | None") -> "Server | None":
        """The server that a script names, by value or by address.

        Raises:
            ConfigError: It is something else.
        """
        if said is None or isinstance(said, Server):
            return said
        if not isinstance(said, str):
            raise ConfigError(f"Run(server={said!r}); expected an evenstep.Server, or its address")
        return Server(said)

    @property
    def together(self) -> bool:
        """Whether the workers of this machine are one worker to the server."""
        return self.aggregate if self.aggregate is not None else self.staleness == 0 and self.update_every == 1

    def connect(self, worker: str, timeout_s: float) -> Client:
        """Connect to the server.

        Raises:
            ConfigError: It has another staleness.
            UnreachableError: No server is there.
        """
        client = connect(self.address, worker=worker, token=self.token, timeout_s=timeout_s)
        if client.staleness != self.staleness:
            client.close()
            raise ConfigError(
                f"the server at {self.address} has staleness {client.staleness} but the script says "
                f"Server(..., staleness={self.staleness}); it decides what the arithmetic is, so both must say the same"
            )
        return client


def options_for_server(prepared: PreparedOptimizer) -> list[dict[str, Any]]:
    """The options that an optimizer steps with, without those that schedulers add."""
    known = prepared.optimizer.defaults
    return [{key: value for key, value in group.items() if key in known} for group in prepared.hyperparameters()]
