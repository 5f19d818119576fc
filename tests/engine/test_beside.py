"""Tensors that are in no prepared model are compared as long as only the script changes them, between steps."""

import copy

import pytest
import torch
from torch import nn

from evenstep.engine.beside import Beside
from evenstep.engine.slots import ModelSlots


@pytest.fixture
def model():
    return nn.Linear(2, 2)


@pytest.fixture
def beside(model):
    slots = ModelSlots()
    slots.add(model, "model")
    return Beside(slots)


def looks(beside, function, steps):
    found = {}
    for step in steps:
        found[step] = beside.look(function, step)
        function(torch.ones(2))
        beside.called(function, step)
    return found


class Anchors:
    def __init__(self, model):
        self.values = [p.detach().clone() for p in model.parameters()]

    def __call__(self, part):
        return part.mean() + self.values[0].sum()


def test_a_copy_of_the_model_a_list_and_a_tensor_are_seen_and_the_model_is_not(beside, model):
    teacher, anchors, scale = copy.deepcopy(model), [torch.ones(2)], {"scale": torch.ones(1)}
    (seen,) = looks(beside, lambda part: teacher(model(part)) * scale["scale"] + anchors[0], [0]).values()
    assert seen.keys() == {"variable 'teacher'", "variable 'anchors'", "variable 'scale'"}
    assert looks(beside, Anchors(model), [0])[0].keys() == {"attribute 'values' of its Anchors"}
    alias = model.weight.detach()
    assert looks(beside, lambda part: part * alias, [0]) == {0: {}}


def test_it_looks_when_torch_counts_a_change_and_now_and_then_for_others(beside, model):
    teacher = copy.deepcopy(model)

    def function(part):
        return teacher(part)

    found = looks(beside, function, range(6))
    assert [step for step, seen in found.items() if seen] == [0, 1, 2, 3]
    with torch.no_grad():
        teacher.weight.add_(1)
    changed = beside.look(function, 6)
    assert changed != found[0]
    teacher.weight.data.add_(1)  # not counted
    assert beside.look(function, 7) == {}
    assert beside.look(function, 16) not in ({}, changed)
    teacher = nn.Linear(2, 2)
    assert beside.look(function, 17).keys() == changed.keys()


@pytest.mark.parametrize("first", [0, 5])
def test_what_the_function_itself_changes_is_left_alone(beside, first):
    total, last, kept = torch.zeros(2), torch.zeros(2), []

    def function(part):
        nonlocal last
        kept.append(last)  # so that it stays alive
        total.add_(part)
        last = part * 2

    looks(beside, function, range(first, first + 2))
    assert beside.look(function, 16) == {}


@pytest.mark.parametrize("first_miss", [0, 7])
def test_what_may_be_a_cache_of_the_function_is_left_alone(beside, model, first_miss):
    calls, masks, alone = [], {}, {}

    def function(part):
        calls.append(None)
        if len(calls) > first_miss:
            masks.setdefault(len(calls) // 5, torch.ones(2))
            alone.setdefault("mask", torch.ones(2))
            model.mask = part * 2
        return part

    assert all(seen == {} for seen in looks(beside, function, range(40)).values())


def test_data_sparse_tensors_and_outputs_are_not_compared(beside, model, monkeypatch):
    monkeypatch.setattr("evenstep.engine.beside._BYTES", 64)
    data, sparse, output = torch.zeros(100), torch.eye(2).to_sparse(), model(torch.ones(2))
    assert looks(beside, lambda part: (data, sparse, output), [0]) == {0: {}}
    large = nn.Parameter(data)
    assert looks(beside, lambda part: large, [0])[0].keys() == {"variable 'large'"}
