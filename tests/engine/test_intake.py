"""Models and optimizers come in alike on all workers, or not at all."""

import pytest
import torch
from fakes import together
from torch import nn

from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.context import Context
from evenstep.engine.intake import Intake
from evenstep.engine.sharing import Sharing
from evenstep.engine.updates import OwnUpdates


class Noting(OwnUpdates):
    """Notes what it is asked, and refuses what it is told to."""

    def __init__(self, group, refused=()):
        super().__init__(group)
        self.asked, self._refused = [], refused

    def refuse(self, what):
        self.asked.append(what)
        if what in self._refused:
            raise UnsupportedError(what)

    def admit(self, model, optimizer):
        self.asked.append("admit")
        if "admit" in self._refused:
            raise UnsupportedError("admit")

    def join(self, model, prepared):
        self.asked.append(("join", model, prepared))


def build(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def intake_of(holdings, *refused):
    updates, forgotten = Noting(holdings.group, refused), []
    sharing = Sharing(holdings, updates, Context(holdings.group, 0))
    return Intake(holdings, updates, sharing, lambda: forgotten.append(1)), updates, forgotten


def test_a_model_comes_in_with_its_optimizer_and_then_joins_others(holdings_of):
    (holdings,) = holdings_of()
    intake, updates, forgotten = intake_of(holdings)
    model = build()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    intake.prepare(model, torch.optim.Adam(model.parameters()))
    (prepared,) = holdings.optimizers
    assert updates.asked == ["admit", ("join", model, prepared)]
    assert forgotten == [1]
    assert prepared.gradients.plan.owned == [0, 1, 2, 3]
    assert holdings.ledger.done == 1
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert list(holdings.state.tensors()) == [f"model.{name}" for name in values]


def test_state_that_an_optimizer_brings_along_comes_in_too(holdings_of):
    (holdings,) = holdings_of()
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    intake_of(holdings)[0].prepare(model, optimizer)
    entry = holdings.state.entries["optimizer.model.0.weight.sum"]
    assert entry.counts
    assert optimizer.state[model[0].weight]["sum"] is entry.live
    assert (entry.live == 0.5).all()


def test_who_is_not_admitted_leaves_no_trace(holdings_of):
    (holdings,) = holdings_of()
    model = build()
    with pytest.raises(UnsupportedError, match="admit"):
        intake_of(holdings, "admit")[0].prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert holdings.state.entries == {}
    assert holdings.ledger.done == 0


def test_an_optimizer_that_steps_as_a_whole_may_be_refused(holdings_of):
    (holdings,) = holdings_of()
    model = build()
    intake, updates, _ = intake_of(holdings, "whole optimizer")
    with pytest.raises(UnsupportedError, match="whole optimizer"):
        intake.prepare(model, torch.optim.SGD(model.parameters(), 0.1), whole=True)
    assert updates.asked == ["whole optimizer"]


@pytest.mark.parametrize("change", ["model", "optimizer"])
def test_workers_that_come_with_different_things_all_hear_of_it(holdings_of, change):
    workers = []
    for rank, holdings in enumerate(holdings_of(2)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 3 + (change == "model") * rank), nn.Linear(3, 1))
        rate = 0.1 + (change == "optimizer") * rank
        workers.append((intake_of(holdings)[0], model, torch.optim.SGD(model.parameters(), rate)))
    caught = []

    def body(worker):
        intake, model, optimizer = worker
        try:
            intake.prepare(model, optimizer)
        except MismatchError as error:
            caught.append(str(error))

    together(workers, body)
    assert len(caught) == 2
    assert caught[0] == caught[1]


def test_parameters_that_are_added_later_are_trained(holdings_of):
    (holdings,) = holdings_of()
    intake, updates, _ = intake_of(holdings)
    model = build()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    intake.prepare(model, optimizer)
    (prepared,) = holdings.optimizers
    intake.take_in_added(prepared)
    assert holdings.ledger.done == 1, "nothing was added yet"
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
    intake.take_in_added(prepared)
    assert prepared.gradients.plan.owned == [0, 1, 2, 3]
    assert prepared.names[2:] == ["model.1.weight", "model.1.bias"]
    assert holdings.ledger.done == 2
    assert updates.asked[-1] == "added parameters"


def test_parameters_that_cannot_be_added_are_refused_before_anything_is_changed(holdings_of):
    (holdings,) = holdings_of()
    intake, _, _ = intake_of(holdings, "added parameters")
    model = build()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    intake.prepare(model, optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(UnsupportedError, match="added parameters"):
        intake.take_in_added(holdings.optimizers[0])
    assert len(holdings.optimizers[0].names) == 2
