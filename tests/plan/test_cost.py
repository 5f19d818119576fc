import pytest

from clusters import dgx
from evenstep.plan import cost
from evenstep.plan.layout import Layout
from evenstep.plan.placement import cut
from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology

NETWORK, SPINE = Link(LinkKind.NETWORK, 100.0, 1.0), Link(LinkKind.SPINE, 50.0, 2.0)


def singles(racks: str) -> Topology:
    """Machines of one device each, in the racks that the letters name."""
    machines = tuple(Machine(f"m{i}", (Device("d"),), rack=rack) for i, rack in enumerate(racks))
    return Topology(machines, (NETWORK, SPINE))


def over(order, num_shards=None) -> Layout:
    return Layout(tuple(order), tuple(cut(num_shards or len(order), len(order))))


def test_a_tree_pays_latency_and_bytes_for_every_level_up_and_down():
    found = cost.tree(singles("aaaa"), over(range(4)), 100.0)
    assert found.seconds == pytest.approx(2 * 2 * (1.0 + 1.0))
    assert found.crossing == {LinkKind.NETWORK: 600.0}


def test_siblings_in_different_racks_share_the_uplink():
    topology = singles("aabb")
    near, far = (cost.tree(topology, over(order), 100.0) for order in ((0, 1, 2, 3), (0, 2, 1, 3)))
    assert near.seconds == pytest.approx(2 * ((1.0 + 1.0) + (2.0 + 2.0)))
    assert far.seconds == pytest.approx(2 * ((2.0 + 4.0) + (1.0 + 1.0)))
    assert (near.slow_bytes, far.crossing[LinkKind.SPINE]) == (600.0, 400.0)


def test_a_ring_sends_a_part_at_a_time():
    found = cost.ring(singles("aaaa"), over(range(4)), 100.0)
    assert found.seconds == pytest.approx(6 * (1.0 + 0.25))
    assert cost.ring(singles("a"), over([0]), 100.0).seconds == 0.0


def test_all_to_all_pays_for_every_peer_and_for_spans_that_are_no_node():
    whole = cost.all_to_all(singles("aaaa"), over(range(4)), 100.0)
    assert whole.seconds == pytest.approx(2 * (3.0 + 0.75))
    ragged = cost.all_to_all(singles("aaa"), over(range(3), 8), 90.0)  # [0,3) [3,6) [6,8): 2, 2 and 1 nodes
    assert ragged.seconds == pytest.approx((2.0 + 1.2) + (2.0 + 0.6))


def test_the_link_between_sockets_is_as_wide_in_both_directions_however_the_places_are_named():
    seconds = [
        cost.all_to_all(Topology((Machine("m", (Device("a"), other)),)), over(range(2)), 1e8).seconds
        for other in (Device("b", socket=1), Device("b", numa=1), Device("b", socket=1, numa=1))
    ]
    assert len(set(seconds)) == 1


def test_messages_counted_together_are_as_many_as_one_by_one():
    topology = Topology((dgx("a", "r"), dgx("b", "r"), dgx("c", "s")))
    layout = over(range(24), 60)
    part, sent = 1e6 / 24, dict.fromkeys(LinkKind, 0.0)
    for place, a in enumerate(layout.order):
        for b in layout.order:
            if a != b:
                sent[topology.link(a, b).kind] += (layout.num_nodes(place) + 1) * part
    found = cost.all_to_all(topology, layout, 1e6)
    assert found.crossing == pytest.approx({kind: amount for kind, amount in sent.items() if amount})


def test_one_device_has_nothing_to_send():
    for predict in (cost.tree, cost.ring, cost.all_to_all):
        assert predict(singles("a"), over([0], 8), 100.0).crossing == {}
