"""The pairing rule of Caffe's multi-GPU solver: devices become a tree by how they are connected.

Three phases pair what remains: devices on one board, then devices with peer access, then neighbours. A phase sweeps
over the remaining devices ceil(log2(how many)) times; in a sweep, each device that still remains takes the first later
one that fits as its child, and the child is gone. The first device is never a child: it is the root.

This is Caffe's rule as published, so that its trees can be compared with ours (`planner.lay`). Where the
original reads past the end of its list (an odd number of devices without peer access), the last one waits for the next
sweep.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

from evenstep.core.errors import ConfigError
from evenstep.plan.crowd import node_of
from evenstep.plan.topology import LinkKind, Machine, Topology

__all__ = ["pair", "pair_devices"]

Pairs = list[tuple[int | None, int]]
Fits = Callable[[int, int], bool]
Near = Callable[[int], Hashable]
_PEERS = frozenset({LinkKind.NVLINK, LinkKind.MEMORY, LinkKind.BOARD, LinkKind.SWITCH, LinkKind.BRIDGE})


def _anywhere(_: int) -> Hashable:
    return None


def pair(
    devices: Sequence[int], same_board: Fits, peer: Fits, board_of: Near = _anywhere, peers_of: Near = _anywhere
) -> Pairs:
    """Pair devices; return (parent, child) in the order of pairing, the root first with parent None.

    Args:
        devices: Any number of them, in any order; the first will be the root.
        same_board: Whether two are on one board.
        peer: Whether the first can access the memory of the second.
        board_of: Two devices for which this differs are not on one board. It only saves time.
        peers_of: Likewise for peers.

    Raises:
        ConfigError: There is no device, or one is named twice.
    """
    if not devices or len(set(devices)) != len(devices):
        raise ConfigError(f"devices {list(devices)}, expected at least one, each named once")
    remaining, pairs = list(devices), Pairs()
    for fits, near in ((same_board, board_of), (peer, peers_of)):
        for _ in range(_depth(len(remaining))):
            found = _sweep(remaining, fits, near)
            if not found:
                break  # nothing has changed, so nothing will
            pairs += found
            children = {child for _, child in found}
            remaining = [device for device in remaining if device not in children]
    while len(remaining) > 1:
        pairs += zip(remaining[::2], remaining[1::2], strict=False)
        remaining = remaining[::2]
    return [(None, remaining[0]), *pairs]


def pair_devices(topology: Topology, devices: Sequence[int] | None = None) -> Pairs:
    """Pair devices of a topology, in the order given, or all of them. Whatever meets at a host bridge is a peer."""

    def same_board(a: int, b: int) -> bool:
        return topology.link(a, b).kind is LinkKind.BOARD

    def peer(a: int, b: int) -> bool:
        return topology.link(a, b).kind in _PEERS

    nodes = [_joined(machine) for machine in topology.machines]

    def peers_of(number: int) -> Hashable:
        machine, place = topology.places[number]
        return machine, nodes[machine][node_of(topology.machines[machine].devices[place])]

    def board_of(number: int) -> Hashable:
        if topology.machine_of(number).own_links:  # which may lie on one board wherever their ends are
            return peers_of(number)
        board = topology.device(number).board
        return number if board is None else (peers_of(number), board)

    wanted = range(topology.num_devices) if devices is None else devices
    return pair(wanted, same_board, peer, board_of, peers_of)


def _joined(machine: Machine) -> dict[Hashable, Hashable]:
    """For every NUMA node of a machine, one that stands for it and all that links of single pairs join to it."""
    found: dict[Hashable, Hashable] = {node_of(device): node_of(device) for device in machine.devices}

    def root(node: Hashable) -> Hashable:
        while found[node] != node:
            found[node] = node = found[found[node]]
        return node

    for a, b in machine.own_links:
        found[root(node_of(machine.devices[a]))] = root(node_of(machine.devices[b]))
    return {node: root(node) for node in found}


def _depth(count: int) -> int:
    return (count - 1).bit_length()


def _sweep(remaining: Sequence[int], fits: Fits, near: Near) -> Pairs:
    later: dict[Hashable, deque[int]] = defaultdict(deque)
    for device in remaining:
        later[near(device)].append(device)
    gone: set[int] = set()
    pairs = Pairs()
    for parent in remaining:
        if parent in gone:
            continue
        others = later[near(parent)]
        others.popleft()  # itself: the first of those that are left
        place = next((place for place, device in enumerate(others) if fits(parent, device)), None)
        if place is not None:
            pairs.append((parent, others[place]))
            gone.add(others[place])
            del others[place]
    return pairs
