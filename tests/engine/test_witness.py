"""A witness notes everything that a computation gives, in an order that does not depend on how it came."""

from dataclasses import replace

import pytest
import torch
from workshop import Batch, Worker, network, samples

from evenstep.engine import witness as module
from evenstep.engine.lanes import Crew
from evenstep.engine.results import Mean, ShardResult
from evenstep.engine.witness import Witness


def full(flip=None, order=1):
    """A witness of one shard that has seen something of every kind; `flip` alters one of them."""
    tensors = {name: torch.arange(4.0) + n for n, name in enumerate(["samples", "row", "a", "b", "buffer", "carry"])}
    if flip in tensors:
        tensors[flip].view(torch.int32)[2] ^= 1
    witness = Witness([3])
    witness.samples(3, [tensors["samples"], {"label": torch.tensor([1])}])
    crew = Crew(lambda tag, rows: rows, lambda tag, mine: [mine], [[0], [3]], 1, 4, True)
    witness.around(crew, "step 1: ").gather("step 1: norm forward", tensors["row"].unsqueeze(0))
    for name in "ab"[::order]:
        witness.gradient(3, name, tensors[name])
    witness.buffers(3, {"mean": tensors["buffer"]})
    witness.carried(3, "carry[0]", tensors["carry"])
    loss, metric = Mean(2.0 if flip == "loss" else 1.0, 4.0), Mean(3.0 if flip == "metric" else 1.0, 4.0)
    witness.results({3: ShardResult(loss, False, {"right": metric}, {"hard": "[2]" if flip == "note" else "[1]"})})
    return witness


def test_the_same_computation_leaves_the_same_trail_in_whatever_order_gradients_come():
    assert full().trails() == full(order=-1).trails()
    assert full().digests() == full(order=-1).digests()


@pytest.mark.parametrize(
    ("flip", "stage", "item"),
    [
        ("samples", 0, "samples[0]"),
        ("row", 1, "statistics of 'norm forward'"),
        ("a", 2, "gradient of 'a'"),
        ("b", 2, "gradient of 'b'"),
        ("buffer", 2, "buffer 'mean'"),
        ("carry", 2, "carry[0]"),
        ("loss", 2, "loss"),
        ("metric", 2, "metric 'right'"),
        ("note", 2, "note 'hard'"),
    ],
)
def test_one_bit_of_anything_changes_that_item_and_nothing_else(flip, stage, item):
    expected, found = full().trails()[3], full(flip).trails()[3]
    differing = [
        (n, name)
        for n, (one, other) in enumerate(zip(expected, found, strict=True))
        for (name, digest), (_, theirs) in zip(one, other, strict=True)
        if digest != theirs
    ]
    assert differing == [(stage, item)]
    assert full().digests() != full(flip).digests()


def test_where_nobody_else_is_met_nothing_is_told_apart():
    crew = Crew(lambda tag, rows: rows, lambda tag, mine: [mine], [[3]], 0, 4, True)
    assert Witness([3]).around(crew, "") is crew


def test_copies_are_kept_while_there_is_room_and_of_what_is_wanted_in_any_case(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", 40)
    witness = Witness([0], {(0, "gradient of 'c'")})
    values = {name: torch.full((8,), float(n)) for n, name in enumerate("abc")}
    for name, value in values.items():
        witness.gradient(0, name, value)
        value.add_(1)
    assert [witness.copy(0, f"gradient of '{name}'") is not None for name in "abc"] == [True, False, True]
    assert (witness.copy(0, "gradient of 'a'") == 0).all(), "as it was"


def test_gradients_that_come_at_once_are_noted_as_if_they_came_one_by_one():
    one, other = Witness([0]), Witness([0])
    gradients = [torch.randn(3), None, torch.randn(2, 2)]
    one.gradients(0, ["a", "b", "c"], gradients)
    for name, gradient in zip("abc", gradients, strict=True):
        if gradient is not None:
            other.gradient(0, name, gradient)
    assert one.trails() == other.trails()


@pytest.mark.parametrize("norm", [False, True])
def test_a_computation_tells_it_everything(holdings_of, norm):
    (holdings,) = holdings_of()
    model = network(norm=norm)
    with Worker(holdings, model, torch.optim.SGD(model.parameters(), 0.1)) as worker:
        witness = Witness(range(4))
        work = worker.work(Batch(*samples()), lambda p: torch.nn.functional.cross_entropy(model(p[0]), p[1]))
        results = worker.engine.compute.run(replace(work, witness=witness, counts=False))()
        witness.results(results)
        names = {name for name, _ in witness.trails()[2][-1]}
        buffers = {f"buffer 'model.{name}'" for name, _ in model.named_buffers()}
        gradients = {f"gradient of 'model.{name}'" for name, _ in model.named_parameters()}
        assert names == gradients | buffers | {"loss"}
        assert not holdings.optimizers[0].gradients.__dict__.get("_sums"), "nothing was added up"
