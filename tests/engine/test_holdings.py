"""What the workers hold together changes as a whole, or not at all."""

import pytest
import torch
from fakes import together
from torch import nn

from evenstep.engine.updates import OwnUpdates


def build(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def trained(holdings, model=None):
    """A model and its optimizer, prepared and stepped once."""
    model = build() if model is None else model
    added = holdings.models.add(model)
    prepared = holdings.add(torch.optim.Adam(model.parameters(), 0.1))
    prepared.gradients.plan, prepared.gradients.delivery = OwnUpdates(holdings.group).lay_out(
        prepared, [(k, k + 1) for k in range(holdings.group.num_workers)]
    )
    holdings.models.agree(added)
    news = prepared.agree()
    holdings.group.barrier("moved")
    holdings.models.bind(added)
    prepared.adopt(news, took_part=True)
    holdings.settle()
    if holdings.group.rank == 0:
        holdings.state.operation = 1
        news = prepared.update({i: torch.full_like(p, 0.5) for i, p in enumerate(model.parameters())})
    of_all = holdings.group.gather_json("news", news)
    prepared.settle(of_all[0], {i for i, _, _ in news} if holdings.group.rank == 0 else set())
    holdings.group.barrier("stepped")
    prepared.adopt(of_all[0], took_part=True)
    holdings.version += 1
    holdings.settle()
    return model


def test_parameters_have_their_full_names(holdings_of):
    (holdings,) = holdings_of()
    model = trained(holdings)
    assert [holdings.names[id(p)] for p in model.parameters()] == [
        "model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"
    ]  # fmt: skip


def test_state_of_several_optimizers_has_several_names(holdings_of):
    (holdings,) = holdings_of()
    trained(holdings)
    second = holdings.add(torch.optim.SGD([next(iter(holdings.models.slots.parameters.values()))], 0.1))
    assert holdings.optimizers[1] is second
    assert {name.split(".")[0] for name in holdings.state.entries} == {"model", "optimizer"}
    assert second.kept.news_of({"optimizer2.model.0.weight.momentum_buffer": torch.zeros(2, 3)}, {}) != []


def test_values_that_are_put_in_place_of_others_can_be_taken_back(holdings_of):
    (holdings,) = holdings_of()
    model = trained(holdings)
    before = holdings.state.fingerprint()
    holdings.state.operation = 5
    holdings.replace({"model.0.bias": torch.full((2,), 9.0), "model.1.running_mean": torch.full((2,), 8.0)})
    assert model[0].bias.tolist() == [9, 9]
    assert model[1].running_mean.tolist() == [0, 0], "a buffer is a copy"
    holdings.pull()
    assert model[1].running_mean.tolist() == [8, 8]
    holdings.state.rollback()
    holdings.pull()
    assert holdings.state.fingerprint() == before
    assert model[1].running_mean.tolist() == [0, 0]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_checkpoint_is_put_in_place_on_all_workers(holdings_of, num_workers):
    (source,) = holdings_of()
    trained(source)
    tensors = {name: t.clone() for name, t in source.state.tensors().items()}
    values, expected = dict(source.state.values), source.state.fingerprint()
    workers = [(holdings, build(seed=2)) for holdings in holdings_of(num_workers)]

    def body(worker):
        holdings, model = worker
        trained(holdings, model)
        assert holdings.state.fingerprint() != expected
        holdings.group.barrier("seen")
        holdings.state.operation = 7
        news, carried = holdings.restore(tensors, values)
        holdings.restored(news, carried, 12, took_part=True)
        return model, holdings.state.fingerprint(), holdings.version

    for model, fingerprint, version in together(workers, body):
        assert fingerprint == expected
        assert version == 12
        assert torch.equal(model[0].weight, tensors["model.0.weight"])


def test_a_checkpoint_that_is_not_committed_leaves_everything_as_it_was(holdings_of):
    (holdings,) = holdings_of()
    trained(holdings)
    before = holdings.state.fingerprint()
    tensors = {name: torch.full_like(t, 3) for name, t in holdings.state.tensors().items()}
    holdings.state.operation = 7
    holdings.restore(tensors, {})
    assert holdings.state.fingerprint() != before
    holdings.optimizers[0].rollback()
    holdings.state.rollback()
    assert holdings.state.fingerprint() == before


def test_what_is_settled_is_watched(holdings_of):
    (holdings,) = holdings_of()
    model = trained(holdings)
    holdings.models.check("between steps")
    holdings.optimizers[0].kept.check_untouched()
    with torch.no_grad():
        model[0].bias.add_(1)
    holdings.settle()
    holdings.models.check("between steps")
