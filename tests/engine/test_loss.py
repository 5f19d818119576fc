"""What a step function may return, and what backward begins from."""

import math

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.engine.loss import Loss, split


def gradient_of(losses, x):
    (found,) = torch.autograd.grad(sum(losses), x)
    return found


def test_shares_of_plain_losses_add_up_to_the_mean_over_the_batch():
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    parts = [x[:3], x[3:4], x[4:]]
    shares = [split((part**2).mean())[0].share(len(part), 7) for part in parts]
    assert torch.allclose(gradient_of(shares, x), gradient_of([(x**2).mean()], x), atol=0, rtol=1e-15)


@pytest.mark.parametrize("as_total", [False, True])
def test_shares_of_weighted_losses_add_up_to_the_mean_but_for_one_factor(as_total):
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1.0])

    def loss(rows):
        total, weight = (x[rows] ** 2 * mask[rows]).sum(), mask[rows].sum()
        return Loss(total=total, weight=weight) if as_total else Loss(total / weight, weight=weight)

    parts = [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
    shares = [split(loss(rows))[0].share(len(x[rows]), 7) for rows in parts]
    found = gradient_of([share for share in shares if share is not None], x) * 7 / mask.sum()
    assert torch.allclose(found, gradient_of([(x**2 * mask).sum() / mask.sum()], x), atol=0, rtol=1e-15)


def test_a_part_of_weight_0_has_no_share_even_if_its_mean_is_no_number():
    assert split(Loss(torch.tensor(math.nan), weight=0))[0].share(4, 8) is None


def test_metrics_come_beside_the_loss():
    loss, metrics = split((torch.ones(1, 1), {"hit": 0.5}))
    assert loss.value.shape == ()
    assert metrics == {"hit": 0.5}


def test_what_is_detached_keeps_its_weight_and_loses_its_graph():
    x = torch.ones((), requires_grad=True)
    detached = split(Loss(x * 2, weight=3))[0].detached()
    assert not detached.value.requires_grad
    assert not detached.loss.value.requires_grad
    assert (detached.loss.value, detached.loss.weight, detached.loss.is_total) == (2.0, 3, False)


@pytest.mark.parametrize("value", [None, 1.0, torch.ones(2), (torch.ones(()), [1]), (torch.ones(()), {}, 3)])
def test_anything_else_is_refused_with_what_was_expected(value):
    with pytest.raises(ConfigError, match="expected the mean loss of its part as a tensor with one element"):
        split(value)


def test_the_shape_of_a_loss_with_several_elements_is_named():
    with pytest.raises(ConfigError, match=r"returned a Tensor of shape \(2,\)"):
        split(torch.ones(2))


@pytest.mark.parametrize("values", [{}, {"mean": 1.0, "total": 2.0}])
def test_a_loss_is_a_mean_or_a_total(values):
    with pytest.raises(ConfigError, match="a mean or a total, one of them"):
        Loss(**values, weight=1)
