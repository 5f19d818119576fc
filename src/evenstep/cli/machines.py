"""Runs over several machines: `evenstep run --listen` and `evenstep join`."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.arithmetic import settings
from evenstep.core.config import ARITHMETICS, MAX_SHARDS
from evenstep.core.errors import ConfigError
from evenstep.core.importing import importing

if TYPE_CHECKING:
    from evenstep.launch.door import Listen

__all__ = ["add_arguments", "add_join", "listen_of"]


def add_arguments(run: argparse.ArgumentParser) -> None:
    """Add the options of a head."""
    options = run.add_argument_group("several machines")
    options.add_argument(
        "--listen", metavar="HOST:PORT", help="be the head of a run that other machines join, by `evenstep join`"
    )
    options.add_argument("--machines", metavar="M", type=int, help="start when this many are there, including this one")
    options.add_argument(
        "--token-file", metavar="FILE", type=Path, help="holds a secret that every machine must know (not on loopback)"
    )
    options.add_argument("--between", metavar="BACKEND", help="what moves bytes: gloo (default), nccl, mpi or ucc")
    options.add_argument(
        "--silence", metavar="SECONDS", type=float, help="give up a machine that is silent for this long (default: 2)"
    )
    options.add_argument("--certfile", metavar="FILE", type=Path, help="TLS for the control connection")
    options.add_argument("--keyfile", metavar="FILE", type=Path, help="its key")


def listen_of(options: argparse.Namespace) -> "Listen | None":
    """How other machines join, if they can.

    Raises:
        ConfigError: The options do not fit together.
    """
    names = ("machines", "token_file", "between", "silence", "certfile", "keyfile")
    given = [name for name in names if getattr(options, name) is not None]
    if options.listen is None:
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} is for several machines: add --listen HOST:PORT")
        return None
    for name, value in (("--machines", options.machines), ("--silence", options.silence)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} {value:g}, expected a number above 0")
    from evenstep.launch.door import Listen, read_token, split_address

    host, port = split_address(options.listen, "--listen")
    found: dict[str, Any] = {
        "machines": options.machines,
        "between": options.between,
        "silence_s": options.silence,
        "certfile": options.certfile,
        "keyfile": options.keyfile,
    }
    chosen = {name: value for name, value in found.items() if value is not None}
    return Listen(host, port, read_token(options.token_file), **chosen)


def add_join(commands: Any) -> None:
    """Add the command by which other machines join."""
    join = commands.add_parser(
        "join",
        help="add the workers of this machine to a run on another",
        description="Add the workers of this machine to the run of a head, at any time; no bit of the result changes. "
        "The head's script must be here too, under the same path.",
    )
    join.add_argument("head", metavar="HOST:PORT", help="where the head listens")
    join.add_argument("-n", "--workers", metavar="N", type=int, help="number of workers (default: one for each core)")
    join.add_argument("--token-file", metavar="FILE", type=Path, help="holds the secret of the head")
    join.add_argument("--cafile", metavar="FILE", type=Path, help="TLS: the certificate that signed the head's")
    join.add_argument(
        "--wait", metavar="SECONDS", type=float, default=30.0, help="how long to wait for the head (default: 30)"
    )
    join.add_argument(
        "--rejoin",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="when the head is lost, try this long to join it again (default: end)",
    )
    join.add_argument("--arithmetic", choices=ARITHMETICS, help="as the head's")
    join.set_defaults(command=_join)


def _join(options: argparse.Namespace) -> int:
    count = options.workers if options.workers is not None else len(os.sched_getaffinity(0))
    if not 1 <= count <= MAX_SHARDS:
        raise ConfigError(f"-n {count}, expected a whole number from 1 to {MAX_SHARDS}")
    for name, value in (("--wait", options.wait), ("--rejoin", options.rejoin)):
        if value < 0:
            raise ConfigError(f"{name} {value:g}, expected a number that is not negative")
    settings.choose(options.arithmetic)
    with importing():
        from evenstep.launch.agent import join  # here: importing torch takes seconds, a typo should not
        from evenstep.launch.door import read_token

    token = read_token(options.token_file)
    return join(options.head, count, token=token, cafile=options.cafile, wait_s=options.wait, rejoin_s=options.rejoin)
