"""Caffe's pairing, against the pairings that its code gives."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import boards, topologies
from evenstep.core.errors import ConfigError
from evenstep.plan.pairing import _PEERS, pair, pair_devices
from evenstep.plan.planner import compare
from evenstep.plan.topology import Device, LinkKind, Machine, Topology

ALL_PEERS = {
    1: "",
    2: "0:1",
    3: "0:1 0:2",
    4: "0:1 2:3 0:2",
    5: "0:1 2:3 0:2 0:4",
    6: "0:1 2:3 4:5 0:2 0:4",
    7: "0:1 2:3 4:5 0:2 4:6 0:4",
    8: "0:1 2:3 4:5 6:7 0:2 4:6 0:4",
}


def never(_a: int, _b: int) -> bool:
    return False


def always(_a: int, _b: int) -> bool:
    return True


def text(pairs: list[tuple[int | None, int]]) -> str:
    assert pairs[0][0] is None
    return " ".join(f"{parent}:{child}" for parent, child in pairs[1:])


@pytest.mark.parametrize("count", ALL_PEERS)
def test_devices_that_are_all_peers(count):
    assert text(pair(range(count), never, always)) == ALL_PEERS[count]


@pytest.mark.parametrize("count", ALL_PEERS)
def test_devices_without_any_peer_are_paired_alike_and_nothing_is_read_past_the_end(count):
    assert text(pair(range(count), never, never)) == ALL_PEERS[count]


def test_two_sockets_of_four():
    assert text(pair(range(8), never, lambda a, b: a // 4 == b // 4)) == ALL_PEERS[8]


def test_boards_of_two_in_sockets_of_four():
    assert text(pair_devices(Topology((boards(),)))) == ALL_PEERS[8]


def test_the_first_device_that_is_named_is_the_root():
    pairs = pair([2, 0, 1, 3], never, always)
    assert (pairs[0], text(pairs)) == ((None, 2), "2:0 1:3 2:1")


def test_one_pair_of_peers_among_four():
    assert text(pair(range(4), never, lambda a, b: {a, b} == {1, 2})) == "1:2 0:1 0:3"


def original(devices, same_board, peer):
    """The published loop, with the missing end of its last phase."""
    left, pairs = list(devices), []
    for fits in (same_board, peer, None):
        for _ in range((len(left) - 1).bit_length()):
            i = 0
            while i < len(left):
                for j in range(i + 1, len(left)):
                    if fits is None or fits(left[i], left[j]):
                        pairs.append((left[i], left.pop(j)))
                        break
                i += 1
    return [(None, left[0]), *pairs]


@settings(max_examples=150)
@given(st.data())
def test_any_relation_is_paired_as_the_original_loop_does(data):
    devices = data.draw(st.permutations(range(data.draw(st.integers(1, 12)))))
    boards_of, links = (
        data.draw(st.sets(st.tuples(st.sampled_from(devices), st.sampled_from(devices)), max_size=30)) for _ in range(2)
    )

    def same_board(a, b):
        return (a, b) in boards_of

    def peer(a, b):
        return (a, b) in links

    assert pair(devices, same_board, peer) == original(devices, same_board, peer)


@settings(max_examples=60)
@given(topologies(), st.randoms(use_true_random=False))
def test_every_device_of_any_topology_is_a_child_once_and_the_first_is_the_root(topology, random):
    devices = list(range(topology.num_devices))
    random.shuffle(devices)
    pairs = pair_devices(topology, devices)
    assert pairs[0] == (None, devices[0])
    assert sorted(child for _, child in pairs) == sorted(devices)
    assert all(parent != child for parent, child in pairs)


@pytest.mark.parametrize("kind", ["bridge", "core", "socket", "board"])
def test_thousands_of_devices_of_one_machine_are_paired_and_compared_in_seconds(kind):
    special = {"core": {"core": True}, "socket": {}, "board": {}, "bridge": {}}[kind]
    devices = tuple(
        Device(f"d{i}", socket=i if kind == "socket" else 0, board=str(i // 2) if kind == "board" else None, **special)
        for i in range(4000)
    )
    topology = Topology((Machine("m", devices),))
    begin = time.process_time()
    assert len(pair_devices(topology)) == 4000
    assert compare(topology, 4000, 1e8)
    assert time.process_time() - begin < 10.0, "going through all pairs takes minutes"


@settings(max_examples=100)
@given(topologies())
def test_devices_of_any_topology_are_paired_as_if_all_pairs_were_gone_through(topology):
    def is_board(a, b):
        return topology.link(a, b).kind is LinkKind.BOARD

    def is_peer(a, b):
        return topology.link(a, b).kind in _PEERS

    assert pair_devices(topology) == original(range(topology.num_devices), is_board, is_peer)


def test_thousands_of_devices_are_paired_in_no_time():
    machines = tuple(Machine(f"m{i}", (Device("a"), Device("b"), Device("c"))) for i in range(2000))
    assert len(pair_devices(Topology(machines))) == 6000


@pytest.mark.parametrize("devices", [[], [1, 2, 1]])
def test_no_device_or_one_named_twice_is_refused(devices):
    with pytest.raises(ConfigError) as caught:
        pair(devices, never, always)
    assert str(caught.value) == f"devices {devices}, expected at least one, each named once"
