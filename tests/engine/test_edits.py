"""An optimizer's state is saved exactly when user code can first have changed it."""

import copy

import pytest
import torch
from torch import nn

from evenstep.engine.edits import Edit


@pytest.fixture
def optimizer():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    made = torch.optim.Adam(parameters, 0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    made.step()
    return made


def edited(optimizer, change):
    """Whether it was saved, how often, and what it was then."""
    saved = []
    before = optimizer.state
    with Edit(optimizer, lambda: saved.append(copy.deepcopy({**before}))) as edit:
        change()
        assert edit.touched == bool(saved)
    assert optimizer.state is before, "who holds the state goes on holding it"
    assert len(saved) <= 1
    return saved


def test_who_does_not_look_costs_nothing(optimizer):
    assert edited(optimizer, lambda: optimizer.param_groups[0].update(lr=0.5)) == []


CHANGES = {
    "a look at one": lambda o: o.state[o.param_groups[0]["params"][0]],
    "through a plain dict": lambda o: [s["exp_avg"].zero_() for s in dict(o.state).values()],
    "through another": lambda o: [s["exp_avg"].zero_() for s in {**o.state}.values()],
    "through a copy": lambda o: [s["exp_avg"].zero_() for s in o.state.copy().values()],
    "in place": lambda o: [s["exp_avg"].zero_() for s in o.state.values()],
    "replaced": lambda o: o.state[o.param_groups[0]["params"][1]].update(exp_avg=torch.full((3,), 7.0)),
    "taken out": lambda o: o.state.pop(o.param_groups[0]["params"][0]),
    "cleared": lambda o: o.state.clear(),
    "loaded": lambda o: o.load_state_dict({**o.state_dict(), "state": {}}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_who_looks_finds_it_saved_as_it_was_and_what_is_changed_stays(optimizer, change):
    other = copy.deepcopy(optimizer)
    change(other)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    (saved,) = edited(optimizer, lambda: change(optimizer))
    kept = dict(zip(before, saved.values(), strict=True))
    assert all(torch.equal(kept[i][key], value) for i in before for key, value in before[i].items())
    ours, expected = (list(o.state_dict()["state"].values()) for o in (optimizer, other))
    assert len(ours) == len(expected)
    for here, there in zip(ours, expected, strict=True):
        assert all(torch.equal(here[key], there[key]) for key in here.keys() | there.keys())


def test_a_copy_of_the_optimizer_is_an_ordinary_one(optimizer):
    copies = []
    edited(optimizer, lambda: copies.append(copy.deepcopy(optimizer)))
    for p in copies[0].param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copies[0].step()
    assert next(iter(copies[0].state.values()))["step"] == 2
    assert next(iter(optimizer.state.values()))["step"] == 1


def test_an_edit_that_fails_leaves_the_optimizer_its_own_dict(optimizer):
    def fail():
        optimizer.state.clear()
        raise LookupError

    before = optimizer.state
    with pytest.raises(LookupError), Edit(optimizer, lambda: None):
        fail()
    assert optimizer.state is before
