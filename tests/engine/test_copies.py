"""Copies of many tensors are those of one after the other, whatever their types and layouts."""

import torch

from evenstep.engine.copies import Copier, Copies


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
    Copies(zip(targets, sources, strict=True)).make()
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    assert not targets[0].requires_grad


def test_nothing_is_nothing():
    Copies([]).make()


def test_copying_is_in_place_and_leaves_what_is_the_same_alone():
    there = {"a": torch.zeros(2), "b": torch.ones(2)}
    before = {name: t.data_ptr() for name, t in there.items()}
    version = there["b"]._version
    Copier().copy({"a": torch.full((2,), 3.0), "b": there["b"]}, there)
    assert there["a"].tolist() == [3.0, 3.0]
    assert {name: t.data_ptr() for name, t in there.items()} == before
    assert there["b"]._version == version


def test_a_copier_copies_what_it_is_given_each_time():
    copier, first, second = Copier(), {"a": torch.zeros(2)}, {"a": torch.zeros(2)}
    source = {"a": torch.ones(2)}
    for to in (first, second, first):
        copier.copy(source, to)
        assert torch.equal(to["a"], source["a"])
        source["a"].add_(1)  # the same tensor with another value
    copier.copy({"a": torch.full((2,), 9.0)}, first)
    assert first["a"].tolist() == [9.0, 9.0]
    assert second["a"].tolist() == [2.0, 2.0]
