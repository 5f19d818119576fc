"""A step of many machines, predicted: what each part of it grows with."""

import time

import pytest

from evenstep.core.errors import ConfigError
from evenstep.plan.steps import StepCosts, predict_step
from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology

NETWORK, SPINE = Link(LinkKind.NETWORK, 1e9, 1e-3), Link(LinkKind.SPINE, 1e9, 2e-3)


def machines(count, racks=1, speed=1.0):
    found = (Machine(f"m{i}", (Device("d", speed=speed),), rack=f"r{i % racks}") for i in range(count))
    return Topology(tuple(found), (NETWORK, SPINE))


def test_one_machine_only_computes():
    found = predict_step(machines(1), 8, 1e9, StepCosts(0.1))
    assert (found.compute_s, found.gradients_s, found.meetings_s) == (pytest.approx(0.8), 0.0, 0.0)


@pytest.mark.parametrize(("count", "sent"), [(2, 1.0), (4, 1.5), (1000, 1.998)])
def test_each_machine_sends_its_share_of_the_gradients_while_its_last_shard_goes_backward(count, sent):
    found = predict_step(machines(count), 3 * count, 1e9, StepCosts(0.1, message_s=1e-9))
    assert found.compute_s == pytest.approx(0.3)
    assert found.gradients_s == pytest.approx(sent - 0.2 / 3 + 2e-3)


def test_what_backward_hides_costs_a_latency_there_and_back():
    assert predict_step(machines(2), 8, 1e6, StepCosts(0.1)).gradients_s == pytest.approx(2e-3)


def test_meetings_cost_a_message_to_every_other_machine():
    found = predict_step(machines(1000), 1000, 1e6, StepCosts(0.1, num_meetings=5, message_s=1e-4))
    assert found.meetings_s == pytest.approx(5 * (1e-3 + 999 * 1e-4))


def test_racks_share_their_uplinks():
    near, far = (predict_step(machines(8, racks), 8, 1e9, StepCosts(1e-9)).gradients_s for racks in (1, 2))
    assert near == pytest.approx(1.75 + 2e-3)
    assert far == pytest.approx(4.0 + 4e-3), "of four machines of a rack, half of what each sends leaves it"


def test_slower_devices_take_longer_and_too_few_shards_are_refused():
    assert predict_step(machines(2, speed=0.5), 8, 1.0, StepCosts(0.1)).compute_s == pytest.approx(0.8)
    with pytest.raises(ConfigError, match="2 devices but 1 shards"):
        predict_step(machines(2), 1, 1.0, StepCosts(0.1))


def test_ten_thousand_machines_are_no_work():
    begin = time.process_time()
    assert predict_step(machines(10_000), 10_000, 1e9, StepCosts(0.1)).seconds > 0
    assert time.process_time() - begin < 1.0
