"""Summed gradients are limited as one, whoever has which of them: as torch does it to all of them in one place."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from evenstep.engine.clipping import Clipping, norms_of
from evenstep.engine.limiting import Limiting
from evenstep.engine.scaling import Scaling

NAMES = ["b", "a", "d", "c"]  # as the optimizer has them; the model has them in the order of the alphabet
SHAPES = [(300, 4), (500,), (1,), (20, 20, 2)]
ORDERS = {"optimizer": [0, 1, 2, 3], "model": [1, 0, 3, 2]}


def gradients():
    generator = torch.Generator().manual_seed(4)
    return {i: torch.randn(shape, generator=generator) * 10.0**-i for i, shape in enumerate(SHAPES)}


def limiting(*, shared=True, others=None):
    """What limits the sums of one worker, beside another that offers something in its only exchange."""

    def gather_json(tag, mine):
        tags.append(tag)
        return json.loads(json.dumps([mine, *([] if others is None else [others])]))

    tags = []
    models = SimpleNamespace(slots=SimpleNamespace(parameters=dict.fromkeys(sorted(NAMES))))
    group, memory = SimpleNamespace(gather_json=gather_json), SimpleNamespace(shared=shared)
    return Limiting(SimpleNamespace(group=group, models=models, memory=memory)), tags


def work(clipping=None, scale=None):
    prepared = SimpleNamespace(names=NAMES, parameters=[nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    return SimpleNamespace(clipping=clipping or Clipping(), scale=scale, prepared=prepared, where="step 0: ")


def by_torch(order, norm, value):
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for i, gradient in gradients().items():
        parameters[i].grad = gradient
    listed = [parameters[i] for i in order]
    if value is not None:
        torch.nn.utils.clip_grad_value_(listed, value)
    total = torch.nn.utils.clip_grad_norm_(listed, norm, foreach=False)
    return float(total), [p.grad for p in parameters]


@pytest.mark.parametrize("order", ["model", "optimizer"])
@pytest.mark.parametrize("value", [None, 0.3])
@pytest.mark.parametrize("mine", [(0, 1, 2, 3), (2, 0), ()])
def test_an_owner_scales_its_sums_by_the_norm_over_all(mine, value, order):
    clipping, found = Clipping(0.7, value, order), gradients()
    others = {i: found.pop(i) for i in range(4) if i not in mine}
    clipping.clip_elements(others.values())
    limits, tags = limiting(others=norms_of(others))
    total, expected = by_torch(ORDERS[order], 0.7, value)
    assert limits.clip(work(clipping), found) == total
    assert all(torch.equal(found[i], expected[i]) for i in mine)
    assert tags == ["step 0: gradient norms"]


@pytest.mark.parametrize("order", ["model", "optimizer"])
def test_a_worker_that_has_all_sums_asks_nobody(order):
    limits, tags = limiting(shared=False)
    found = gradients()
    norm = limits.clip(work(Clipping(0.7, order=order)), found)
    total, expected = by_torch(ORDERS[order], 0.7, None)
    assert float(norm) == pytest.approx(total)
    assert all(torch.allclose(found[i], expected[i]) for i in range(4))
    assert tags == []


def test_a_parameter_without_a_gradient_counts_for_nothing():
    limits, _ = limiting()
    found = {0: None, 1: torch.tensor([3.0, 4.0])}
    assert limits.clip(work(Clipping(1.0)), found) == 5.0
    assert found[0] is None
    assert torch.allclose(found[1], torch.tensor([0.6, 0.8]))


def test_without_limits_nothing_is_changed_and_nobody_is_asked():
    limits, tags = limiting()
    found = gradients()
    assert limits.clip(work(), found) is None
    assert limits.unscale(work(), found, Scaling())
    assert all(torch.equal(found[i], gradient) for i, gradient in gradients().items())
    assert tags == []


@pytest.mark.parametrize(("mine", "theirs"), [(True, True), (True, False), (False, True)])
def test_scaled_sums_are_finite_only_if_they_are_on_all_workers(mine, theirs):
    scaling = Scaling(GradScaler("cpu", init_scale=8.0))
    limits, tags = limiting(others=theirs)
    found = {0: torch.tensor([8.0, 16.0 if mine else float("inf")]), 1: None}
    assert limits.unscale(work(scale=scaling.scale), found, scaling) is (mine and theirs)
    assert found[0][0] == 1.0
    assert tags == ["step 0: scaled gradients"]
