"""Machines and plans for a terminal: the matrix of links, the tree over devices, a table of plans."""

from collections.abc import Iterator, Sequence

from evenstep.plan.crowd import Crowd
from evenstep.plan.layout import Layout
from evenstep.plan.planner import Plan
from evenstep.plan.steps import StepPrediction
from evenstep.plan.topology import Link, LinkKind, Topology

__all__ = ["counts", "matrix", "pairs", "plans", "quantity", "shard_words", "step", "tree"]

_SHOWN = 32
_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "\u00b5"))


def quantity(value: float, unit: str) -> str:
    """A figure with three digits and a prefix, such as 12.5 GB/s."""
    smallest = (1e-9, "n") if value else (1.0, "")
    size, prefix = next(((size, prefix) for size, prefix in _DECIMAL if value >= size), smallest)
    return f"{value / size:.3g} {prefix}{unit}"


def counts(topology: Topology) -> str:
    """How many devices and machines, in words."""
    devices, machines = topology.num_devices, len(topology.machines)
    return f"{devices} device{'s'[: devices > 1]} on {machines} machine{'s'[: machines > 1]}"


def matrix(topology: Topology) -> str:
    """The links between all devices, or only the machines of a large topology; then the speeds of each kind of link."""
    names = topology.names
    lines = [counts(topology)]
    if topology.num_devices <= _SHOWN:
        width = max(*(len(name) for name in names), 7)
        head = max(map(len, names))
        lines += ["", " " * head + "".join(f"  {name:>{width}}" for name in names)]
        for a, name in enumerate(names):
            kinds = ["." if a == b else str(topology.link(a, b).kind) for b in range(len(names))]
            lines.append(f"{name:<{head}}" + "".join(f"  {kind:>{width}}" for kind in kinds))
    return "\n".join([*lines, "", *_links(topology)])


def _links(topology: Topology) -> Iterator[str]:
    links = _used(topology)
    for kind in sorted(links, key=list(LinkKind).index):
        speeds, latencies = ([f(link) for link in links[kind]] for f in (_speed, lambda link: link.latency_s))
        yield f"{kind:<8}  {_range(speeds, 'B/s'):>24}  {_range(latencies, 's'):>20}"


def _used(topology: Topology) -> dict[LinkKind, set[Link]]:
    """The links that exist, by kind."""
    found: dict[LinkKind, set[Link]] = {}
    seen = set()
    for machine in topology.machines:
        if (machine.devices, machine.links) in seen:
            continue
        seen.add((machine.devices, machine.links))
        crowd = Crowd(machine, dict.fromkeys(range(len(machine.devices)), 1))
        for place in range(len(machine.devices)):
            for what, count in crowd.around(place):
                if count:
                    link = topology.usual(what) if isinstance(what, LinkKind) else what
                    found.setdefault(link.kind, set()).add(link)
    racks = [machine.rack for machine in topology.machines]
    if len(set(racks)) < len(racks):
        found[LinkKind.NETWORK] = {topology.usual(LinkKind.NETWORK)}
    if len(set(racks)) > 1:
        found[LinkKind.SPINE] = {topology.usual(LinkKind.SPINE)}
    return found


def _speed(link: Link) -> float:
    return link.bandwidth_bytes_per_s


def _range(values: Sequence[float], unit: str) -> str:
    low, high = quantity(min(values), unit), quantity(max(values), unit)
    return low if low == high else f"{low} .. {high}"


def shard_words(first: int, end: int) -> str:
    """Shards in words: shard 3, shards 0-7."""
    return f"shard {first}" if end - first == 1 else f"shards {first}-{end - 1}"


def tree(topology: Topology, layout: Layout) -> str:
    """The tree as it lies over the devices, from the root down to what one device holds alone."""
    if len(layout.order) > _SHOWN:
        return f"a tree over {layout.num_shards} shards on {len(layout.order)} devices"
    return "\n".join(_branch(topology, layout, (0, layout.num_shards), None, "", ""))


def _branch(
    topology: Topology, layout: Layout, node: tuple[int, int], above: int | None, head: str, rest: str
) -> Iterator[str]:
    """A node and what is under it.

    Args:
        topology: The machines.
        layout: Where the shards lie.
        node: The node.
        above: The device of the node above it.
        head: The beginning of its own line.
        rest: The beginning of the lines below.
    """
    first, end = node
    device = layout.holder(first)
    way = (
        "" if above is None or above == device else f"   {topology.link(device, above).kind} to {topology.names[above]}"
    )
    yield f"{head}{shard_words(first, end)} on {topology.names[device]}{way}"
    if layout.holder(end - 1) != device:
        middle = first + (1 << ((end - first - 1).bit_length() - 1))
        yield from _branch(topology, layout, (first, middle), device, rest + "\u251c\u2500 ", rest + "\u2502  ")
        yield from _branch(topology, layout, (middle, end), device, rest + "\u2514\u2500 ", rest + "   ")


def pairs(topology: Topology, found: Sequence[tuple[int | None, int]]) -> str:
    """Caffe's pairs, parent:child in the order of pairing."""
    names = topology.names
    root = names[found[0][1]]
    if len(found) > _SHOWN:
        return f"Caffe's root: {root}"
    words = [f"{names[parent]}:{names[child]}" for parent, child in found if parent is not None]
    return f"Caffe's root: {root}" + (f", and pairs: {' '.join(words)}" if words else "")


def plans(found: Sequence[Plan]) -> str:
    """A table of plans, the fastest first; bits that depend on the number of devices are marked."""
    width = max(len(plan.name) for plan in found)
    lines = [f"{'plan':<{width}}  {'predicted':>10}  {'over slow links':>15}  same bits"]
    for plan in found:
        seconds, slow = quantity(plan.prediction.seconds, "s"), quantity(plan.prediction.slow_bytes, "B")
        lines.append(f"{plan.name:<{width}}  {seconds:>10}  {slow:>15}  {'yes' if plan.exact else 'no'}")
    return "\n".join(lines)


def step(found: StepPrediction) -> str:
    """What a step of a run is predicted to take, and what that consists of."""
    parts = ", ".join(
        f"{quantity(seconds, 's')} {what}"
        for seconds, what in (
            (found.compute_s, "computing"),
            (found.gradients_s, "for gradients that computing does not hide"),
            (found.meetings_s, "in meetings"),
        )
    )
    return f"a step of a run: {quantity(found.seconds, 's')} ({parts})"
