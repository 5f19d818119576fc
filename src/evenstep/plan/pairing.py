"""The pairing rule of Caffe's multi-GPU solver: devices become a tree by how they are connected.

Three phases pair what remains: devices on one board, then devices with peer access, then neighbours. A phase sweeps
over the remaining devices ceil(log2(how many)) times; in a sweep, each device that still remains takes the first later
one that fits as its child, and the child is gone. The first device is never a child: it is the root.

This is Caffe's rule as published, so that its trees can be compared with ours (`planner.lay`). Where the
original reads past the end of its list (an odd number of devices without peer access), the last one waits for the next
sweep.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import LinkKind, Topology

__all__ = ["pair", "pair_devices"]

Pairs = list[tuple[int | None, int]]
Fits = Callable[[int, int], bool]
_PEERS = frozenset({LinkKind.NVLINK, LinkKind.MEMORY, LinkKind.BOARD, LinkKind.SWITCH, LinkKind.BRIDGE})


def pair(
    devices: Sequence[int], same_board: Fits, peer: Fits, neighbourhood: Callable[[int], Hashable] = lambda _: None
) -> Pairs:
    """Pair devices; return (parent, child) in the order of pairing, the root first with parent None.

    Args:
        devices: Any number of them, in any order; the first will be the root.
        same_board: Whether two are on one board.
        peer: Whether the first can access the memory of the second.
        neighbourhood: Devices for which this differs are neither on one board nor peers. It only saves time.

    Raises:
        ConfigError: There is no device, or one is named twice.
    """
    if not devices or len(set(devices)) != len(devices):
        raise ConfigError(f"devices {list(devices)}, expected at least one, each named once")
    remaining, pairs = list(devices), Pairs()
    for fits in (same_board, peer):
        for _ in range(_depth(len(remaining))):
            found = _sweep(remaining, fits, neighbourhood)
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

    wanted = range(topology.num_devices) if devices is None else devices
    return pair(wanted, same_board, peer, lambda device: topology.places[device][0])


def _depth(count: int) -> int:
    return (count - 1).bit_length()


def _sweep(remaining: Sequence[int], fits: Fits, neighbourhood: Callable[[int], Hashable]) -> Pairs:
    later: dict[Hashable, list[int]] = defaultdict(list)
    for device in remaining:
        later[neighbourhood(device)].append(device)
    gone: set[int] = set()
    pairs = Pairs()
    for parent in remaining:
        near = later[neighbourhood(parent)]
        if parent in gone:
            continue
        near.remove(parent)  # it is the first of those left
        child = next((device for device in near if fits(parent, device)), None)
        if child is not None:
            near.remove(child)
            gone.add(child)
            pairs.append((parent, child))
    return pairs
