"""The options of `evenstep run` for groups and servers."""

import argparse
import os

from evenstep.core.errors import ConfigError
from evenstep.plan.groups import FRAMEWORKS, Setup, choose

__all__ = ["add_arguments", "setup_of"]


def add_arguments(run: argparse.ArgumentParser) -> None:
    """Add the options."""
    options = run.add_argument_group(
        "groups", "Workers of a group step together, exactly; groups do not wait for each other and meet at servers."
    )
    options.add_argument("--groups", metavar="G", type=int, help="number of groups (default: 1)")
    options.add_argument(
        "--workers-per-group", metavar="N", type=int, help="workers of each group (default: the cores, shared out)"
    )
    options.add_argument(
        "--servers", metavar="S", type=int, help="parameter servers in all (default: 1 if there are several groups)"
    )
    options.add_argument(
        "--servers-per-group",
        metavar="T",
        type=int,
        help="servers that hold one copy of the parameters between them (default: S)",
    )
    options.add_argument(
        "--staleness",
        metavar="U",
        type=int,
        help="how many updates a group may be ahead of the slowest (default: any number)",
    )
    options.add_argument(
        "--framework", metavar="NAME", help=f"a classic set-up by name: {', '.join(FRAMEWORKS)}; see docs/groups.md"
    )


def setup_of(options: argparse.Namespace) -> Setup | None:
    """The groups and servers asked for; None if there are none.

    Raises:
        ConfigError: The options make no sense together.
    """
    counts = ("groups", "workers_per_group", "servers", "servers_per_group", "staleness", "framework")
    if all(getattr(options, name) is None for name in counts):
        return None
    workers = options.workers_per_group
    if options.workers is not None:
        if workers is not None or (options.groups or 1) > 1:
            raise ConfigError(
                f"-n {options.workers} with --groups or --workers-per-group: with groups, give only --workers-per-group"
            )
        workers = None if options.workers == "auto" else _number(options.workers)
    setup = choose(
        options.framework,
        groups=options.groups,
        workers=workers,
        servers=options.servers,
        servers_per_group=options.servers_per_group,
        staleness=options.staleness,
        cores=len(os.sched_getaffinity(0)),
    )
    if options.workers is not None and setup.groups > 1:
        raise ConfigError(f"-n {options.workers} with {setup.groups} groups: use --workers-per-group instead")
    if setup.servers and options.resume:
        raise ConfigError("--resume with servers: what they hold is in no checkpoint; resume without servers")
    if setup.servers and options.listen is not None:
        raise ConfigError("--listen with --groups: groups run on one machine so far; use only one of them")
    return setup


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number of workers; expected a whole number above 0, or auto") from None
