"""What the cost model predicts, against real TCP between network namespaces with limited rates."""

import networks
import pytest

from evenstep.plan import cost
from evenstep.plan.layout import Layout
from evenstep.plan.planner import in_order, lay
from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology

RACKS = (0, 1, 0, 1)
CARD_BITS, UPLINK_BITS = 40_000_000, 20_000_000
NUM_BYTES = 400_000


def cluster() -> Topology:
    machines = tuple(Machine(f"m{i}", (Device("d"),), rack=f"r{rack}") for i, rack in enumerate(RACKS))
    network, spine = Link(LinkKind.NETWORK, CARD_BITS / 8, 2e-4), Link(LinkKind.SPINE, UPLINK_BITS / 8, 2e-4)
    return Topology(machines, (network, spine))


def tree_messages(layout: Layout) -> list[networks.Messages]:
    up = [[(m.source, m.target, NUM_BYTES) for m in moves] for moves in layout.rounds() if moves]
    return up + [[(target, source, size) for source, target, size in messages] for messages in reversed(up)]


def all_to_all_messages(layout: Layout) -> list[networks.Messages]:
    part = NUM_BYTES // len(layout.order)
    there = [
        (a, b, layout.num_nodes(layout.order.index(a)) * part) for a in layout.order for b in layout.order if a != b
    ]
    back = [(a, b, part) for a, b, _ in there]
    return [there, back]


def test_the_predicted_order_of_three_plans_is_the_measured_order():
    reason = networks.why_not()
    if reason is not None:
        pytest.skip(reason)
    topology = cluster()
    near, given = lay(topology, 4, num_bytes=NUM_BYTES), in_order(topology, 4)
    plans = {
        "tree over near siblings": (cost.tree(topology, near, NUM_BYTES), tree_messages(near)),
        "all-to-all": (cost.all_to_all(topology, near, NUM_BYTES), all_to_all_messages(near)),
        "tree in the order of machines": (cost.tree(topology, given, NUM_BYTES), tree_messages(given)),
    }
    predicted = {name: found.seconds for name, (found, _) in plans.items()}
    with networks.Racks(RACKS, CARD_BITS, UPLINK_BITS) as racks:
        times = {name: [racks.seconds(rounds) for _ in range(2)] for name, (_, rounds) in plans.items()}
        expected = sorted(plans, key=predicted.__getitem__)
        for _ in range(4):  # whatever else the machine does only makes them longer
            measured = {name: min(found) for name, found in times.items()}
            if sorted(plans, key=measured.__getitem__) == expected:
                break
            for name, (_, rounds) in plans.items():
                times[name].append(racks.seconds(rounds))
    print({name: (f"{predicted[name]:.3f}", f"{measured[name]:.3f}") for name in plans})
    assert sorted(plans, key=measured.__getitem__) == expected, (predicted, measured)
