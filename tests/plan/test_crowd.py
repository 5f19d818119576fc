"""Counted together, devices have the neighbours that they have one by one."""

from collections import Counter

from hypothesis import given, settings

from clusters import topologies
from evenstep.plan.crowd import Crowd, node_of
from evenstep.plan.topology import LinkKind


@settings(max_examples=100)
@given(topologies())
def test_the_others_around_a_device_are_those_that_pair_by_pair_are_there(topology):
    first = 0
    for machine in topology.machines:
        count = len(machine.devices)
        weights = {place: place + 1 for place in range(count)}
        crowd = Crowd(machine, weights)
        for place in range(count):
            found, expected = Counter(), Counter()
            for what, weight in crowd.around(place):
                found[topology.usual(what) if isinstance(what, LinkKind) else what] += weight
            for other in range(count):
                if other != place:
                    expected[topology.link(first + place, first + other)] += weights[other]
            assert +found == +expected
            assert not any(weight < 0 for weight in found.values())
        nodes = Counter()
        for place, device in enumerate(machine.devices):
            nodes[node_of(device)] += weights[place]
        assert {node: weight for node, weight, _ in crowd.nodes()} == nodes
        first += count
