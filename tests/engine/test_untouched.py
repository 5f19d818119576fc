"""Whatever user code does to a parameter outside an edit is noticed, whichever way it takes."""

import pytest
import torch
from torch import nn

from evenstep.core.errors import NondeterminismError, UnsupportedError
from evenstep.engine import untouched
from evenstep.engine.untouched import Strays, Untouched


@pytest.fixture
def weight():
    return nn.Parameter(torch.ones(3, 4))


@pytest.fixture
def watched(weight):
    made = Untouched({"weight": weight})
    made.alone = True
    made.remember()
    made.remember_values()
    return made


def test_what_nobody_changes_is_untouched(watched, weight):
    weight.detach().sum()
    watched.check("between steps")


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda w: w.detach().mul_(2), "between steps;"),
        (lambda w: w.data.clamp_(-0.5, 0.5), "between steps through .data;"),
        (lambda w: w.data.view(-1)[5:6].add_(1), "between steps through .data;"),
    ],
)
def test_a_change_is_named_with_what_works(watched, weight, change, how):
    change(weight)
    with pytest.raises(NondeterminismError, match=rf"'weight' was changed {how}.*run\.edit"):
        watched.check("between steps")


def test_one_that_moves_elsewhere_is_named(watched, weight):
    weight.data = torch.ones(3, 4)
    with pytest.raises(UnsupportedError, match="'weight' has got other memory"):
        watched.check("between steps")


def test_values_are_compared_only_where_nobody_else_changes_them(weight):
    made = Untouched({"weight": weight})
    made.remember()
    made.remember_values()
    weight.data.mul_(2)
    made.check("between steps")


def test_one_change_is_left_to_whoever_looks_after_memory_that_changes_by_itself(weight):
    bias = nn.Parameter(torch.ones(3))
    made = Untouched({"weight": weight, "bias": bias})
    made.alone = made.kept = True
    made.remember()
    made.remember_values()
    weight.data[0, 0] = 2
    made.check("between steps")
    bias.data.mul_(2)
    with pytest.raises(NondeterminismError, match="'weight' was changed between steps through"):
        made.check("between steps")


def test_values_from_before_another_change_of_ours_are_forgotten(watched, weight):
    weight.data.mul_(2)
    watched.remember()
    watched.check("between steps")


def test_after_the_first_steps_it_looks_as_often_as_costs_next_to_nothing(watched, weight, monkeypatch):
    now = 100.0
    monkeypatch.setattr(untouched.time, "monotonic", lambda: now)
    watched._looks, watched._looked_s, watched._begin_s = untouched._FIRST, 0.01, 99.0

    def notices():
        watched.remember()
        watched.remember_values()
        return bool(watched._sums)

    assert not notices()
    now = 101.0
    assert notices()


# ---- buffers ----


@pytest.fixture
def hung():
    return {"tau": torch.ones(()), "mean": torch.zeros(3)}


@pytest.fixture
def strays(hung):
    made = Strays(lambda: hung)
    made.remember(dict(hung))
    return made


def replace(hung):
    hung["tau"] = torch.zeros(())


@pytest.mark.parametrize("change", [lambda hung: hung["tau"].mul_(0.9), replace])
def test_a_buffer_that_is_changed_by_hand_is_named_with_what_works(strays, hung, change):
    change(hung)
    strays.look()
    with pytest.raises(
        UnsupportedError, match=r"buffer 'tau' was changed between steps, which has no effect.*run\.edit"
    ):
        strays.check({"mean"})
    strays.check({"mean"})


def test_what_a_forward_changes_outside_of_steps_does_not_count_and_a_warning_says_so_once(strays, hung):
    hung["mean"].add_(1)
    strays.look()
    with pytest.warns(UserWarning, match=r"buffer 'mean' was changed between steps, by a forward.*run\.edit"):
        strays.check({"mean"})
    strays.remember(dict(hung))
    hung["mean"].add_(1)
    strays.look()
    strays.check(set())
