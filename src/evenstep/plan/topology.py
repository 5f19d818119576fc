"""How machines are connected: sockets, NUMA nodes, devices and the links between them, as a value.

A device is what a worker computes on: a GPU, or a core where there are none. Devices have numbers, counted through all
machines. Where a pair has no link of its own, their places determine the kind of link between them, so that ten
thousand devices need no matrix of a hundred million entries. Nothing here reads a machine: `evenstep.topology` does.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from evenstep.core.errors import ConfigError

__all__ = ["LINKS", "Device", "Link", "LinkKind", "Machine", "Topology", "kind_between"]


class LinkKind(StrEnum):
    """What lies between two devices, from near to far. The value is what files and flags say."""

    NVLINK = "nvlink"
    MEMORY = "memory"
    """Two cores and the memory of their NUMA node."""
    BOARD = "board"
    SWITCH = "switch"
    """One or more PCIe switches, but no host bridge."""
    BRIDGE = "bridge"
    """The PCIe host bridges of one NUMA node."""
    SOCKET = "socket"
    """The link between NUMA nodes or sockets."""
    NETWORK = "network"
    SPINE = "spine"
    """The network between racks."""


@dataclass(frozen=True)
class Link:
    """A link: what it is, how much it carries in each direction, and how long a first byte takes."""

    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """How long a message takes if it has the link to itself."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


LINKS = (
    Link(LinkKind.NVLINK, 200e9, 2e-6),
    Link(LinkKind.MEMORY, 8e9, 1e-6),
    Link(LinkKind.BOARD, 24e9, 4e-6),
    Link(LinkKind.SWITCH, 24e9, 5e-6),
    Link(LinkKind.BRIDGE, 20e9, 6e-6),
    Link(LinkKind.SOCKET, 12e9, 8e-6),
    Link(LinkKind.NETWORK, 12.5e9, 15e-6),
    Link(LinkKind.SPINE, 6.25e9, 30e-6),
)
"""The default assumptions for each kind: round figures for today's machines, for comparisons only."""


@dataclass(frozen=True)
class Device:
    """A device and its place in its machine.

    Attributes:
        name: Unique in its machine.
        socket: The number of its socket.
        numa: The number of its NUMA node, unique in the machine.
        switch: The PCIe switch it is attached to, if any; the same text is the same switch.
        board: The board it shares with others, if any.
        speed: How fast it computes; only the ratio to the others counts.
        core: Whether it is a core, whose way to others is memory instead of a bus.
    """

    name: str
    socket: int = 0
    numa: int = 0
    switch: str | None = None
    board: str | None = None
    speed: float = 1.0
    core: bool = False


@dataclass(frozen=True)
class Machine:
    """A machine: its devices, and links of single pairs that do not follow from their places.

    Attributes:
        name: Unique in the topology.
        devices: In order; a device's number in the topology counts from the machine's first.
        links: (place, place, link) for pairs of devices with a link of their own, such as NVLink.
        rack: Machines with the same text here share a network; those of different racks meet over the spine.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[tuple[int, int, Link], ...] = ()
    rack: str | None = None

    @cached_property
    def own_links(self) -> dict[tuple[int, int], Link]:
        """The links of single pairs, by (lower place, higher place)."""
        return {(min(a, b), max(a, b)): link for a, b, link in self.links}


@dataclass(frozen=True)
class Topology:
    """Machines, and what links of each kind can do.

    Raises:
        ConfigError: There is no device at all, or two have the same name.
    """

    machines: tuple[Machine, ...]
    links: tuple[Link, ...] = LINKS

    def __post_init__(self) -> None:
        if not any(machine.devices for machine in self.machines):
            raise ConfigError("a topology without devices; expected at least one machine with one device")
        _unique("machines", (machine.name for machine in self.machines))
        for machine in self.machines:
            _unique(f"devices of {machine.name}", (device.name for device in machine.devices))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(number of the machine, place in it) of every device."""
        return tuple((m, d) for m, machine in enumerate(self.machines) for d in range(len(machine.devices)))

    @property
    def num_devices(self) -> int:
        """How many devices all machines have."""
        return len(self.places)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of every device; with its machine's if there are several machines."""
        several = len(self.machines) > 1
        return tuple((f"{m.name}/" if several else "") + d.name for m in self.machines for d in m.devices)

    @cached_property
    def _kinds(self) -> dict[LinkKind, Link]:
        return {link.kind: link for link in (*LINKS, *self.links)}

    def usual(self, kind: LinkKind) -> Link:
        """The usual link of a kind."""
        return self._kinds[kind]

    def device(self, number: int) -> Device:
        """A device by its number."""
        machine, place = self.places[number]
        return self.machines[machine].devices[place]

    def machine_of(self, number: int) -> Machine:
        """The machine of a device."""
        return self.machines[self.places[number][0]]

    def link(self, a: int, b: int) -> Link:
        """The link between two different devices, by number; the same in both directions."""
        (machine_a, place_a), (machine_b, place_b) = self.places[a], self.places[b]
        if machine_a != machine_b:
            near = self.machines[machine_a].rack == self.machines[machine_b].rack
            return self._kinds[LinkKind.NETWORK if near else LinkKind.SPINE]
        machine = self.machines[machine_a]
        own = machine.own_links.get((min(place_a, place_b), max(place_a, place_b)))
        return own or self._kinds[kind_between(machine.devices[place_a], machine.devices[place_b])]


def kind_between(a: Device, b: Device) -> LinkKind:
    """The kind of link between two devices of one machine."""
    if a.numa != b.numa or a.socket != b.socket:
        return LinkKind.SOCKET
    if a.core and b.core:
        return LinkKind.MEMORY
    if a.board is not None and a.board == b.board:
        return LinkKind.BOARD
    if a.switch is not None and a.switch == b.switch:
        return LinkKind.SWITCH
    return LinkKind.BRIDGE


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"two {what} have the name {name!r}; expected names that differ")
        seen.add(name)
