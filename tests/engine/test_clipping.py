"""Gradients are clipped as torch clips them, whoever owns which."""

import json
import math

import pytest
import torch
from torch import nn

from evenstep.core.errors import ConfigError
from evenstep.engine.clipping import Clipping, norms_of, total_norm


def gradients():
    generator = torch.Generator().manual_seed(4)
    return {i: torch.randn(shape, generator=generator) for i, shape in enumerate([(3, 4), (5,), (), (2, 2, 2)])}


def by_torch(norm, value):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients().values()]
    for p, g in zip(parameters, gradients().values(), strict=True):
        p.grad = g
    if value is not None:
        torch.nn.utils.clip_grad_value_(parameters, value)
    total = None if norm is None else torch.nn.utils.clip_grad_norm_(parameters, norm, foreach=False)
    return total, [p.grad for p in parameters]


@pytest.mark.parametrize("owners", [[(0, 1, 2, 3)], [(0, 3), (1,), (2,)], [(2, 3), (), (1, 0)]])
@pytest.mark.parametrize(
    ("norm", "value"),
    [(0.7, None), (100.0, None), (None, 0.3), (0.7, 0.3), (0.0, None), (math.inf, None)],
)
def test_clipping_is_that_of_torch_to_the_bit(owners, norm, value):
    clipping = Clipping(norm, value)
    found = gradients()
    shares = [{i: found[i] for i in owned} for owned in owners]
    for share in shares:
        clipping.clip_elements(share.values())
    total, expected = by_torch(norm, value)
    if norm is not None:
        norms = [json.loads(json.dumps(norms_of(share))) for share in shares]
        ours = total_norm(norms, range(4), torch.float32)
        assert torch.equal(ours, total)
        for share in shares:
            clipping.scale_down(share.values(), ours)
    assert all(torch.equal(found[i], there) for i, there in enumerate(expected))


def test_nothing_is_clipped_unless_it_is_asked_for():
    assert not Clipping()
    assert Clipping(norm=0.0)
    assert Clipping(value=1.0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"norm": -1.0}, "clip_norm=-1.0, expected"),
        ({"value": float("nan")}, "clip_value=nan, expected"),
        ({"order": "size"}, "clip_order='size', expected 'model' or 'optimizer'"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(limits, message):
    with pytest.raises(ConfigError, match=message):
        Clipping(**limits)
