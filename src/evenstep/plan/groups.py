"""How many groups, workers and servers there are, and who talks to whom: five classic set-ups by name, or by counts.

Workers of a group step together, exactly. Groups meet only at servers. Servers form *server groups* too: each holds all
parameters, shared out among its servers, and serves some of the worker groups.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from evenstep.core.errors import ConfigError
from evenstep.plan.placement import balance

__all__ = ["FRAMEWORKS", "Framework", "Setup", "Standing", "bundles_of", "choose"]

MAX_PROCESSES = 256
MAX_BUNDLES = 16


@dataclass(frozen=True)
class Framework:
    """A named set-up.

    Attributes:
        says: A description of it.
        groups: (default, least, most) number of groups.
        servers: (default, least, most) number of servers; a default of None: one server group for each group.
        lock: Whether servers apply updates one after another.
        server_groups: Whether there is a server group for every group, or one for all.
        workers: The default number of workers in a group; None: as many as there are cores for.
    """

    says: str
    groups: tuple[int, int, int]
    servers: tuple[int | None, int, int]
    lock: bool = True
    server_groups: Literal["one", "each"] = "one"
    workers: int | None = None


FRAMEWORKS = {
    "sandblaster": Framework("one group, parameters on servers of their own", (1, 1, 1), (2, 1, MAX_PROCESSES)),
    "allreduce": Framework("one group whose workers are the owners of the parameters", (1, 1, 1), (0, 0, 0)),
    "downpour": Framework("groups that do not wait for each other, one server group", (2, 2, 256), (1, 1, 256)),
    "hogwild": Framework(
        "groups that change one shared memory without a lock", (2, 1, 256), (1, 1, 1), lock=False, workers=1
    ),
    "distributed-hogwild": Framework(
        "groups with a server group each, which tell each other what they changed",
        (2, 2, 256),
        (None, 2, 256),
        server_groups="each",
        workers=1,
    ),
}
"""The frameworks by name."""


@dataclass(frozen=True)
class Setup:
    """The groups, workers and servers of a run; every count is checked.

    Attributes:
        framework: The name it was chosen by, if any.
        groups: Worker groups.
        workers: Workers of each group.
        servers: Servers in all; 0: the workers of the one group own the parameters themselves.
        servers_per_group: Servers of each server group.
        staleness: How many updates a group may be ahead of the slowest; None: any number.
        lock: False: groups change parameters in shared memory by themselves.
    """

    framework: str | None
    groups: int
    workers: int
    servers: int
    servers_per_group: int
    staleness: int | None = None
    lock: bool = True

    @property
    def server_groups(self) -> int:
        """How many server groups there are."""
        return self.servers // self.servers_per_group if self.servers else 0

    def server_group_of(self, group: int) -> int:
        """Which server group a worker group talks to: neighbours share one."""
        return group // (self.groups // self.server_groups)

    def describe(self) -> str:
        """The set-up as one sentence."""
        head = f"{self.framework}: " if self.framework else ""
        text = f"{head}{_count(self.groups, 'group')} of {_count(self.workers, 'worker')}"
        if not self.servers:
            return text + ", which own the parameters; no server"
        text += f", {_count(self.servers, 'server')}"
        if self.server_groups > 1:
            text += f" in {self.server_groups} groups that tell each other their updates"
        if not self.lock:
            text += ", updates in shared memory without a lock"
        elif self.groups > 1:
            bound = "any number of" if self.staleness is None else f"at most {self.staleness}"
            text += f", a group may be {bound} updates ahead"
        return text


@dataclass(frozen=True)
class Standing:
    """The position of a worker's group among the groups of a run that meet at servers.

    Attributes:
        group: Which group this is.
        groups: How many there are.
        server_group: Which server group it talks to.
        servers: The addresses of all servers, by server group: {"tcp": ..., "memory": ...}.
        staleness: How many updates a group may be ahead of the slowest; None: any number.
        lock: False: groups change parameters in shared memory by themselves.
        token: For the servers.
    """

    group: int
    groups: int
    server_group: int
    servers: list[list[dict[str, str]]]
    staleness: int | None
    lock: bool
    token: str

    def text(self) -> str:
        """The form in which its workers find it in their environment."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "Standing":
        """The inverse of `text`.

        Raises:
            ConfigError: The text cannot be read.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"EVENSTEP_STANDING cannot be read ({error}); start groups with `evenstep run --groups`"
            ) from None


def choose(
    framework: str | None = None,
    *,
    groups: int | None = None,
    workers: int | None = None,
    servers: int | None = None,
    servers_per_group: int | None = None,
    staleness: int | None = None,
    cores: int = 1,
) -> Setup:
    """Make a set-up from a name, from counts, or from both if they agree.

    Raises:
        ConfigError: A count makes no sense, or contradicts the name.
    """
    if framework is not None and framework not in FRAMEWORKS:
        raise ConfigError(f"--framework {framework}, expected one of {', '.join(FRAMEWORKS)}")
    named = FRAMEWORKS.get(framework or "")
    if named is not None:
        groups = _within(framework, "--groups", groups, named.groups)
        if named.servers[0] is None and servers is None:
            servers = groups * (servers_per_group or 1)
        servers = _within(framework, "--servers", servers, (named.servers[0] or 0, *named.servers[1:]))
        if named.server_groups == "each" and servers_per_group is None and servers % groups == 0:
            servers_per_group = servers // groups
    groups = 1 if groups is None else groups
    if workers is None:
        workers = (named and named.workers) or max(cores // max(groups, 1), 1)
    servers = int(groups > 1) if servers is None else servers
    per_group = max(servers, 1) if servers_per_group is None else servers_per_group
    setup = Setup(framework, groups, workers, servers, per_group, staleness, named.lock if named else True)
    _check(setup, named)
    return setup


def _within(framework: str | None, option: str, value: int | None, allowed: tuple[int, int, int]) -> int:
    default, least, most = allowed
    if value is None:
        return default
    if not least <= value <= most:
        expected = f"{least}" if least == most else f"{least} to {most}"
        says = FRAMEWORKS[framework or ""].says
        raise ConfigError(
            f"{option} {value} contradicts --framework {framework} ({says}): expected {expected}; leave one of them out"
        )
    return value


def _check(setup: Setup, named: Framework | None) -> None:
    counts = {
        "--groups": setup.groups,
        "--workers-per-group": setup.workers,
        "--servers-per-group": setup.servers_per_group,
    }
    for option, value in counts.items():
        if value < 1:
            raise ConfigError(f"{option} {value}, expected a whole number above 0")
    if setup.servers < 0:
        raise ConfigError(f"--servers {setup.servers}, expected a whole number that is not negative")
    if setup.groups * setup.workers + setup.servers > MAX_PROCESSES:
        raise ConfigError(f"{setup.describe()}: expected at most {MAX_PROCESSES} workers and servers in all")
    if not setup.servers:
        if setup.groups > 1:
            raise ConfigError(f"{setup.groups} groups but no server: groups meet only at servers; add --servers 1")
        if setup.staleness is not None:
            raise ConfigError(
                f"--staleness {setup.staleness} without a server; leave it out: one group is always in step"
            )
        return
    _check_servers(setup, named)


def _check_servers(setup: Setup, named: Framework | None) -> None:
    if setup.servers % setup.servers_per_group:
        raise ConfigError(
            f"--servers {setup.servers} cannot be cut into groups of --servers-per-group {setup.servers_per_group}"
        )
    if setup.groups % setup.server_groups:
        raise ConfigError(
            f"{setup.groups} groups cannot be shared out evenly among {setup.server_groups} server groups; "
            "expected a multiple"
        )
    wanted = {"one": 1, "each": setup.groups}[named.server_groups] if named else setup.server_groups
    if setup.server_groups != wanted:
        raise ConfigError(
            f"--framework {setup.framework} has {_count(wanted, 'server group')}, but --servers {setup.servers} and "
            f"--servers-per-group {setup.servers_per_group} make {setup.server_groups}"
        )
    if setup.staleness is not None:
        if setup.staleness < 1:
            raise ConfigError(
                f"--staleness {setup.staleness}, expected a number of updates above 0; groups that wait for each other "
                "in every batch are one group"
            )
        if setup.groups == 1 or setup.server_groups > 1 or not setup.lock:
            raise ConfigError(
                f"--staleness {setup.staleness} is for several groups at one server group with a lock; found "
                f"{setup.describe()}"
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def bundles_of(layers: Sequence[int], num_servers: int) -> tuple[list[range], list[int]]:
    """Cut a model into bundles that travel separately, and give each a server.

    A bundle is a layer; of more than `MAX_BUNDLES` layers, neighbours are joined into bundles of similar size.

    Args:
        layers: The bytes of each layer, in the order of the model.
        num_servers: Servers in a server group.

    Returns:
        The layers of every bundle, and the server of every bundle.
    """
    ranges: list[range] = []
    begin, passed, total = 0, 0, max(sum(layers), 1)
    for end, size in enumerate(layers, 1):
        passed += size
        left = len(layers) - end  # layers that follow: each may have a bundle of its own if there are few
        full = passed * MAX_BUNDLES >= total * (len(ranges) + 1)
        if len(layers) <= MAX_BUNDLES or full or left == 0:
            ranges.append(range(begin, end))
            begin = end
    sizes = [sum(layers[k] for k in bundle) for bundle in ranges]
    return ranges, balance(sizes, num_servers)
