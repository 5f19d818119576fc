import pytest
from hypothesis import given, settings

from clusters import boards, dgx, topologies
from evenstep.core.errors import ConfigError
from evenstep.plan.topology import Device, LinkKind, Machine, Topology


def kinds(topology: Topology, *pairs: tuple[int, int]) -> list[str]:
    return [str(topology.link(a, b).kind) for a, b in pairs]


def test_the_places_of_two_devices_say_what_is_between_them():
    topology = Topology((boards(),))
    assert kinds(topology, (0, 1), (1, 2), (3, 4)) == ["board", "bridge", "socket"]
    switches = Topology((Machine("m", tuple(Device(f"g{i}", switch=f"s{i // 2}") for i in range(4))),))
    assert kinds(switches, (0, 1), (1, 2)) == ["switch", "bridge"]
    cores = Topology((Machine("m", tuple(Device(f"c{i}", numa=i // 2, core=True) for i in range(4))),))
    assert kinds(cores, (0, 1), (1, 2)) == ["memory", "socket"]


def test_a_link_of_its_own_comes_before_the_places_and_machines_meet_over_the_network():
    topology = Topology((dgx("a", "r0"), dgx("b", "r0"), dgx("c", "r1")))
    assert kinds(topology, (0, 7), (7, 8), (8, 16)) == ["nvlink", "network", "spine"]
    assert topology.names[9] == "b/gpu1"
    assert Topology((dgx(),)).names[1] == "gpu1"


@settings(max_examples=60)
@given(topologies())
def test_a_link_is_the_same_in_both_directions(topology):
    for a in range(topology.num_devices):
        for b in range(a):
            assert topology.link(a, b) == topology.link(b, a)


@pytest.mark.parametrize(
    ("machines", "sentence"),
    [
        ((), "a topology without devices; expected at least one machine with one device"),
        ((Machine("m", ()),), "a topology without devices; expected at least one machine with one device"),
        ((dgx(), dgx()), "two machines have the name 'node'; expected names that differ"),
        ((Machine("m", (Device("a"), Device("a"))),), "two devices of m have the name 'a'; expected names that differ"),
    ],
)
def test_a_topology_that_makes_no_sense_is_refused(machines, sentence):
    with pytest.raises(ConfigError) as caught:
        Topology(machines)
    assert str(caught.value) == sentence


def test_kinds_are_written_as_the_words_of_files():
    assert [str(kind) for kind in LinkKind] == [
        "nvlink",
        "memory",
        "board",
        "switch",
        "bridge",
        "socket",
        "network",
        "spine",
    ]
