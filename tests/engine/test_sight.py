"""What a function can see is found wherever it, and what it calls, would find it."""

import functools

import torch
from torch import nn

from evenstep.engine.sight import Advanced, attributes, is_of_script, variables

SCALE = 2.0


class Settings:
    rate = 0.5


def scaled(part):
    return part * SCALE


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self):
        self.first = 1


class Trainer:
    def __init__(self):
        self.weight, self.scale, self.average = 1.0, 2.0, 3.0

    def loss(self, part):
        return self.weight * self._scaled(part)

    def _scaled(self, part):
        return part * self.scale * SCALE

    def evaluate(self, part):
        return part * self.average


class Layer(nn.Module):
    def forward(self, x):
        return x * SCALE


def test_variables_are_found_through_calls_classes_and_partial_functions():
    offset = torch.ones(2)

    def function(scale, part):
        return (lambda x: scaled(x) + offset)(part) * Settings.rate * scale

    seen = variables(functools.partial(function, 3.0))
    assert seen["variable 'SCALE'"] == 2.0
    assert seen["variable 'offset'"] is offset
    assert seen["variable 'Settings.rate'"] == 0.5
    assert seen["argument 0"] == 3.0


def test_functions_that_call_each_other_are_looked_at_once():
    def even(part):
        return odd(part)

    def odd(part):
        return even(part) * SCALE

    assert variables(even)["variable 'SCALE'"] == 2.0


def test_of_an_object_only_what_its_method_and_those_that_it_calls_name_is_seen():
    seen = variables(Trainer().loss)
    assert seen == {
        "attribute 'weight' of its Trainer": 1.0,
        "attribute 'scale' of its Trainer": 2.0,
        "variable 'SCALE'": 2.0,
    }


def test_what_the_forward_of_a_layer_names_is_seen():
    assert variables(print, [Layer()])["variable 'SCALE'"] == 2.0


def test_libraries_are_not_looked_into():
    assert is_of_script(Layer)
    assert not is_of_script(nn.Linear)
    assert variables(lambda part: nn.functional.relu(part)).keys() == {"variable 'nn'"}


def test_an_iterator_stands_for_itself_unless_it_is_advanced():
    numbers = iter([1])
    assert variables(lambda part: numbers)["variable 'numbers'"] is numbers
    assert isinstance(variables(lambda part: next(numbers))["variable 'numbers'"], Advanced)


def test_attributes_may_lie_in_slots():
    assert attributes(Slotted()) == {"first": 1}
