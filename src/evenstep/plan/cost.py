"""How long a reduction takes: a cost model with latency, bandwidth and shared links.

A round of messages takes its longest latency, plus the time of the link that has the most to carry: messages share a
machine's network card, a rack's uplink, the link between two NUMA nodes, and what a device sends or receives. Each
reduction sums a vector over all devices and leaves the result on all of them:

- *tree*: partial sums move up the fixed tree of a layout level by level, and the result down again;
- *all-to-all*: each device owns a part of the vector, gets that part of all partial sums, and sends the result to all;
- *ring*: the usual ring over devices in their order. Its order of additions depends on the number of devices, so it
  cannot give the same bits; it is here for comparison.

Messages are not pipelined through the tree in pieces. The figures are for choosing between plans: only their order
matters.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from evenstep.plan.crowd import Crowd, node_of
from evenstep.plan.layout import Layout
from evenstep.plan.topology import Device, LinkKind, Topology

__all__ = ["Prediction", "all_to_all", "ring", "transfer_tree", "tree"]

_NODES = 32  # in a machine with up to this many, every pair is looked at
_SLOW = (LinkKind.SOCKET, LinkKind.NETWORK, LinkKind.SPINE)


@dataclass(frozen=True)
class Prediction:
    """What a reduction is predicted to cost.

    Attributes:
        seconds: How long it takes.
        crossing: Bytes that cross links of each kind, over all messages.
    """

    seconds: float
    crossing: dict[LinkKind, float]

    @property
    def slow_bytes(self) -> float:
        """Bytes that cross the network or the link between sockets."""
        return sum(self.crossing.get(kind, 0.0) for kind in _SLOW)


class _Round:
    """Messages that go at the same time."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._busy_s: dict[Hashable, float] = defaultdict(float)
        self.latency_s = 0.0
        self.crossing: dict[LinkKind, float] = defaultdict(float)

    @property
    def seconds(self) -> float:
        """How long the round takes."""
        return self.latency_s + max(self._busy_s.values(), default=0.0)

    def occupy(self, resource: Hashable, seconds: float) -> None:
        """Keep a shared link busy."""
        self._busy_s[resource] += seconds

    def send(self, source: int, target: int, num_bytes: float) -> None:
        """A message from one device to another."""
        topology = self._topology
        link = topology.link(source, target)
        (machine, a), (other, b) = topology.places[source], topology.places[target]
        seconds = num_bytes / link.bandwidth_bytes_per_s
        self.latency_s = max(self.latency_s, link.latency_s)
        self.crossing[link.kind] += num_bytes
        if machine != other:
            self.cross_network(machine, other, num_bytes)
        elif link.kind is LinkKind.SOCKET:
            self.cross_sockets(machine, topology.device(source), topology.device(target), seconds)
        else:
            self.occupy((machine, "out of", a), seconds)
            self.occupy((machine, "into", b), seconds)

    def cross_sockets(self, machine: int, source: Device, target: Device, seconds: float) -> None:
        """Messages from one NUMA node to another."""
        self.occupy((machine, "from", source.socket, source.numa, "to", target.socket, target.numa), seconds)

    def cross_network(self, machine: int, other: int, num_bytes: float) -> None:
        """A message between machines: both network cards, and both uplinks if the racks differ."""
        topology = self._topology
        card_s = num_bytes / topology.usual(LinkKind.NETWORK).bandwidth_bytes_per_s
        self.occupy((machine, "out"), card_s)
        self.occupy((other, "in"), card_s)
        rack, other_rack = topology.machines[machine].rack, topology.machines[other].rack
        if rack != other_rack:
            uplink_s = num_bytes / topology.usual(LinkKind.SPINE).bandwidth_bytes_per_s
            self.occupy(("rack", rack, "out"), uplink_s)
            self.occupy(("rack", other_rack, "in"), uplink_s)


def _total(rounds: Iterable[_Round], times: int = 1) -> Prediction:
    crossing: dict[LinkKind, float] = defaultdict(float)
    seconds = 0.0
    for each in rounds:
        seconds += each.seconds
        for kind, num_bytes in each.crossing.items():
            crossing[kind] += num_bytes
    return Prediction(times * seconds, {kind: times * crossing[kind] for kind in LinkKind if crossing[kind]})


def tree(topology: Topology, layout: Layout, num_bytes: float) -> Prediction:
    """Up and down the fixed tree of a layout."""
    return transfer_tree(topology, ([(m.source, m.target) for m in moves] for moves in layout.rounds()), num_bytes)


def transfer_tree(topology: Topology, rounds: Iterable[Iterable[tuple[int, int]]], num_bytes: float) -> Prediction:
    """Up a tree in rounds of (source, target), then down again in the reverse.

    Links are the same in both directions, so the way down costs what the way up does.
    """

    def up() -> Iterator[_Round]:
        for messages in rounds:
            each = _Round(topology)
            for source, target in messages:
                each.send(source, target, num_bytes)
            yield each

    return _total(up(), times=2)


def ring(topology: Topology, layout: Layout, num_bytes: float) -> Prediction:
    """Around the ring of a layout's order, twice, a part of the vector at a time."""
    count = len(layout.order)
    if count == 1:
        return Prediction(0.0, {})
    each = _Round(topology)
    for source, target in pairwise([*layout.order, layout.order[0]]):
        each.send(source, target, num_bytes / count)
    return _total([each], times=2 * (count - 1))


