"""An optimizer may do in its step what others can share, and nothing else."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from evenstep.core.errors import UnsupportedError
from evenstep.engine.conduct import Conduct, check_kind, options_of


class Own(torch.optim.SGD):
    """One whose step does something beside stepping."""

    does = staticmethod(lambda optimizer: None)

    def step(self, closure=None):
        super().step(closure)
        self.does(self)


def optimizer(does=lambda optimizer: None, **options):
    made = Own([nn.Parameter(torch.ones(2))], 0.1, **options)
    made.does = does
    return made


def stepped(does, *, whole):
    made = optimizer(does)
    made.calls, made.seen, made._slow = 0, [], [[torch.zeros(2)]]
    made.inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
    made.inner.param_groups[0]["params"][0].grad = torch.ones(2)
    conduct = Conduct(made, whole=whole)
    made.step()
    return conduct.changed_options()


def count(made):
    made.calls += 1


def keep_elsewhere(made):
    made.state["global"] = {"step": 1}


def remember(made):
    made._slow[0][0].add_(1)


def collect(made):
    made.seen.append(1)


def wrap(made):
    made.inner.step()


def decay(made):
    made.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("whole", [False, True])
def test_one_that_only_steps_is_fine(whole):
    assert stepped(lambda made: None, whole=whole) is None


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("does", "message"),
    [
        (count, "Own changes its attribute 'calls'"),
        (collect, "Own changes its attribute 'seen'"),
        (remember, "Own changes its attribute '_slow'"),
        (wrap, "Own changes its attribute 'inner'"),
        (keep_elsewhere, "Own keeps state under 'global'"),
    ],
)
def test_what_a_successor_would_not_have_is_refused(does, message, whole):
    with pytest.raises(UnsupportedError, match=message):
        stepped(does, whole=whole)


def test_options_may_change_where_one_worker_steps_all_parameters():
    assert stepped(decay, whole=True)[0]["lr"] == 0.05
    with pytest.raises(UnsupportedError, match=r"changes the options of its groups in its step.*whole=True"):
        stepped(decay, whole=False)


def test_options_are_plain_values():
    found = options_of(optimizer(momentum=torch.tensor(0.5)))
    assert (found[0]["lr"], found[0]["momentum"]) == (0.1, 0.5)
    assert "params" not in found[0]


def test_kinds_that_cannot_be_shared_are_refused_before_they_step():
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(UnsupportedError, match="LBFGS calls the model by itself"):
        check_kind(torch.optim.LBFGS(parameters), whole=True)
    with pytest.raises(UnsupportedError, match="SparseAdam needs sparse gradients"):
        check_kind(torch.optim.SparseAdam(parameters), whole=False)
    check_kind(torch.optim.Adam(parameters), whole=False)


def test_one_from_elsewhere_is_warned_of_unless_one_worker_steps_all():
    check_kind(optimizer(), whole=True)
    with pytest.warns(UserWarning, match="Own is not from torch.optim"):
        check_kind(optimizer(), whole=False)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_see_all_parameters_or_are_refused(when):
    made = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    getattr(made, f"register_step_{when}_hook")(lambda *_: None)
    with pytest.raises(UnsupportedError, match=rf"SGD has a hook \(register_step_{when}_hook\).*whole=True"):
        Conduct(made, whole=False)
    Conduct(made, whole=True)


def test_options_may_be_numpys_and_nothing_that_cannot_be_kept():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight], lr=np.float32(0.5))
    optimizer.param_groups[0]["betas"] = (np.float32(0.5), torch.tensor(0.25))
    (found,) = options_of(optimizer)
    assert json.loads(json.dumps(found))["betas"] == [0.5, 0.25]
    assert (found["lr"], type(found["lr"])) == (0.5, float)
    optimizer.param_groups[0]["chosen"] = {1, 2}
    with pytest.raises(UnsupportedError, match="group of Adam has a set as 'chosen'"):
        options_of(optimizer)
