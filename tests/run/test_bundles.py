"""A model is cut into layers that travel by themselves, each to one server, in the order of backward."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.run.bundles import Bundles

SIZES = {"a.weight": 40, "a.bias": 4, "b.weight": 80, "c.weight": 8, "c.bias": 8}


def test_a_layer_is_a_part_with_its_parameters_last_first():
    bundles = Bundles.of(SIZES, ["a.weight", "a.bias", "b.weight", "c.weight", "c.bias"], 1)
    assert bundles.names == (("a.weight", "a.bias"), ("b.weight",), ("c.weight", "c.bias"))
    assert bundles.trained == ((1, 0), (2,), (4, 3))
    assert bundles.filled == [2, 1, 0]
    assert bundles.bundle_of["c.bias"] == 2
    assert bundles.trained_by == {0: 0, 1: 0, 2: 1, 3: 2, 4: 2}


def test_what_is_not_trained_is_in_a_part_and_has_no_number():
    bundles = Bundles.of(SIZES, ["c.bias", "a.weight"], 1)
    assert bundles.trained == ((1,), (), (0,))
    assert bundles.filled == [2, 0]
    assert "b.weight" in bundles.bundle_of


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_every_server_has_a_bundle(num_servers):
    bundles = Bundles.of(SIZES, list(SIZES), num_servers)
    assert set(bundles.server_of) == set(range(num_servers))


def test_more_servers_than_layers_are_refused_with_how_many_would_do():
    with pytest.raises(ConfigError, match=r"4 servers in a group but the model has only 3 layers.*at most.* 3"):
        Bundles.of(SIZES, list(SIZES), 4)


def test_neighbours_of_a_deep_model_travel_together():
    sizes = {f"layer{n}.weight": 10 for n in range(100)}
    bundles = Bundles.of(sizes, list(sizes), 2)
    assert len(bundles.names) <= 16
    assert [name for bundle in bundles.names for name in bundle] == list(sizes)
