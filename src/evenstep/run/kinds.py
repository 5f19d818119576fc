"""Which kind of run this is: what becomes of its updates, and which others train its model."""

from typing import NamedTuple

from evenstep.core.config import RunConfig
from evenstep.core.env import Environment
from evenstep.core.errors import UnsupportedError
from evenstep.engine.holdings import Holdings
from evenstep.engine.step import Engine
from evenstep.engine.updates import OwnUpdates, Updates
from evenstep.exchange.ledger import Ledger
from evenstep.plan.groups import Standing
from evenstep.run.aggregated import AggregatedUpdates
from evenstep.run.apart import Apart
from evenstep.run.grouped import GroupedUpdates
from evenstep.run.others import Nobody, Others
from evenstep.run.periodic import PeriodicUpdates
from evenstep.run.served import ServedUpdates
from evenstep.run.server import Server

__all__ = ["RunKind", "choose", "open_engine"]


class RunKind(NamedTuple):
    """What differs between one kind of run and another."""

    updates: Updates
    others: Others


def choose(holdings: Holdings, server: Server | None, standing: Standing | None, env: Environment) -> RunKind:
    """Choose by what the script and the launcher say; connects to the server if there is one.

    Args:
        holdings: What the workers hold.
        server: Which server the script wants, if any, and how.
        standing: The position of the group among others, if the launcher has started servers.
        env: Which worker this is.

    Raises:
        ConfigError: The server has another staleness.
        UnreachableError: No server is there.
        UnsupportedError: This worker was started again, in a kind of run that cannot recover from that.
    """
    if holdings.group.puts is not None:
        _check_machines(holdings, with_servers=standing is not None or server is not None)
    if standing is not None:
        grouped = GroupedUpdates(holdings, standing)
        return RunKind(grouped, grouped.others)
    if server is None:
        return RunKind(OwnUpdates(holdings.group), Nobody(holdings))
    if server.together:
        return RunKind(AggregatedUpdates(holdings, server), Nobody(holdings))
    apart = Apart(holdings, server, env)
    if server.update_every == 1:
        return RunKind(ServedUpdates(holdings, apart), apart)
    return RunKind(PeriodicUpdates(holdings, apart, server.update_every), apart)


def open_engine(
    config: RunConfig, ledger: Ledger, server: Server | None, standing: Standing | None, env: Environment
) -> tuple[Engine, Others]:
    """An engine for this kind of run, and the others that train its model; raises as `choose` does."""
    holdings = Holdings(config, ledger)
    updates, others = choose(holdings, server, standing, env)
    try:
        return Engine(holdings, updates), others
    except BaseException:
        updates.close()
        raise


def _check_machines(holdings: Holdings, *, with_servers: bool) -> None:
    """Check that a run can have several machines.

    Raises:
        UnsupportedError: It cannot.
    """
    if with_servers:
        raise UnsupportedError(
            "workers of several machines add up their gradients among themselves; with a parameter server, start each "
            "machine's workers by themselves (without --listen), and let them meet at the server"
        )
    if not holdings.memory.shared:
        raise UnsupportedError(
            f"device={holdings.config.device!r} on several machines: so far only their processors train together; use "
            'device="cpu", or one machine'
        )
