"""Laying the fixed tree over a topology: near devices become siblings, fast devices get more shards.

All of it is about speed. Whatever is chosen here, the tree over shards is the same, and so are the bits.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, islice, permutations

from evenstep.core.errors import ConfigError
from evenstep.plan import cost
from evenstep.plan.cost import Prediction
from evenstep.plan.layout import Layout
from evenstep.plan.pairing import pair_devices
from evenstep.plan.placement import share
from evenstep.plan.topology import Device, Machine, Topology

__all__ = ["Plan", "compare", "in_order", "lay"]

_SEARCHED = 32  # up to this many devices, small changes are tried
_SWEEPS, _TRIES = 8, 500
_PAIRED = 512  # up to this many devices of one machine are ordered by their links; more, by their places
_USUAL_BYTES = 100e6
Price = tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """A way to reduce, and what it is predicted to cost.

    Attributes:
        name: A description of it.
        exact: Whether it adds in the order of the fixed tree, on any number of devices.
        layout: Where the shards lie.
        prediction: What it costs.
    """

    name: str
    exact: bool
    layout: Layout
    prediction: Prediction


def in_order(topology: Topology, num_shards: int, devices: Sequence[int] | None = None) -> Layout:
    """Shards over devices in the order given, or in that of their numbers, in proportion to their speeds.

    Raises:
        ConfigError: There are more devices than shards, a device is named twice, or there is no such device.
    """
    order = tuple(range(topology.num_devices) if devices is None else devices)
    if len(set(order)) != len(order) or not all(0 <= device < topology.num_devices for device in order):
        raise ConfigError(
            f"devices {list(order)}, expected numbers from 0 to {topology.num_devices - 1}, each named once"
        )
    if not 0 < len(order) <= num_shards:
        raise ConfigError(
            f"{len(order)} devices but {num_shards} shards: every device needs one; use at least as many shards"
        )
    return Layout(order, tuple(share(num_shards, [topology.device(device).speed for device in order])))


def lay(
    topology: Topology, num_shards: int, devices: Sequence[int] | None = None, num_bytes: float = _USUAL_BYTES
) -> Layout:
    """Lay the tree over devices so that siblings are near and few bytes cross slow links.

    Devices are taken machine by machine, and inside a machine in pairs of pairs over the fastest links. If that is
    predicted to be no faster than the order given, the order given stays. With few devices, small changes are tried as
    well, of this order and of shuffled ones. Of two that are equally fast, the one with fewer bytes over slow links is
    chosen.

    Args:
        topology: The machines.
        num_shards: K.
        devices: Which devices take part, or all of them.
        num_bytes: The size of what is summed.

    Raises:
        ConfigError: There are more devices than shards, a device is named twice, or there is no such device.
    """
    given = in_order(topology, num_shards, devices).order

    def price(order: Sequence[int]) -> Price:
        found = cost.tree(topology, in_order(topology, num_shards, order), num_bytes)
        return float(f"{found.seconds:.9g}"), found.slow_bytes  # orders that differ by rounding alone are equally fast

    best = min((given, _near(topology, given)), key=price)
    if len(given) <= _SEARCHED:
        best = _search(best, price)
    return in_order(topology, num_shards, best)


def _search(start: Sequence[int], price: Callable[[Sequence[int]], Price]) -> Sequence[int]:
    """Change an order as long as that improves it; then do the same from shuffled ones, until enough were tried."""
    best, lowest = start, price(start)
    moves = list(_moves(len(start)))
    dice, order, num_tries = random.Random(0), list(start), 0
    while moves and num_tries < _TRIES:
        at, since = price(order), 0
        for move in islice(cycle(moves), _SWEEPS * len(moves)):
            if since == len(moves):
                break
            changed = _moved(order, *move)
            asked = price(changed)
            num_tries, since = num_tries + 1, since + 1
            if asked < at:
                order, at, since = changed, asked, 0
        if at < lowest:
            best, lowest = order, at
        order = dice.sample(start, len(start))
    return best


def _moves(count: int) -> Iterator[tuple[int, int, bool]]:
    """Small changes of an order: (place, place, True to swap the two, False to move the first to the second)."""
    for a, b in permutations(range(count), 2):
        if a < b:
            yield a, b, True
        if abs(a - b) > 1:  # otherwise it is a swap
            yield a, b, False


def _moved(order: Sequence[int], a: int, b: int, swap: bool) -> list[int]:
    found = list(order)
    if swap:
        found[a], found[b] = found[b], found[a]
    else:
        found.insert(b, found.pop(a))
    return found


def compare(topology: Topology, num_shards: int, num_bytes: float) -> list[Plan]:
    """The ways to reduce over all devices of a topology, the fastest first."""
    given, near = in_order(topology, num_shards), lay(topology, num_shards, num_bytes=num_bytes)
    found = [
        Plan("tree, near devices as siblings", True, near, cost.tree(topology, near, num_bytes)),
        Plan("tree, devices in their order", True, given, cost.tree(topology, given, num_bytes)),
        Plan("all-to-all, near devices as siblings", True, near, cost.all_to_all(topology, near, num_bytes)),
        Plan("tree of Caffe's pairs", False, given, cost.transfer_tree(topology, _by_depth(topology), num_bytes)),
        Plan("ring, near devices as neighbours", False, near, cost.ring(topology, near, num_bytes)),
        Plan("ring, devices in their order", False, given, cost.ring(topology, given, num_bytes)),
    ]
    return sorted(found, key=lambda plan: plan.prediction.seconds)


def _by_depth(topology: Topology) -> Iterable[list[tuple[int, int]]]:
    """Caffe's pairs as rounds: a device sends to its parent when it has heard from all its children."""
    ready: dict[int, int] = defaultdict(int)
    rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for parent, child in pair_devices(topology):  # a device's own children come before it is a child itself
        if parent is not None:
            rounds[ready[child]].append((child, parent))
            ready[parent] = max(ready[parent], ready[child] + 1)
    return [rounds[number] for number in sorted(rounds)]