def all_to_all(topology: Topology, layout: Layout, num_bytes: float) -> Prediction:
    """To the owners of equal parts of the vector, and back.

    A device whose span is not one tree node sends several partial sums. Messages of a device leave one after another,
    so their latencies add up. Messages between machines are counted together, not one by one.
    """
    part = num_bytes / len(layout.order)
    num_nodes = {device: layout.num_nodes(place) for place, device in enumerate(layout.order)}
    ones = dict.fromkeys(layout.order, 1)
    inside: dict[int, list[int]] = defaultdict(list)
    for device in layout.order:
        inside[topology.places[device][0]].append(device)
    return _total(_exchange(topology, inside, offers, part) for offers in (num_nodes, ones))


def _exchange(topology: Topology, inside: dict[int, list[int]], offers: dict[int, int], part: float) -> _Round:
    """Every device sends `offers` of its own times `part` bytes to every other."""
    found = _Round(topology)
    latencies: dict[int, float] = {}
    offered = {m: sum(offers[d] for d in devices) for m, devices in inside.items()}
    for machine, devices in inside.items():
        latencies[machine] = _exchange_inside(found, topology, machine, devices, offers, part)
    racks: dict[str | None, list[int]] = defaultdict(list)
    for machine in inside:
        racks[topology.machines[machine].rack].append(machine)
    everyone, all_offered = sum(map(len, inside.values())), sum(offered.values())
    network, spine = topology.usual(LinkKind.NETWORK), topology.usual(LinkKind.SPINE)
    for rack, machines in racks.items():
        in_rack, rack_offered = sum(len(inside[m]) for m in machines), sum(offered[m] for m in machines)
        for m in machines:
            here = len(inside[m])
            found.occupy((m, "out"), offered[m] * (everyone - here) * part / network.bandwidth_bytes_per_s)
            found.occupy((m, "in"), here * (all_offered - offered[m]) * part / network.bandwidth_bytes_per_s)
            found.crossing[LinkKind.NETWORK] += offered[m] * (in_rack - here) * part
            latencies[m] += (in_rack - here) * network.latency_s + (everyone - in_rack) * spine.latency_s
        up, down = rack_offered * (everyone - in_rack) * part, in_rack * (all_offered - rack_offered) * part
        found.occupy(("rack", rack, "out"), up / spine.bandwidth_bytes_per_s)
        found.occupy(("rack", rack, "in"), down / spine.bandwidth_bytes_per_s)
        found.crossing[LinkKind.SPINE] += up
    found.latency_s = max(latencies.values())
    return found


def _exchange_inside(
    found: _Round, topology: Topology, machine: int, devices: list[int], offers: dict[int, int], part: float
) -> float:
    """The messages inside a machine, of perhaps thousands of devices; return a device's longest sum of latencies."""
    about = topology.machines[machine]
    mine = {topology.places[device][1]: offers[device] for device in devices}
    peers, offered = Crowd(about, dict.fromkeys(mine, 1)), Crowd(about, mine)
    longest = 0.0
    for place, own in mine.items():
        latency_s = out_s = 0.0
        for what, count in peers.around(place):
            link = topology.usual(what) if isinstance(what, LinkKind) else what
            latency_s += count * link.latency_s
            found.crossing[link.kind] += own * count * part
            if link.kind is not LinkKind.SOCKET:
                out_s += own * count * part / link.bandwidth_bytes_per_s
        into_s = sum(
            taken * part / link.bandwidth_bytes_per_s
            for what, taken in offered.around(place)
            for link in [topology.usual(what) if isinstance(what, LinkKind) else what]
            if link.kind is not LinkKind.SOCKET
        )
        found.occupy((machine, "out of", place), out_s)
        found.occupy((machine, "into", place), into_s)
        longest = max(longest, latency_s)
    _exchange_between_nodes(found, topology, machine, mine, part)
    return longest


def _exchange_between_nodes(
    found: _Round, topology: Topology, machine: int, offers: dict[int, int], part: float
) -> None:
    """What crosses the links between the NUMA nodes of a machine.

    Of very many nodes, only the link with the most to carry counts, and those where devices have links of their own.
    """
    about = topology.machines[machine]
    byte_s = part / topology.usual(LinkKind.SOCKET).bandwidth_bytes_per_s
    nodes = {node: (offered, count) for node, offered, count in Crowd(about, offers).nodes()}
    busy_s: dict[tuple[tuple[int, int], tuple[int, int]], float] = {}
    senders, takers = (sorted(nodes, key=lambda n: nodes[n][which], reverse=True)[:_NODES] for which in (0, 1))
    for a, b in product(senders, takers):
        if a != b:
            busy_s[a, b] = nodes[a][0] * nodes[b][1] * byte_s
    for (one, other), link in about.own_links.items():
        ends = node_of(about.devices[one]), node_of(about.devices[other])
        if one in offers and other in offers and ends[0] != ends[1]:
            own_s = part / link.bandwidth_bytes_per_s if link.kind is LinkKind.SOCKET else 0.0
            for (a, b), place in ((ends, one), (ends[::-1], other)):
                usual = nodes[a][0] * nodes[b][1] * byte_s
                busy_s[a, b] = busy_s.get((a, b), usual) + offers[place] * (own_s - byte_s)
    for way, busy in busy_s.items():
        found.occupy((machine, "between", *way), busy)
