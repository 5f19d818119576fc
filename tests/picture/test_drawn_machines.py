import re
from xml.etree import ElementTree

import pytest

from evenstep.core.errors import ConfigError
from evenstep.picture.machines import draw_topology
from evenstep.plan.planner import in_order, lay
from evenstep.plan.topology import Device, Machine, Topology

SVG = "{http://www.w3.org/2000/svg}"


def cluster(machines: int, devices: int) -> Topology:
    return Topology(
        tuple(
            Machine(f"m{m}", tuple(Device(f"<g{i}>", numa=i % 2) for i in range(devices)), rack=f"r{m % 2}")
            for m in range(machines)
        )
    )


def test_the_picture_has_a_dot_for_each_sum_that_moves_and_a_box_for_each_device():
    topology = cluster(2, 3)
    layout = lay(topology, 12)
    root = ElementTree.fromstring(draw_topology(topology, layout))
    moves = [move for moves in layout.rounds() for move in moves]
    assert len(root.findall(f"{SVG}circle")) == len(moves)
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert sum("the sum of" in tip for tip in tips) == len(moves)
    assert sum(text.text == "<g0>" for text in root.findall(f"{SVG}text")) == 2


def test_the_picture_needs_nothing_from_elsewhere():
    topology = cluster(3, 4)
    text = draw_topology(topology, in_order(topology, 40))
    assert re.findall(r"(?:href|src)=|url\((?!#)|@import", text) == []


def test_too_many_devices_are_refused():
    topology = cluster(300, 1)
    with pytest.raises(ConfigError, match="300 devices are too many for a picture of at most 256; write JSON instead"):
        draw_topology(topology, in_order(topology, 300))