def _near(topology: Topology, devices: Sequence[int]) -> list[int]:
    """Devices so that near ones are neighbours: by rack, by machine, by links; the fastest groups first.

    The fastest come first because a group of 2^n shards that follows larger ones begins where a tree node does.
    """
    racks: dict[str | None, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for device in devices:
        racks[topology.machine_of(device).rack][topology.places[device][0]].append(device)
    orders: dict[tuple[Machine, tuple[int, ...]], list[int]] = {}  # machines of one kind are ordered once

    def inside(machine: int, members: list[int]) -> list[int]:
        places = tuple(topology.places[device][1] for device in members)
        key = (replace(topology.machines[machine], name="", rack=None), places)
        if key not in orders:
            number = {device: index for index, device in enumerate(members)}
            orders[key] = [number[device] for device in _pairs_of_pairs(topology, members)]
        return [members[index] for index in orders[key]]

    def speed(members: Iterable[int]) -> float:
        return sum(topology.device(device).speed for device in members)

    ordered: list[list[int]] = []
    for machines in racks.values():
        groups = _fastest_first([inside(machine, members) for machine, members in machines.items()], speed)
        ordered.append([device for group in groups for device in group])
    return [device for group in _fastest_first(ordered, speed) for device in group]


def _fastest_first(groups: list[list[int]], speed: Callable[[Iterable[int]], float]) -> list[list[int]]:
    return sorted(groups, key=speed, reverse=True)


def _pairs_of_pairs(topology: Topology, devices: Sequence[int]) -> list[int]:
    """Join the nearest two groups, then the nearest of those left, level by level until one group is left."""
    if len(devices) > _PAIRED:
        return sorted(devices, key=lambda number: _place(topology.device(number)))
    groups = [[device] for device in devices]
    while len(groups) > 1:
        distances = sorted(
            (topology.link(groups[a][0], groups[b][0]).seconds(_USUAL_BYTES), a, b)
            for a, b in combinations(range(len(groups)), 2)
        )
        joined: list[list[int]] = []
        taken: set[int] = set()
        for _, a, b in distances:
            if a not in taken and b not in taken:
                taken |= {a, b}
                joined.append(groups[a] + groups[b])
        groups = joined + [group for index, group in enumerate(groups) if index not in taken]
    return groups[0]


def _place(device: Device) -> tuple[int, int, str, str]:
    return device.socket, device.numa, device.switch or "", device.board or ""
