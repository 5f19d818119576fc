"""Copies of many tensors are those of one after the other, whatever their types and layouts."""

import torch

from evenstep.engine.copies import copy_all


def test_every_tensor_gets_its_own_whatever_else_is_copied():
    sources = [
        torch.randn(3, 4, requires_grad=True),
        torch.tensor(7),
        torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(4).bfloat16(),
        torch.tensor(9),
        torch.randn(5, 3).t(),
    ]
    targets = [torch.empty_like(t) for t in sources]
    targets[2] = torch.empty(2, 3, 5, 5)
    copy_all(zip(targets, sources, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    assert not targets[0].requires_grad


def test_nothing_is_nothing():
    copy_all([])
