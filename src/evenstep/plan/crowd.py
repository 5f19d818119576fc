"""Many devices of one machine, counted by how near they are to each other, without going through all pairs."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping

from evenstep.plan.topology import Device, Link, LinkKind, Machine, kind_between

__all__ = ["Crowd", "node_of"]


def node_of(device: Device) -> tuple[int, int]:
    """The NUMA node of a device; between two of them lies the link between sockets."""
    return device.socket, device.numa


class _Tally:
    """Sums of weights over some devices: all of them, and those of each board and switch."""

    def __init__(self) -> None:
        self.all = 0
        self.boards: Counter[Hashable] = Counter()
        self.switches: Counter[Hashable] = Counter()
        self.both: Counter[Hashable] = Counter()

    def add(self, device: Device, weight: int) -> None:
        self.all += weight
        self.boards[device.board] += weight
        self.switches[device.switch] += weight
        self.both[device.board, device.switch] += weight

    def near(self, device: Device) -> tuple[int, int, int]:
        """The sums over those on the same board, behind the same switch but on another board, and elsewhere."""
        board = self.boards[device.board] if device.board is not None else 0
        switch = self.switches[device.switch] if device.switch is not None else 0
        if device.board is not None and device.switch is not None:
            switch -= self.both[device.board, device.switch]
        return board, switch, self.all - board - switch


class Crowd:
    """Devices of one machine, each with a weight.

    Args:
        machine: The machine.
        weights: The weight of each device, by its place; devices without one are left out.
    """

    def __init__(self, machine: Machine, weights: Mapping[int, int]) -> None:
        self._machine, self._weights = machine, weights
        self._all = sum(weights.values())
        self._nodes: dict[tuple[int, int], tuple[_Tally, _Tally]] = defaultdict(lambda: (_Tally(), _Tally()))
        for place, weight in weights.items():
            device = machine.devices[place]
            self._nodes[node_of(device)][device.core].add(device, weight)
        self._own: dict[int, list[tuple[int, Link]]] = defaultdict(list)
        for (a, b), link in machine.own_links.items():
            if a in weights and b in weights and a != b:
                self._own[a].append((b, link))
                self._own[b].append((a, link))

    def around(self, place: int) -> Iterator[tuple[LinkKind | Link, int]]:
        """The weights of all other devices, summed up by what lies between them and this one.

        That is a kind of link where it follows from their places, otherwise the pair's own link. A sum may be 0.
        """
        device = self._machine.devices[place]
        others, cores = self._nodes[node_of(device)]
        own = dict(self._own.get(place, ()))
        sums: dict[LinkKind | Link, int] = defaultdict(int)
        sums[LinkKind.SOCKET] = self._all - others.all - cores.all
        for tally, is_core in ((others, False), (cores, True)):
            if is_core and device.core:
                sums[LinkKind.MEMORY] += tally.all
                continue
            board, switch, rest = tally.near(device)
            sums[LinkKind.BOARD] += board
            sums[LinkKind.SWITCH] += switch
            sums[LinkKind.BRIDGE] += rest
        sums[kind_between(device, device)] -= self._weights[place]
        for other, link in own.items():
            sums[kind_between(device, self._machine.devices[other])] -= self._weights[other]
            sums[link] += self._weights[other]
        yield from sums.items()

    def nodes(self) -> Iterator[tuple[tuple[int, int], int, int]]:
        """The NUMA nodes, each with the sum of the weights there and how many devices it has."""
        counts = Counter(node_of(self._machine.devices[place]) for place in self._weights)
        for node, (others, cores) in self._nodes.items():
            yield node, others.all + cores.all, counts[node]
