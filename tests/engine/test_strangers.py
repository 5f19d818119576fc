"""Leaves that a loss depends on and nobody trains are found in its graph, at next to no cost."""

import pytest
import torch
from torch import nn

from evenstep.core.errors import UnsupportedError
from evenstep.engine.strangers import Strangers


def function(part):
    return part


def test_a_parameter_of_nobody_is_named_by_its_shape():
    known, stranger = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 2))
    with pytest.raises(UnsupportedError, match=r"a parameter of shape \(3, 2\) that is in no prepared model"):
        Strangers().look(function, 0, None, [(known * 2).sum(), (stranger @ known).sum()], [known])


def test_known_parameters_tensors_of_one_step_and_frozen_ones_are_fine():
    known, leaf = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    Strangers().look(function, 0, None, [(known * leaf * frozen).sum(), torch.ones(())], [known])


def test_a_graph_that_comes_together_again_is_gone_through_once():
    known = nn.Parameter(torch.ones(2))
    x = known
    for _ in range(40):
        x = x + x
    Strangers().look(function, 0, None, [x.sum()], [known])


def test_a_step_function_is_looked_at_when_it_is_new_and_seldom_after_that():
    strangers = Strangers()
    assert strangers.is_due(function, 0)
    strangers.look(function, 0, None, [], [])
    strangers._looked_s = 1.0
    assert not strangers.is_due(function, 0)
    assert strangers.is_due(lambda part: part, 0), "another one"
    strangers.took(1000.0)
    assert strangers.is_due(function, 0), "steps have taken so long that it costs nothing"


def test_a_function_that_is_made_anew_in_every_step_is_the_same_one():
    def make():
        return lambda part: part

    strangers = Strangers()
    strangers.look(make(), 0, None, [], [])
    strangers._looked_s = 1.0
    assert not strangers.is_due(make(), 0)


def test_one_that_fails_is_looked_at_again():
    strangers = Strangers()
    with pytest.raises(UnsupportedError):
        strangers.look(function, 0, None, [nn.Parameter(torch.ones(())) * 1], [])
    strangers._looked_s = 1.0
    assert strangers.is_due(function, 0)


def uses(strangers, step, leaf, given=None):
    strangers.look(function, step, given, [(leaf * 2).sum()], [])


def test_a_tensor_that_two_steps_use_comes_from_outside():
    strangers, leaf = Strangers(), torch.ones(3, requires_grad=True)
    uses(strangers, 0, leaf)
    uses(strangers, 0, leaf)  # the next shard, or the step done again
    assert strangers.is_due(function, 1), "a second step is always looked at"
    with pytest.raises(UnsupportedError, match=r"a tensor of shape \(3,\) that is in no prepared model"):
        uses(strangers, 1, leaf)


def test_one_that_each_step_makes_or_is_given_does_not():
    strangers, part = Strangers(), torch.ones(3, requires_grad=True)
    for step in range(4):
        uses(strangers, step, torch.ones(3, requires_grad=True))
        uses(strangers, step, part, given={0: [part]})
