"""What must be the same or fit together for a run to begin; each mismatch is reported in one sentence."""

from types import FrameType
from typing import Any

from evenstep.arithmetic import settings
from evenstep.core.config import RunConfig
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError
from evenstep.engine.determinism import profile
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.plan.groups import Standing
from evenstep.run.server import Server

__all__ = ["agree", "check_arithmetic", "find_standing"]


def find_standing(env: Environment, server: Server | None) -> Standing | None:
    """The position of the group among others, if the launcher has started servers.

    Raises:
        ConfigError: The script names a server too.
    """
    if not env.standing:
        return None
    if server is not None:
        raise ConfigError(
            f"the command line starts servers, but the script says Run(server={server.address!r}): give one of the two"
        )
    return Standing.of(env.standing)


def check_arithmetic(config: RunConfig, env: Environment, caller: FrameType, *, served: bool) -> None:
    """Make sure that the run gets the arithmetic it wants, if need be by starting the script again.

    Args:
        config: The run's settings.
        env: What its environment says.
        caller: The frame that makes the run.
        served: Whether a server changes the parameters.

    Raises:
        ConfigError: It cannot have it.
    """
    if config.arithmetic == "native":
        return
    if served:
        raise ConfigError(
            "arithmetic='portable' with a parameter server, whose optimizer computes as its own processor is fastest; "
            "leave out the server, or use arithmetic='native'"
        )
    settings.insist(caller, env)


def agree(ledger: Ledger, config: RunConfig, worker: int) -> None:
    """The first operation: check that all workers are set up alike. All workers must call this alike.

    Raises:
        ConfigError: One of them differs.
    """

    def attempt() -> Entry:
        of_all = ledger.group.gather_json("join", profile(config))
        for other, theirs in zip(ledger.group.members, of_all, strict=True):
            _compare(other, theirs, of_all[0])
        return Entry("join", of_all[0])

    def adopt(entry: Entry, took_part: bool) -> None:
        if not took_part:
            _compare(worker, profile(config), entry.value)

    ledger.perform(Operation("join", 0), attempt, adopt)


def _compare(worker: int, mine: dict[str, Any], first: dict[str, Any]) -> None:
    for key, value in mine.items():
        if value != first[key]:
            unlike = ", or with arithmetic='portable' on unlike processors" if key == "processor" else ""
            raise ConfigError(
                f"worker {worker} has {key}={value!r} but worker 0 has {first[key]!r}; "
                f"all workers must run the same script on the same kind of machine{unlike}"
            )
