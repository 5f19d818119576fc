"""What an optimizer keeps is shared in the order of the parameters, tensors and plain values alike."""

import pytest
import torch
from memories import FakeMemory
from torch import nn

from evenstep.core.errors import UnsupportedError
from evenstep.engine.kept import OPTIONS, Kept
from evenstep.engine.state import State


def made(memory=None, **keeps):
    """What an optimizer keeps for two parameters, and the optimizer."""
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(parameters, 0.1)
    if keeps:
        optimizer.state[parameters[1]] = dict(keeps)
    state = State(memory or FakeMemory())
    return Kept(state, optimizer, parameters, ["a", "b"], "optimizer"), optimizer, state


def test_news_are_what_is_not_shared_yet():
    kept, optimizer, state = made(average=torch.zeros(3), count=4)
    news = kept.news(range(2))
    assert [(i, list(forms), values) for i, forms, values in news] == [(1, ["average"], {"count": 4})]
    kept.settle(news, {1})
    kept.adopt(news, took_part=True)
    assert kept.news(range(2)) == []
    assert state.values == {"optimizer.b.count": 4}
    held = optimizer.state[optimizer.param_groups[0]["params"][1]]
    assert held["average"] is state.entries["optimizer.b.average"].live
    held["count"] = 5
    assert kept.news(range(2)) == [[1, {}, {"count": 5}]]


def test_nothing_counts_before_it_is_committed():
    kept, _, state = made(average=torch.zeros(3))
    kept.settle(kept.news(range(2)), {1})
    assert state.tensors() == {}


def test_two_workers_hold_the_same_tensors():
    memory = FakeMemory()
    ours, _, state = made(memory, average=torch.full((3,), 7.0))
    theirs, other, their_state = made(memory.another())
    news = ours.news(range(2))
    ours.settle(news, {1})
    theirs.settle(news, set())
    for kept in (ours, theirs):
        kept.adopt(news, took_part=True)
    held = other.state[other.param_groups[0]["params"][1]]["average"]
    assert held.tolist() == [7.0] * 3
    assert held.data_ptr() == state.entries["optimizer.b.average"].live.data_ptr()
    assert state.fingerprint() == their_state.fingerprint()


def test_trying_again_makes_no_other_room():
    kept, optimizer, state = made(average=torch.zeros(3))
    news = kept.news(range(2))
    for _ in range(3):
        kept.settle(news, {1})
        kept.rollback()
    assert list(state.entries) == ["optimizer.b.average"]
    assert optimizer.state[optimizer.param_groups[0]["params"][1]]["average"].tolist() == [0.0] * 3


def test_what_was_made_in_vain_is_forgotten():
    kept, optimizer, _ = made()
    first = optimizer.param_groups[0]["params"][0]
    kept.begin([0])
    optimizer.state[first]["average"] = torch.zeros(2)
    kept.rollback()
    assert first not in optimizer.state


def test_options_travel_with_the_news_and_are_nobody_s_state():
    kept, optimizer, state = made()
    kept.adopt([[0, {}, {OPTIONS: [{"lr": 0.5}]}]], took_part=True)
    assert state.values == {}
    assert OPTIONS not in optimizer.state[optimizer.param_groups[0]["params"][0]]


def test_what_cannot_be_shared_is_named():
    kept, _, _ = made(history=[torch.zeros(3)])
    with pytest.raises(UnsupportedError, match="SGD keeps a list as 'history' for 'b'"):
        kept.news(range(2))


def test_what_an_edit_takes_away_is_gone_for_good():
    kept, optimizer, state = made(average=torch.zeros(3), count=4)
    news = kept.news(range(2))
    kept.settle(news, {1})
    kept.adopt(news, took_part=True)
    kept.begin(range(2))
    optimizer.state[optimizer.param_groups[0]["params"][1]].clear()
    news, gone = kept.edited()
    assert (news, gone) == ([], [[1, ["average", "count"]]])
    kept.drop(gone)
    kept.adopt(news, took_part=True)
    assert state.tensors() == {}
    assert state.values == {}
