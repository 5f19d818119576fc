"""Callbacks that follow the parameters: told from others by what they keep and change."""

import copy

import pytest
import torch

from evenstep.core.errors import UnsupportedError
from evenstep.run.followers import Followers


class FakeRun:
    """A run that holds certain tensors."""

    def __init__(self):
        self.held = []

    def holds(self, tensors):
        return all(any(tensor is each for each in self.held) for tensor in tensors)


class Keeps:
    """A callback of the user's own."""

    def __init__(self, kept):
        self.kept = kept


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))


def followers(run, model, *callbacks, framework="framework"):
    return Followers(run, model, callbacks, framework, "do this instead")


def copies(model):
    return [
        copy.deepcopy(model),
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        [parameter.detach().clone() for parameter in model.parameters()],
    ]


@pytest.mark.parametrize("form", range(3))
def test_a_copy_of_the_parameters_that_changes_is_refused_in_a_sentence_with_the_remedy(model, form):
    callback = Keeps(copies(model)[form])
    found = followers(FakeRun(), model, callback)
    found.look()
    found.look()
    kept = callback.kept
    tensors = list(kept.parameters()) if form == 0 else list(kept.values()) if form == 1 else kept
    with torch.no_grad():
        tensors[0].mul_(0.9)
    with pytest.raises(UnsupportedError, match=r"callback Keeps changes self\.kept.*: do this instead"):
        found.look()


def test_a_copy_that_is_made_anew_is_a_change_too(model):
    callback = Keeps([parameter.detach().clone() for parameter in model.parameters()])
    found = followers(FakeRun(), model, callback)
    found.look()
    before, callback.kept = callback.kept, [2 * tensor for tensor in callback.kept]
    with pytest.raises(UnsupportedError, match=r"self\.kept"):
        found.look()
    assert len(before) == len(callback.kept)


def test_what_the_run_holds_what_the_framework_keeps_and_what_is_no_copy_may_change(model):
    run, average = FakeRun(), copy.deepcopy(model)
    run.held = list(average.parameters())
    counts, name = Keeps([torch.zeros(()), torch.zeros(7)]), Keeps("text")
    for found, changed in (
        (followers(run, model, Keeps(average)), average[0].weight),
        (followers(FakeRun(), model, Keeps(average), framework=Keeps.__module__.partition(".")[0]), average[0].weight),
        (followers(FakeRun(), model, counts, name, object()), counts.kept[1]),
    ):
        found.look()
        with torch.no_grad():
            changed.add_(1.0)
        found.look()
