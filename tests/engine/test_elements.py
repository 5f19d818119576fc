"""The first element that differs is found wherever both tensors are, and shown in values and bits."""

import pytest
import torch
from fakes import together

from evenstep.engine.elements import first_difference


def on(groups, found, expected):
    """Which worker has which: pairs of (worker, tensor)."""

    def worker(group):
        one, other = (each[1] if each is not None and each[0] == group.worker else None for each in (found, expected))
        return first_difference(group, "it", one, other)

    first, *others = together(groups, worker)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("places", [(0, 1), (2, 0), (1, 1)])
@pytest.mark.parametrize("number", [0, 4, 700, 2998])
def test_it_is_found_whoever_has_them(groups_of, places, number):
    right = torch.randn(30, 100)
    wrong = right.clone()
    wrong.view(-1)[number:] += 1
    wrong.view(-1)[number] = -0.0
    found = on(groups_of(3), (places[0], wrong), (places[1], right))
    value = right.view(-1)[number]
    assert found.index == [number // 100, number % 100]
    assert found.found == ("-0.0", "0x80000000")
    assert found.expected == (str(value.item()), f"0x{value.view(torch.int32).item() & 0xFFFFFFFF:08x}")
    assert str(found).startswith(f"element {found.index} is -0.0 (bits 0x80000000), not ")


@pytest.mark.parametrize(
    ("wrong", "right", "found", "expected"),
    [
        (torch.tensor(3), torch.tensor(2), ("3", "0x0000000000000003"), ("2", "0x0000000000000002")),
        (torch.tensor([True]), torch.tensor([False]), ("True", "0x01"), ("False", "0x00")),
        (torch.tensor([1.5]).bfloat16(), torch.tensor([1.0]).bfloat16(), ("1.5", "0x3fc0"), ("1.0", "0x3f80")),
    ],
)
def test_of_any_type(groups_of, wrong, right, found, expected):
    element = on(groups_of(2), (0, wrong), (1, right))
    assert (element.found, element.expected) == (found, expected)


def test_what_is_not_there_or_not_of_one_kind_has_none(groups_of):
    x = torch.zeros(3)
    assert on(groups_of(2), (0, x), None) is None
    assert on(groups_of(2), (0, x), (1, torch.zeros(4))) is None
    assert on(groups_of(2), (0, x), (1, x.clone())) is None
