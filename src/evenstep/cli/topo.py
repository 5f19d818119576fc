"""`evenstep topo`: how devices are connected, here or in a file, and how the tree lies over them."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.core.config import DEFAULT_SHARDS
from evenstep.core.errors import ConfigError
from evenstep.picture import text
from evenstep.plan import planner
from evenstep.plan.layout import Layout
from evenstep.plan.pairing import pair_devices
from evenstep.plan.steps import StepCosts, predict_step
from evenstep.plan.topology import Topology
from evenstep.topology import from_text, read_file, read_machine, to_json

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser"]

_MOST_SHARDS = 1_000_000
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def add_parser(commands: "Commands") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "topo",
        help="show how devices are connected and how the tree lies over them",
        description="Show how the devices of this machine, or of those in a file, are connected, and how the tree over "
        "shards lies over them. Where it lies changes the time of a step and no bit of its result.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="read the machines from a JSON file, or from the text of `nvidia-smi topo -m` (- is standard input)",
    )
    source.add_argument(
        "--measure", action="store_true", help="measure the links between worker processes on the cores of this machine"
    )
    source.add_argument(
        "--simulate", metavar="FILE", help="compare ways to reduce on the machines of a file, as --from reads it"
    )
    parser.add_argument("--devices", metavar="NAME,NAME,...", help="only these, in this order (default: all)")
    parser.add_argument(
        "--shards", metavar="K", type=int, help=f"shards to lay out (default: {DEFAULT_SHARDS}, or one for each device)"
    )
    parser.add_argument(
        "--bytes", metavar="N", default="100M", help="size of the gradients, such as 250M or 2G (default: 100M)"
    )
    _add_costs(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write FILE.svg or FILE.json")
    parser.set_defaults(command=_topo)


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard-seconds",
        metavar="S",
        type=float,
        help="with --simulate: how long a shard takes; predicts a whole step",
    )
    parser.add_argument(
        "--meetings", metavar="N", type=int, default=4, help="how often all meet in a step (default: 4; 2 a batch norm)"
    )
    parser.add_argument(
        "--message-seconds", metavar="S", type=float, default=1e-4, help="what a message costs (default: 1e-4)"
    )


def _topo(options: argparse.Namespace) -> int:
    num_bytes = _num_bytes(options.bytes)
    _check(options)
    topology = _read(options)
    devices = _devices(topology, options.devices)
    num_shards = max(DEFAULT_SHARDS, len(devices)) if options.shards is None else options.shards
    if options.simulate is not None:
        _simulate(options, topology, num_shards, num_bytes)
        if options.out is None:
            return 0
    layout = planner.lay(topology, num_shards, devices, num_bytes)
    if options.simulate is None:
        print(text.matrix(topology))
        print("\n" + text.tree(topology, layout))
        print("\n" + text.pairs(topology, pair_devices(topology, devices)))
    if options.out is not None:
        _write(options.out, topology, layout)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check what can be checked before any machine is read."""
    if options.out is not None and options.out.suffix not in (".svg", ".json"):
        raise ConfigError(f"--out {options.out}, expected a name that ends in .svg or .json")
    if options.shards is not None and not 1 <= options.shards <= _MOST_SHARDS:
        raise ConfigError(f"--shards {options.shards}, expected a whole number from 1 to {_MOST_SHARDS}")
    if options.shard_seconds is not None and options.simulate is None:
        raise ConfigError("--shard-seconds predicts a step on the machines of a file: give it with --simulate FILE")


def _simulate(options: argparse.Namespace, topology: Topology, num_shards: int, num_bytes: float) -> None:
    if options.devices is not None:
        raise ConfigError("--simulate compares plans over all devices; leave out --devices")
    print(f"{text.counts(topology)}, {num_shards} shards, {text.quantity(num_bytes, 'B')} of gradients\n")
    print(text.plans(planner.compare(topology, num_shards, num_bytes)))
    if options.shard_seconds is not None:
        print("\n" + text.step(predict_step(topology, num_shards, num_bytes, _costs(options))))


def _costs(options: argparse.Namespace) -> StepCosts:
    for name in ("shard_seconds", "message_seconds", "meetings"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}, expected a number of at least 0")
    return StepCosts(options.shard_seconds, options.meetings, options.message_seconds)


def _read(options: argparse.Namespace) -> Topology:
    if options.measure:
        from evenstep.topology.measure import measure  # here: importing torch takes seconds

        return measure()
    source = options.simulate if options.source is None else options.source
    if source is None:
        return read_machine()
    if source != "-":
        return read_file(Path(source))
    try:
        return from_text(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise ConfigError("standard input is not text; give it a JSON file of machines") from error


def _devices(topology: Topology, names: str | None) -> list[int]:
    if names is None:
        return list(range(topology.num_devices))
    numbers = {name: number for number, name in enumerate(topology.names)}
    wanted = names.split(",")
    for name in wanted:
        if name not in numbers:
            raise ConfigError(f"--devices names {name!r}, expected some of {', '.join(topology.names[:16])}")
    return [numbers[name] for name in wanted]


def _num_bytes(words: str) -> float:
    unit = words[-1:] if words[-1:] in ("k", "M", "G", "T") else ""
    try:
        number = float(words.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--bytes {words}, expected a number above 0 such as 250M or 2G")
    return number


def _write(path: Path, topology: Topology, layout: Layout) -> None:
    if path.suffix == ".svg":
        from evenstep.picture.machines import draw_topology

        content = draw_topology(topology, layout)
    else:
        content = json.dumps({**to_json(topology), "plan": _plan(topology, layout)}, indent=1)
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    print(f"\nwritten: {path}")


def _plan(topology: Topology, layout: Layout) -> dict[str, Any]:
    names = topology.names
    return {
        "shards": layout.num_shards,
        "devices": [
            {"device": names[device], "shards": list(span)}
            for device, span in zip(layout.order, layout.spans, strict=True)
        ],
        "moves": [
            [{"shards": list(m.node), "from": names[m.source], "to": names[m.target]} for m in moves]
            for moves in layout.rounds()
        ],
    }
