"""A model is cut into layers that travel by themselves, each to one server, in the order of backward."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.run.parts import Parts

SIZES = {"a.weight": 40, "a.bias": 4, "b.weight": 80, "c.weight": 8, "c.bias": 8}


def test_a_layer_is_a_part_with_its_parameters_last_first():
    parts = Parts.of(SIZES, ["a.weight", "a.bias", "b.weight", "c.weight", "c.bias"], 1)
    assert parts.names == (("a.weight", "a.bias"), ("b.weight",), ("c.weight", "c.bias"))
    assert parts.trained == ((1, 0), (2,), (4, 3))
    assert parts.filled == [2, 1, 0]
    assert parts.part_of["c.bias"] == 2
    assert parts.trained_by == {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}


def test_what_is_not_trained_is_in_a_part_and_has_no_number():
    parts = Parts.of(SIZES, ["c.bias", "a.weight"], 1)
    assert parts.trained == ((1,), (), (0,))
    assert parts.filled == [2, 0]
    assert "b.weight" in parts.part_of


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_every_server_has_a_part(num_servers):
    parts = Parts.of(SIZES, list(SIZES), num_servers)
    assert set(parts.server_of) == set(range(num_servers))


def test_more_servers_than_layers_are_refused_with_how_many_would_do():
    with pytest.raises(ConfigError, match=r"4 servers in a group but the model has only 3 layers.*at most.* 3"):
        Parts.of(SIZES, list(SIZES), 4)


def test_neighbours_of_a_deep_model_travel_together():
    sizes = {f"layer{n}.weight": 10 for n in range(100)}
    parts = Parts.of(sizes, list(sizes), 2)
    assert len(parts.names) <= 16
    assert [name for part in parts.names for name in part] == list(sizes)
