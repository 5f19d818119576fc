"""A worker that meets the others only at a server: each is a group of one.

A worker that died and is started again by the launcher runs its script from the beginning. With asynchronous updates,
those that its earlier life has sent are skipped: it goes on with the batch after them, from the server's parameters. A
synchronous update needs what died with the worker, so the run ends with an error (`aggregated.py` avoids all this).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from evenstep.core.env import Environment
from evenstep.core.errors import UnsupportedError
from evenstep.core.events import send
from evenstep.engine.compute import Samples
from evenstep.engine.holdings import Holdings
from evenstep.engine.reports import Report
from evenstep.engine.results import Mean, Results, ShardResult, merge
from evenstep.engine.slots import spanning_layers
from evenstep.engine.updates import Feature
from evenstep.nn.features.layer import Partitioned
from evenstep.plan.placement import cut
from evenstep.run.names import bare, bare_names, compare, full
from evenstep.run.refusals import WITH_SERVERS, refuse
from evenstep.run.server import Server

__all__ = ["Apart", "Some"]

_sent_before: dict[str, int] = {}  # how many updates earlier lives of this process's workers have sent, by name


class Apart:
    """A worker among others that are not in its group; see `Others` for what the facade uses.

    Args:
        holdings: What a group of one holds.
        server: Which server, and how.
        env: Which worker this is, of how many.

    Attributes:
        client: The connection.
        worker: The number of this worker.
        shards: The shards that it trains on.
        last: The results of its shards in its last step, or in the last one that an earlier life has sent.

    Raises:
        ConfigError: The server has another staleness.
        UnreachableError: No server is there.
        UnsupportedError: This worker was started again, and synchronous updates need what it had before.
    """

    def __init__(self, holdings: Holdings, server: Server, env: Environment) -> None:
        self._holdings, self._server = holdings, server
        self.worker, self._num_workers = env.worker, env.num_workers
        self.shards = cut(holdings.config.shards, env.num_workers)[env.worker]
        self.last: dict[int, ShardResult] = {self.shards[0]: ShardResult(Mean(0.0, 1.0), False, {})}
        self.client = server.connect(_name(env), holdings.config.timeout_s)
        try:
            self._left_out = self._look_back(env)
        except BaseException:
            self.client.close()
            raise

    def _look_back(self, env: Environment) -> int:
        """How many updates an earlier life of this worker has sent, which the script will reach again."""
        if env.job is None or env.events_fd is None:  # nobody starts it again
            return 0
        before = _sent_before.setdefault(self.client.worker, self.client.sequence)
        if before and self._server.staleness == 0:
            send(env.events_fd, {"final": True})
            raise UnsupportedError(
                f"worker {env.worker} died after {before} updates and was started again, but synchronous updates need "
                "what it had; start the run again, or use Server(..., aggregate=True), which replaces workers that die"
            )
        if before:
            self.last = Report.unpack(self.client.last_update()["notes"][0]).results
            said = f"worker {env.worker} is back: the {before} updates that it has sent are left out"
            send(env.events_fd, {"says": said})
        return before

    @property
    def leaves_out(self) -> bool:
        """Whether an earlier life of this worker has already sent the next update."""
        return self._left_out > 0

    def leave_out(self) -> None:
        """Skip an update that an earlier life has sent."""
        self._left_out -= 1
        _sent_before[self.client.worker] -= 1

    def refuse(self, what: Feature) -> None:
        """See `Updates`."""
        if what in ("load", "checkpoint", "edit", "exchange"):
            raise UnsupportedError(
                f"run.{what} in a run with a server would see this worker only: the parameters are the server's, "
                "which keeps them by --snapshot-every or --durable; do that without a server"
            )
        refuse(what, WITH_SERVERS)

    # ---- the model ----

    def admit(self, model: nn.Module) -> None:
        """See `Updates`."""
        if self._holdings.models.slots.parameters:
            raise UnsupportedError(
                "a run through a server trains one model with one optimizer; prepare was called twice"
            )
        spanning = [type(layer) for layer in spanning_layers(list(model.modules()))]
        if spanning and self._num_workers > 1:
            what, remedy = "batch norm", "run.prepare(..., sync_batchnorm=False)"
            if Partitioned in spanning:
                what, remedy = "a layer that is partitioned by features", "leave layers whole"
            raise UnsupportedError(
                f"{what} spans the shards of all workers, but through a server they share gradients only: {remedy}, "
                "or train without a server"
            )

    def join(self) -> None:
        """Take over the server's values; worker 0 puts its own there if it has none yet."""
        slots, state = self._holdings.models.slots, self._holdings.state
        here = bare({name: state.entries[name].live for name in (*slots.parameters, *slots.buffers)})
        if self.worker == 0 and self.client.status()["owner"] is None:
            self.client.put_parameters(here, buffers=bare_names(slots.buffers))
        theirs = self.client.get_parameters()
        compare(here, theirs)
        self.take_over(theirs)
        self._holdings.settle()

    def take_over(self, values: dict[str, Tensor]) -> None:
        """Put the server's values in place of ours."""
        self._holdings.replace(full(values))
        self._holdings.pull()

    def results(self) -> Results:
        """The results of the last step."""
        return merge(self.last, [0] * self._holdings.config.shards)

    def own(self, samples: Samples) -> Samples:
        """A batch of which only this worker's shards count."""
        first, end = self.shards
        return Some(samples, [size if first <= k < end else 0 for k, size in enumerate(samples.sizes)])

    # ---- for the facade ----

    def collect(self) -> None:
        """Nothing to do: parameters are taken over when a step is committed."""

    def level(self, tag: str) -> None:
        """Nothing to do: every worker evaluates what it has."""

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """Return the means of this worker alone."""
        return means

    def tensors(self) -> dict[str, Tensor]:
        """What the server has now."""
        return full(self.client.get_parameters())


@dataclass(frozen=True)
class Some:
    """A batch of which only some shards count."""

    whole: Samples
    sizes: Sequence[int]

    @property
    def name(self) -> str:
        """See `Samples`."""
        return self.whole.name

    @property
    def is_last(self) -> bool:
        """See `Samples`."""
        return self.whole.is_last

    def part(self, shard: int) -> Any:
        """See `Samples`."""
        return self.whole.part(shard)

    def check(self) -> None:
        """See `Samples`."""
        self.whole.check()

    def contents(self, *, alone: bool = False) -> dict[str, str]:
        """See `Samples`."""
        return self.whole.contents(alone=alone)


def _name(env: Environment) -> str:
    """The name of this worker: the same in all its lives in one job, and unique to that job."""
    return f"worker-{env.worker}" if env.job is None else f"worker-{env.worker}.{env.job}"
