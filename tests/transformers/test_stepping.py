"""While a run steps, the optimizer of the loops does nothing but satisfy schedulers; afterwards it steps again."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from evenstep.transformers.stepping import own_optimizer, step_elsewhere, step_here


@pytest.fixture
def prepared():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return model, optimizer, Accelerator(cpu=True).prepare(optimizer)


def test_the_own_optimizer_is_found_inside_and_is_itself(prepared):
    _, optimizer, wrapped = prepared
    assert wrapped is not optimizer
    assert own_optimizer(wrapped) is own_optimizer(optimizer) is optimizer


def test_a_step_changes_nothing_and_schedulers_believe_it(prepared):
    model, optimizer, wrapped = prepared
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = model.weight.clone()
    model.weight.grad = torch.ones_like(model.weight)
    step_elsewhere(wrapped)
    wrapped.step()
    assert torch.equal(model.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a scheduler that steps before its optimizer
        scheduler.step()
    step_here(wrapped)
    wrapped.step()
    assert not torch.equal(model.weight, before)


def test_it_is_undone_only_if_it_was_done(prepared):
    _, _, wrapped = prepared
    step_here(wrapped)
    assert "step" not in vars(wrapped)
