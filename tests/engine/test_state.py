"""What was saved can be had back, by anybody around the memory, exactly until the operation is committed."""

import pytest
import torch
from memories import FakeMemory

from evenstep.engine.form import Form
from evenstep.engine.state import State

VALUES = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


@pytest.fixture
def memory():
    return FakeMemory()


def state_of(memory, working=None):
    state = State(memory)
    for entry in state.add({name: Form.of(t) for name, t in VALUES.items()}, working):
        entry.counts = True
    return state


def fill(state):
    for name, value in VALUES.items():
        state.entries[name].live.copy_(value)


def test_live_images_are_what_users_hold_and_exist_once(memory):
    first, second = state_of(memory), state_of(memory.another())
    fill(first)
    for name in VALUES:
        assert first.entries[name].working is first.entries[name].live
        assert second.entries[name].live.data_ptr() == first.entries[name].live.data_ptr()
    assert first.fingerprint() == second.fingerprint()


def test_a_survivor_brings_back_what_a_dead_owner_had_begun_to_change(memory):
    owner, survivor = state_of(memory), state_of(memory.another())
    fill(owner)
    before = owner.fingerprint()
    owner.operation = survivor.operation = 7
    owner.save([owner.entries["w"]])
    owner.entries["w"].live.mul_(2)
    survivor.rollback()
    assert survivor.fingerprint() == before


def test_what_is_committed_stays(memory):
    state = state_of(memory)
    fill(state)
    state.operation = 7
    state.save(list(state.entries.values()))
    state.entries["w"].live.add_(1)
    after, state.operation = state.fingerprint(), 8
    state.rollback()
    assert state.fingerprint() == after


def test_a_mark_comes_after_the_fence(memory, monkeypatch):
    state = state_of(memory)
    order = []
    monkeypatch.setattr(memory, "fence", lambda: order.append(state._marks.count_nonzero().item()))
    state.save(list(state.entries.values()))
    assert order == [0]
    assert state._marks.count_nonzero() == 2


def test_private_copies_are_published_and_pulled(memory):
    mine, theirs = ({name: t.clone() for name, t in VALUES.items()} for _ in range(2))
    first, second = state_of(memory, mine), state_of(memory.another(), theirs)
    mine["b"].fill_(5)
    first.entries["b"].publish()
    assert theirs["b"].tolist() == [1, 1, 1]
    second.pull()
    assert theirs["b"].tolist() == [5, 5, 5]


def test_a_change_that_is_committed_can_be_asked_for(memory):
    state = state_of(memory)
    fill(state)
    state.operation = 3
    state.save([state.entries["b"]])
    state.entries["b"].live.sub_(0.25)
    assert state.change_of(state.entries["b"]).tolist() == [0.25] * 3
    assert state.change_of(state.entries["w"]) is None
