"""A step function that keeps something from call to call is told so, by the name of what it keeps."""

import functools
import itertools
import random
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from evenstep.engine.leftovers import Leftovers
from evenstep.run.summed import Summed


def called(function, modules=(), steps=3):
    """What is warned of in the first steps of a function."""
    leftovers = Leftovers(list(modules))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            before = leftovers.before(function, step)
            function(torch.ones(2))
            leftovers.after(function, before)
    return [str(each.message) for each in said]


def counting():
    calls = 0

    def function(part):
        nonlocal calls
        calls += 1
        return part.mean() * calls

    return function


def recurrent():
    hidden = None

    def function(part):
        nonlocal hidden
        hidden = (part * 2, part * 3)
        return part.mean()

    return function


def averaging():
    mean = torch.zeros(2)

    def function(part):
        mean.mul_(0.9).add_(part)
        return part.mean()

    return function


def counting_in_a_dict():
    state = {"calls": 0}

    def function(part):
        state["calls"] += 1
        return part.mean() * state["calls"]

    return function


def counting_in_a_list():
    state = [0]

    def function(part):
        state[0] += 1
        return part.mean() * state[0]

    return function


class Smoothed:
    def __init__(self):
        self.value = torch.zeros(2)

    def update(self, part):
        self.value = 0.9 * self.value + part


def smoothing():
    mean = Smoothed()

    def function(part):
        mean.update(part)
        return part.mean()

    return function


def counting_in_a_namespace():
    state = types.SimpleNamespace(calls=0)

    def function(part):
        state.calls += 1
        return part.mean()

    return function


def calling_another():
    count = counting()
    return lambda part: count(part) * 2


class CallableCounting:
    def __init__(self):
        self.calls = 0

    def __call__(self, part):
        self.calls += 1
        return part.mean()


class Shared:
    calls = 0

    def add(self):
        Shared.calls += 1


def counting_in_a_class():
    def function(part):
        Shared.calls += 1
        return part.mean()

    return function


def calling_a_method():
    shared = Shared()

    def function(part):
        shared.add()
        return part.mean()

    return function


def counting_in_a_function():
    def function(part):
        function.calls += 1
        return part.mean()

    function.calls = 0
    return function


def weighing():
    weights = np.ones(3)

    def function(part):
        weights[1] *= 1.5
        return part.mean() * weights.mean()

    return function


def drawing(generator, draw):
    def function(part):
        return part.mean() * draw(generator)

    return function


def taking_the_next():
    others = itertools.cycle([1, 2, 3])

    def function(part):
        return part.mean() * next(others)

    return function


def deep_inside():
    trainer = types.SimpleNamespace(figures={"calls": 0})

    def function(part):
        trainer.figures["calls"] += 1
        return part.mean()

    return function


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (counting, "variable 'calls'"),
        (calling_another, "variable 'calls'"),
        (CallableCounting, "attribute 'calls' of its CallableCounting"),
        (lambda: Summed(counting(), 2), "variable 'calls'"),
        (counting_in_a_class, "variable 'Shared.calls'"),
        (calling_a_method, "variable 'Shared.calls'"),
        (counting_in_a_function, "attribute 'calls' of function 'function'"),
        (weighing, "variable 'weights'"),
        (lambda: drawing(torch.Generator(), lambda g: torch.rand(2, generator=g)), "variable 'generator'"),
        (lambda: drawing(np.random.default_rng(0), lambda g: g.random()), "variable 'generator'"),
        (lambda: drawing(np.random.RandomState(0), lambda g: g.rand()), "variable 'generator'"),
        (lambda: drawing(random.Random(0), lambda g: g.random()), "variable 'generator'"),
        (taking_the_next, "variable 'others'"),
        (deep_inside, "entry 'calls' of attribute 'figures' of variable 'trainer'"),
        (recurrent, "variable 'hidden'"),
        (averaging, "variable 'mean'"),
        (counting_in_a_dict, "entry 'calls' of variable 'state'"),
        (counting_in_a_list, "entry 0 of variable 'state'"),
        (smoothing, "attribute 'value' of variable 'mean'"),
        (counting_in_a_namespace, "attribute 'calls' of variable 'state'"),
    ],
)
def test_what_it_keeps_is_named_once_with_what_works(make, name):
    (said,) = called(make())
    assert f"changes {name} from call to call" in said
    assert "run.carry" in said


TOTAL = 0


def add_up(part):
    global TOTAL
    TOTAL += 1
    return part.mean()


def test_globals_and_partial_functions_are_looked_at_too():
    (said,) = called(functools.partial(add_up))
    assert "variable 'TOTAL'" in said


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.cache, self.shown, self.memory = 0, None, None, None

    def forward(self, x):
        return x


@pytest.mark.parametrize("name", ["calls", "memory"])
def test_an_attribute_of_a_layer_is_named_with_its_class(name):
    layer = Counting()

    def function(part):
        setattr(layer, name, part.sum().detach() if name == "memory" else layer.calls + 1)

    (said,) = called(function, [layer], steps=4)
    assert f"attribute '{name}' of a Counting" in said


def test_caches_records_and_outputs_of_the_call_are_let_alone():
    layer, seen, weight = Counting(), [], nn.Parameter(torch.ones(2))

    def function(part):
        layer.cache = layer.cache if layer.cache is not None else part * 2
        layer.shown = part * weight  # has a graph, as the weight that weight norm sets
        seen.append(1)

    assert called(function, [layer], steps=4) == []


def test_a_buffer_that_a_forward_makes_is_named():
    layer = Counting()
    layer.register_buffer("mean", None)

    def function(part):
        layer.mean = part.mean() if layer.mean is None else layer.mean * 0.9 + part.mean()

    (said,) = called(function, [layer], steps=4)
    assert "buffer 'mean' of a Counting, which run.prepare did not find" in said


def test_generators_that_are_seeded_for_every_part_are_let_alone():
    ours = torch.default_generator, np.random.mtrand._rand, random.random.__self__

    def function(part):
        return part.mean() * torch.rand(2, generator=ours[0]) * ours[1].rand() * ours[2].random()

    assert called(function, steps=4) == []


def test_the_first_steps_are_looked_at_and_later_ever_fewer():
    leftovers, function = Leftovers([]), counting()
    steps = (0, 0, 1, 2, 3, 4, 5, 8, 8, 9)
    assert [step for step in steps if leftovers.before(function, step) is not None] == [0, 1, 2, 4, 8]
