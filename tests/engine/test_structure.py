"""Nested tensors are taken apart into JSON and tensors, and put together again."""

import json

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.engine.structure import describe, fill, specs


def test_what_is_taken_apart_comes_back_after_a_journey_as_json():
    value = {"scores": torch.arange(6.0).view(3, 2), "pair": (torch.arange(3), [torch.zeros(3, 1, 4)])}
    leaves = []
    description = json.loads(json.dumps(describe(value, leaves, "it")))
    assert [leaf.shape for leaf in leaves] == [(3, 2), (3,), (3, 1, 4)]
    assert specs(description) == [["float32", [2]], ["int64", []], ["float32", [1, 4]]]
    found = fill(description, iter(leaves))
    assert found["scores"] is leaves[0]
    assert isinstance(found["pair"], tuple)
    assert isinstance(found["pair"][1], list)
    assert found["pair"][1][0] is leaves[2]


def test_anything_else_is_refused_by_name():
    with pytest.raises(ConfigError, match="what the model gave is a str; expected tensors in tuples, lists or dicts"):
        describe([torch.zeros(1), "text"], [], "what the model gave")
