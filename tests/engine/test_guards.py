"""Whatever plain value a step function could branch on is seen when it changes, and nothing else is."""

import functools
import types

import pytest
import torch
from torch import nn

from evenstep.engine import guards
from evenstep.engine.guards import Modules, difference

SCALE = 1.0
SETTINGS = {"beta": 0.5, "names": ["a", "b"]}


def uses_globals(part):
    return part * SCALE + SETTINGS["beta"]


def module():
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


def look(function, modules):
    return guards.look(function, Modules(modules))


def changed(function, change, modules=()):
    before = look(function, modules)
    assert difference(before, look(function, modules)) is None, "nothing has changed yet"
    change()
    return difference(before, look(function, modules))


def test_a_closure(monkeypatch):
    beta = 0.1

    def function(part):
        return part * beta

    def change():
        nonlocal beta
        beta = 0.2

    assert changed(function, change) == "beta is 0.1 at one time and 0.2 at another"


def test_a_lambda_made_anew_with_another_value_is_another_and_with_the_same_is_not():
    def make(beta):
        return lambda part: part * beta

    assert difference(look(make(1), ()), look(make(1), ())) is None
    assert "beta" in difference(look(make(1), ()), look(make(2), ()))


def test_globals_and_what_they_hold(monkeypatch):
    assert "SCALE" in changed(uses_globals, lambda: monkeypatch.setitem(globals(), "SCALE", 2.0))
    assert "SETTINGS['beta']" in changed(uses_globals, lambda: monkeypatch.setitem(SETTINGS, "beta", 0.7))
    assert "SETTINGS['names'][1]" in changed(uses_globals, lambda: SETTINGS["names"].__setitem__(1, "c"))


def test_attributes_of_objects_methods_partials_and_defaults():
    config = types.SimpleNamespace(inner=types.SimpleNamespace(rate=1))

    class Task:
        def __init__(self):
            self.weight = 1.0

        def step(self, part, power=2):
            return part * self.weight**power

    task = Task()
    assert "config.inner.rate" in changed(
        lambda part: part * config.inner.rate, lambda: setattr(config.inner, "rate", 2)
    )
    assert "self.weight" in changed(task.step, lambda: setattr(task, "weight", 3.0))
    assert "argument power" in difference(
        look(functools.partial(task.step, power=2), ()), look(functools.partial(task.step, power=3), ())
    )


def test_functions_that_the_function_calls():
    beta = [0.1]

    def inner(x):
        return x * beta[0]

    def outer(part):
        return inner(part)

    assert "beta[0]" in changed(outer, lambda: beta.__setitem__(0, 0.2))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: setattr(m[1], "p", 0.5), "in a Dropout"),
        (lambda m: m.eval(), "training"),
        (lambda m: m[0].requires_grad_(False), "in a Linear"),
        (lambda m: setattr(m[0], "temperature", 2.0), "in a Linear"),
    ],
)
def test_plain_attributes_of_modules(change, sentence):
    model = module()
    assert sentence in changed(lambda part: model(part), lambda: change(model), list(model.modules()))


def test_modes_of_torch():
    with torch.autocast("cpu", torch.bfloat16):
        inside = look(uses_globals, ())
    assert "autocast" in difference(look(uses_globals, ()), inside)


def test_small_tensors_on_the_host_count_by_value_and_others_by_place():
    weights, large = torch.tensor([1.0, 2.0]), torch.zeros(1000)
    assert "weights (values)" in changed(lambda part: part * weights, lambda: weights.mul_(2))
    assert changed(lambda part: part * large, lambda: large.add_(1)) is None


def test_parameters_that_training_changes_do_not_count():
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def function(part):
        return model(part).mean(), optimizer

    def train():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert changed(function, train, list(model.modules())) is None


def test_things_that_hold_themselves_end():
    loop = []
    loop.append(loop)

    def function(part):
        return part, loop

    assert difference(look(function, ()), look(function, ())) is None


def test_modules_that_did_not_change_are_seen_to_be_the_same_at_once():
    model = module()
    modules = Modules(list(model.modules()))
    before = modules.look()
    assert modules.look() is before
    model[1].p = 0.5
    assert modules.look() is not before
    model[1].p = 0.1
    assert difference(before, modules.look()) is None
