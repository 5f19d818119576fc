"""Structures come apart and together again as what they were."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.data.nested import children, rebuild, to_device

Point = namedtuple("Point", "x y")


class Encoding(UserDict):
    """As the `BatchEncoding` of a tokenizer: a mapping that is no dict, with more beside its items."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings


class NoUpdate(OrderedDict):
    """As the outputs of transformers."""

    def update(self, *_):
        raise TypeError("update is not for you")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Unbuildable(Mapping):
    def __init__(self, a, b):
        self.items_ = {"a": a, "b": b}

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return 2


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": 2},
        defaultdict(list, a=1, b=2),
        OrderedDict(a=1, b=2),
        NoUpdate(a=1, b=2),
        Encoding({"a": 1, "b": 2}, "beside"),
        MappingProxyType({"a": 1, "b": 2}),
        Point(1, 2),
        [1, 2],
        (1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_structure_keeps_its_kind_and_the_first_one_its_values(value):
    twin = rebuild(value, lambda item: 10 * item)
    assert type(twin) is type(value)
    assert list((children(twin) or {}).values()) == [10, 20]
    assert list((children(value) or {}).values()) == [1, 2]
    assert getattr(twin, "encodings", None) == getattr(value, "encodings", None)


def test_children_are_named_as_one_would_write_them():
    assert list(children({"a": 0, 3: 1})) == ["['a']", "[3]"]
    assert list(children(Point(0, 1))) == [".x", ".y"]
    assert list(children([0, 1])) == ["[0]", "[1]"]
    assert list(children(Sample(torch.zeros(1), "a"))) == [".x", ".name"]
    assert children("text") is None


def test_tensors_move_wherever_they_are():
    value = {
        "a": [Point(torch.zeros(2), "text")],
        "b": Encoding({"c": (torch.ones(1),)}),
        "d": Sample(torch.ones(2), "e"),
    }
    moved = to_device(value, "meta")
    assert moved["a"][0].x.device.type == "meta"
    assert moved["b"]["c"][0].device.type == "meta"
    assert moved["d"].x.device.type == "meta"
    assert (moved["a"][0].y, moved["d"].name) == ("text", "e")
    assert value["d"].x.device.type == "cpu"


def test_a_mapping_that_cannot_be_built_from_a_dict_says_what_to_pass():
    with pytest.raises(ConfigError, match=r"holds a Unbuildable.*pass dict\(\.\.\.\) of it"):
        rebuild(Unbuildable(1, 2), lambda item: item)
