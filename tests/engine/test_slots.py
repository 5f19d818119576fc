"""Whichever shard runs has its own leaves and buffers in the model, wherever tensors hang."""

import pytest
import torch
from torch import nn

from evenstep.core.errors import UnsupportedError
from evenstep.engine.slots import Lane, ModelSlots, spanning_layers


class Counting(nn.Module):
    """A tied weight, and a buffer that a forward changes in place or replaces."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.seen[0] += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.last(self.first(x))


@pytest.fixture
def model():
    torch.manual_seed(2)
    return Counting()


@pytest.fixture
def slots(model):
    made = ModelSlots()
    made.add(model, "model")
    return made


def test_names_are_full_and_a_tied_tensor_has_one(model, slots):
    assert list(slots.parameters) == ["model.first.weight", "model.first.bias", "model.last.bias"]
    assert list(slots.buffers) == ["model.seen", "model.mean"]
    assert slots.add(model, "again") == ({}, {}), "it is known"
    other = nn.Sequential(model.first, nn.Linear(2, 2, bias=False))
    added, _ = slots.add(other, "model2")
    assert list(added) == ["model2.1.weight"]


def test_lanes_share_parameter_memory_and_nothing_else(model, slots):
    lanes = [Lane(slots, own=True) for _ in range(2)]
    base = {name: b.clone() for name, b in slots.buffers.items()}
    losses = []
    for lane in lanes:
        lane.begin(base)
    for number, lane in enumerate(lanes):
        lane.resume()
        assert model.last.weight is model.first.weight
        losses.append(model(torch.full((number + 1, 3), 2.0)).sum())
        lane.pause()
    sum(losses).backward()
    slots.bind_base()
    weight = "model.first.weight"
    assert model.first.weight is slots.parameters[weight]
    assert model.first.weight.grad is None
    for lane in lanes:
        assert lane.leaves[weight].data_ptr() == slots.parameters[weight].data_ptr()
        assert lane.leaves[weight].grad is not None
    assert torch.equal(lanes[1].leaves["model.last.bias"].grad, 2 * lanes[0].leaves["model.last.bias"].grad)
    after = [lane.buffers_after() for lane in lanes]
    assert [a["model.seen"][0].item() for a in after] == [1.0, 2.0]
    assert all(torch.allclose(a["model.mean"], torch.full((3,), 0.2)) for a in after)
    assert model.seen.tolist() == [0.0, 0.0]


def test_a_lane_begins_with_the_committed_buffers_and_what_is_frozen_by_then(model, slots):
    lane = Lane(slots, own=True)
    model.first.bias.requires_grad_(False)
    lane.begin({"model.seen": torch.tensor([5.0, 6.0]), "model.mean": torch.ones(3)})
    lane.resume()
    assert model.seen.tolist() == [5.0, 6.0]
    assert not model.first.bias.requires_grad
    assert model.last.bias.requires_grad
    slots.bind_base()


def test_a_recurrent_layer_computes_with_what_hangs_there():
    model, slots = nn.LSTM(2, 3), ModelSlots()
    slots.add(model, "model")
    lane = Lane(slots, own=True)
    lane.begin({})
    lane.resume()
    model(torch.ones(1, 1, 2))[0].sum().backward()
    slots.bind_base()
    assert all(leaf.grad is not None for leaf in lane.leaves.values())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("value", "found"), [(torch.zeros(5), r"\(5,\) torch.float32"), (None, "None")])
def test_a_forward_that_changes_the_shape_of_a_buffer_is_refused_by_name(model, slots, value, found):
    lane = Lane(slots, own=False)
    lane.begin(dict(slots.buffers))
    lane.resume()
    model.mean = value
    lane.pause()
    with pytest.raises(UnsupportedError, match=rf"buffer 'model.mean' from \(3,\) torch.float32 into {found}"):
        lane.buffers_after()
    slots.bind_base()


def test_a_layer_spans_shards_only_while_it_trains():
    layers = [nn.Linear(1, 1), nn.Identity(), nn.Identity()]
    layers[1].spans_shards = layers[2].spans_shards = True
    layers[2].eval()
    assert spanning_layers(layers) == [layers[1]]


def test_models_that_are_made_of_something_else_by_now_are_refused(model, slots):
    slots.check()
    weight = model.first.weight
    model.first.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(UnsupportedError, match=r"'model.first.weight' was replaced"):
        slots.check()
    model.first.weight = weight
    model.more = nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match=r"'model.more' is a new Linear"):
        slots.check()
    del model.more
    model.first.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(UnsupportedError, match=r"has parameters \['bias', 'extra', 'weight'\]"):
        slots.check()


def test_a_recurrent_layer_does_not_take_the_weights_of_a_lane_for_new_ones():
    slots, model = ModelSlots(), nn.LSTM(3, 4)
    slots.add(model, "model")
    for lane in [Lane(slots, own=True) for _ in range(2)]:
        lane.begin({})
        lane.resume()
        assert not model._weights_have_changed()
        assert [w.data_ptr() for w in model._flat_weights] == [p.data_ptr() for p in slots.parameters.values()]


def test_a_leaf_that_was_moved_comes_back_to_what_is_trained():
    slots, model = ModelSlots(), nn.Linear(3, 4)
    slots.add(model, "model")
    lane = Lane(slots, own=True)
    leaf = lane.leaves["model.weight"]
    leaf.data = leaf.detach().clone()
    with torch.no_grad():
        slots.parameters["model.weight"].fill_(2)
    lane.begin({})
    assert (leaf == 2).all()
