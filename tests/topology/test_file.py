import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import LINKS, Device, Link, LinkKind, Machine, Topology
from evenstep.topology import from_json, read_file, to_json

SMALL = {
    "format": 1,
    "links": {"network": {"bandwidth_bytes_per_s": 1e9}},
    "machines": [
        {
            "name": "node",
            "count": 3,
            "rack_size": 2,
            "devices": [{"name": "a", "speed": 2}, {"name": "b", "numa": 1, "switch": "s"}, {"name": "c"}],
            "links": [{"between": ["a", "b", "c"], "kind": "nvlink", "latency_s": 0}],
        }
    ],
}


def test_a_machine_is_repeated_in_racks_and_joined_in_all_pairs():
    topology = from_json(SMALL)
    assert [(m.name, m.rack) for m in topology.machines] == [
        ("node0", "node-rack0"),
        ("node1", "node-rack0"),
        ("node2", "node-rack1"),
    ]
    assert topology.link(0, 2) == topology.link(1, 2) == Link(LinkKind.NVLINK, 200e9, 0.0)
    assert topology.link(0, 3).bandwidth_bytes_per_s == 1e9
    assert topology.device(4) == Device("b", numa=1, switch="s")


words = st.text("abc", min_size=1, max_size=3)
devices = st.builds(
    Device,
    words,
    st.integers(0, 3),
    st.integers(0, 3),
    st.none() | words,
    st.none() | words,
    st.floats(0.1, 9.0),
    st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(devices, min_size=2, max_size=4, unique_by=lambda device: device.name), st.none() | words)
def test_what_was_written_is_read_again(found, rack):
    machine = Machine("m", tuple(found), ((0, 1, Link(LinkKind.BOARD, 3e9, 1e-6)),), rack)
    topology = Topology((machine, Machine("n", (Device("x"),))), (Link(LinkKind.SPINE, 1e9, 1e-3), *LINKS[:-1]))
    again = from_json(json.loads(json.dumps(to_json(topology))))
    assert again.machines == topology.machines
    assert all(again.usual(kind) == topology.usual(kind) for kind in LinkKind)


def changed(path: str, value: object) -> dict:
    """SMALL with one place changed."""
    whole = copy.deepcopy(SMALL)
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place = whole
    for step in way:
        place = place[step]
    place[last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("format", 2, '"format" is 2, expected 1'),
        ("links", [], "links is [], expected an object {...}"),
        ("links.wire", {}, "links has 'wire', expected only "),
        ("links.network.latency_s", -1, "links.network.latency_s is -1, expected a number of at least 0"),
        ("machines", {}, "machines is {}, expected a list [...]"),
        ("machines.0.name", 7, "machines[0].name is 7, expected a printable text"),
        ("machines.0.count", 0, "machines[0].count is 0, expected a whole number of at least 1"),
        ("machines.0.count", 10_000_000, "machines[0].count is 10000000, expected a whole number up to 1000000"),
        ("machines.0.rack", "r", "machines[0] has both rack and rack_size; give one of the two"),
        ("machines.0.devices.1", 5, "machines[0].devices[1] is 5, expected an object {...}"),
        ("machines.0.devices.1.name", None, "machines[0].devices[1] has no name; expected one"),
        ("machines.0.devices.1.speed", "fast", 'machines[0].devices[1].speed is "fast", expected a number above 0'),
        ("machines.0.devices.1.core", 1, "machines[0].devices[1].core is 1, expected true or false"),
        ("machines.0.devices.1.colour", 1, "machines[0].devices[1] has 'colour', expected only name, socket"),
        ("machines.0.links.0.kind", "network", 'machines[0].links[0].kind is "network", expected one of nvlink'),
        ("machines.0.links.0.between", ["a"], 'machines[0].links[0].between is ["a"], expected the names of two'),
        ("machines.0.links.0.between", ["a", "z"], "machines[0].links[0].between names 'z', which is not a device"),
        ("machines.0.devices.2.name", "b", "machines[0].links[0].between names 'c', which is not a device"),
        ("machines.0.links.0.between", [["a"], "b"], "machines[0].links[0].between names ['a'], which is not a device"),
        ("machines.0.name", "a\x1b[31m", 'machines[0].name is "a\\u001b[31m", expected a printable text'),
        ("machines.0.devices.1.name", "\ud800", "machines[0].devices[1].name is "),
        ("machines.0.devices.1.speed", 10**400, "machines[0].devices[1].speed is 1000"),
        ("machines.0.devices.1.speed", 1e308, "machines[0].devices[1].speed is 1e+308, expected a number up to 1e+30"),
        ("machines.0.links", {}, "machines[0].links is {}, expected a list [...]"),
    ],
)
def test_a_mistake_is_one_sentence_that_says_where_it_is(path, value, sentence):
    with pytest.raises(ConfigError) as caught:
        from_json(changed(path, value))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[]", "is neither a JSON object of machines nor the text of `nvidia-smi topo -m`"),
        (b"\xff\xfe", "cannot be read: it is not text; name a JSON file of machines"),
        (
            b'{"format": ' + b"[" * 100_000,
            "is not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
        ),
        (b'{"format": 3}', '"format" is 3, expected 1'),
        (None, "cannot be read: No such file or directory; name a JSON file of machines"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, sentence):
    path = tmp_path / "machines.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(caught.value) == f"{path}{':' if 'format' in sentence else ''} {sentence}"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "machines.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    assert read_file(path) == from_json(SMALL)


def test_a_file_may_hold_the_text_of_nvidia_smi(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text("\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tPIX\t0-3\nGPU1\tPIX\tX\t0-3\n")
    assert str(read_file(path).link(0, 1).kind) == "switch"
