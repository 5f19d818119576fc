import random
import time
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import dgx, topologies
from evenstep.core.errors import ConfigError
from evenstep.plan import cost
from evenstep.plan.planner import compare, in_order, lay
from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology


def test_an_order_that_is_as_good_as_any_stays():
    assert lay(Topology((dgx(),)), 8).order == tuple(range(8))
    assert lay(Topology((dgx("a"), dgx("b"))), 32).order == tuple(range(16))


def test_devices_of_mixed_up_machines_come_together():
    devices = [(f"d{i}", i % 2) for i in range(8)]
    machine = Machine("m", tuple(Device(name, numa=numa) for name, numa in devices))
    layout = lay(Topology((machine,)), 8)
    halves = [{devices[device][1] for device in half} for half in (layout.order[:4], layout.order[4:])]
    assert sorted(halves, key=str) == [{0}, {1}]


def test_links_of_single_pairs_make_siblings():
    fast = Link(LinkKind.NVLINK, 200e9, 2e-6)
    machine = Machine("m", tuple(Device(f"g{i}") for i in range(4)), ((0, 3, fast), (1, 2, fast)))
    layout = lay(Topology((machine,)), 4)
    assert {frozenset(layout.order[:2]), frozenset(layout.order[2:])} == {frozenset({0, 3}), frozenset({1, 2})}


def test_a_large_machine_after_small_ones_begins_where_a_node_does():
    small, large = (Machine(name, tuple(Device(f"g{i}") for i in range(n))) for name, n in (("s", 3), ("l", 8)))
    layout = lay(Topology((small, large)), 11)
    assert set(layout.order[:8]) == set(range(3, 11))


def test_fast_devices_get_more_shards():
    machine = Machine("m", (Device("a", speed=2.0), Device("b"), Device("c")))
    layout = in_order(Topology((machine,)), 8)
    assert layout.spans == ((0, 4), (4, 6), (6, 8))


@settings(max_examples=20)
@given(topologies(), st.integers(0, 20))
def test_no_layout_is_predicted_to_be_slower_than_the_order_given(topology, extra):
    num_shards = topology.num_devices + extra
    chosen, given_order = lay(topology, num_shards), in_order(topology, num_shards)
    assert sorted(chosen.order) == list(range(topology.num_devices))
    assert cost.tree(topology, chosen, 1e8).seconds <= cost.tree(topology, given_order, 1e8).seconds


def mixed(dice: random.Random, count: int) -> Topology:
    """Machines of up to four devices, of all kinds of places, links and speeds."""
    machines: list[Machine] = []
    while count:
        size = min(dice.randint(1, 4), count)
        devices = tuple(
            Device(f"d{i}", numa=dice.randint(0, 1), switch=dice.choice([None, "a"]), speed=dice.choice([1, 1, 0.5, 3]))
            for i in range(size)
        )
        own = tuple(
            (a, b, Link(LinkKind.NVLINK, dice.choice([25e9, 200e9]), 2e-6))
            for a in range(size)
            for b in range(a + 1, size)
            if dice.random() < 0.3
        )
        machines.append(Machine(f"m{len(machines)}", devices, own, dice.choice("rs")))
        count -= size
    return Topology(tuple(machines))


def test_of_few_devices_the_best_order_of_all_is_found():
    dice = random.Random(5)
    for number in range(14):
        topology = mixed(dice, count := 6 if number < 2 else 5)
        num_shards, num_bytes = count + dice.randint(0, 6), dice.choice([1e6, 1e8])
        best = min(
            cost.tree(topology, in_order(topology, num_shards, order), num_bytes).seconds
            for order in permutations(range(count))
        )
        chosen = cost.tree(topology, lay(topology, num_shards, num_bytes=num_bytes), num_bytes).seconds
        assert chosen == pytest.approx(best, rel=1e-8)


def test_a_machine_with_thousands_of_devices_is_laid_in_seconds():
    devices = tuple(Device(f"d{i}", numa=i % 4) for i in range(3000))
    begin = time.process_time()
    topology = Topology((Machine("m", devices),))
    layout = lay(topology, 3000)
    cost.all_to_all(topology, layout, 1e8)
    assert time.process_time() - begin < 5.0
    assert [devices[device].numa for device in layout.order] == [i // 750 for i in range(3000)]


@pytest.mark.long
def test_ten_thousand_devices_are_compared_in_seconds():
    machines = [dgx(f"n{i}", f"r{i % 79}") for i in range(1250)]
    begin = time.process_time()
    plans = compare(Topology(tuple(machines)), 10_000, 1e9)
    assert time.process_time() - begin < 20.0
    seconds = {plan.name: plan.prediction.seconds for plan in plans}
    assert [plan.prediction.seconds for plan in plans] == sorted(seconds.values())
    assert seconds["tree, near devices as siblings"] < 0.6 * seconds["tree, devices in their order"]


@pytest.mark.parametrize(
    ("num_shards", "devices", "sentence"),
    [
        (4, None, "8 devices but 4 shards: every device needs one; use at least as many shards"),
        (8, [0, 8], "devices [0, 8], expected numbers from 0 to 7, each named once"),
        (8, [1, 1], "devices [1, 1], expected numbers from 0 to 7, each named once"),
        (8, [], "0 devices but 8 shards: every device needs one; use at least as many shards"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(num_shards, devices, sentence):
    with pytest.raises(ConfigError) as caught:
        lay(Topology((dgx(),)), num_shards, devices)
    assert str(caught.value) == sentence
