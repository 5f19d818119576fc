"""Several groups that train one model and meet at servers, between steps."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from evenstep.core.errors import ConfigError, Stopped
from evenstep.engine.holdings import Holdings
from evenstep.exchange.tracing import Kind
from evenstep.plan.groups import Standing
from evenstep.run.arrivals import Arrivals
from evenstep.run.servers import Servers

__all__ = ["Groups"]


class Groups:
    """The other groups, as one worker of a group sees them; see `Others`.

    Args:
        holdings: What the group holds.
        standing: Its position among the others.
    """

    def __init__(self, holdings: Holdings, standing: Standing) -> None:
        self._holdings, self._group, self._standing = holdings, holdings.group, standing
        self._met: tuple[Servers, Arrivals] | None = None

    def meet_at(self, servers: Servers, arrivals: Arrivals) -> None:
        """Note where a prepared model is, and how its bundles arrive."""
        self._met = servers, arrivals

    def collect(self) -> None:
        """See `Others`."""
        if self._met is not None:
            _, arrivals = self._met
            arrivals.all()

    def tensors(self) -> dict[str, Tensor]:
        """See `Others`."""
        return self._holdings.state.tensors()

    def level(self, tag: str) -> None:
        """Wait for all groups, then take over the values of the first server group."""
        if self._met is None:
            return
        self.collect()
        if self._standing.groups == 1:
            return
        servers, arrivals = self._met
        self._step_aside(servers)
        if self._group.rank == 0:
            self._meet(servers, f"{tag}: all are here")
            servers.flush()
            if self._standing.group == 0:
                entries = self._holdings.state.entries
                servers.put_buffers({name: entries[name].live for name in self._holdings.models.slots.buffers})
            self._meet(servers, f"{tag}: all is told")
            self._holdings.replace(servers.everything(0))
        self._group.barrier(f"{tag}: one model")
        arrivals.forget()
        self._holdings.pull()
        self._holdings.settle()

    def _meet(self, servers: Servers, tag: str, value: Any = None) -> dict[str, Any]:
        with self._group.tracer.span(Kind.WAIT, "all groups"):
            return servers.meet(tag, value)

    def _step_aside(self, servers: Servers) -> None:
        """Stop being counted until the next update: a group that waits for all others must not hold any back."""
        if self._standing.staleness is not None:
            servers.close()

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """See `Others`."""
        if self._met is None or self._standing.groups == 1:
            return means
        self.collect()
        servers, _ = self._met
        self._step_aside(servers)
        found: dict[str, float] = {}
        if self._group.rank == 0:
            mine = [num_samples, {name: value.hex() for name, value in means.items()}]
            found = merge_means(list(self._meet(servers, f"{tag}: merged", mine).values()))
        shared: dict[str, float] = self._group.gather_json(f"{tag}: merged", found)[0]
        return shared

    def stop_if_asked(self) -> None:
        """Stop here if asked to: a group that waits between steps would wait in vain for others that stop.

        Raises:
            Stopped: The run was asked to stop.
        """
        self._group.check()
        _, _, stop = self._group.board.asked()
        if stop:
            self._group.tell({"stopped": {"step": self._holdings.version, "checkpoint": None}})
            raise Stopped


def merge_means(reports: Sequence[Any]) -> dict[str, float]:
    """Means over all samples, of [number of samples, {name: mean as hex}] of every group that has any.

    Raises:
        ConfigError: Groups report different metrics.
    """
    there = [(count, means) for count, means in reports if count]
    names = sorted(set(chain.from_iterable(means for _, means in there)))
    if any(sorted(means) != names for _, means in there):
        raise ConfigError(f"groups give different metrics: {[sorted(means) for _, means in there]}; expected the same")
    total = sum(count for count, _ in there)
    return {name: sum(count * float.fromhex(means[name]) for count, means in there) / total for name in names}
