"""Subclasses of batch norm span all shards where it can be known what that means, and are named where it cannot."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.core.errors import UnsupportedError
from evenstep.nn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from workers import run_workers


class Reset(nn.BatchNorm2d):
    """Adds nothing to the forward."""

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.constant_(self.weight, 0.5)


class Activated(nn.BatchNorm2d):
    """As timm's: the forward of torch's layer written out, then something more."""

    def __init__(self, num_features):
        super().__init__(num_features, momentum=None)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        factor = 0.0
        if self.training:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, factor, self.eps
        )
        return self.act(self.drop(x))


class Wider(nn.BatchNorm2d):
    """Normalizes in another dtype."""

    def forward(self, x):
        return F.silu(super().forward(x.double()).to(x.dtype))


class Ghost(nn.BatchNorm2d):
    """Normalizes pieces of the batch by themselves."""

    piece = 2

    def forward(self, x):
        return torch.cat([super(Ghost, self).forward(part) for part in x.split(self.piece)])


class LargeGhost(Ghost):
    piece = 5  # not to be seen in a small batch


class ByHand(nn.BatchNorm2d):
    def forward(self, x):
        return (x - x.mean((0, 2, 3), keepdim=True)) * self.weight[:, None, None]


class Conditional(nn.BatchNorm2d):
    def forward(self, x, labels):
        return super().forward(x) * labels.reshape(-1, 1, 1, 1)


SPAN = [Reset, Activated, Wider]


def network(kind):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), kind(4), nn.Flatten(), nn.Linear(64, 4)).double()


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(13, 3, 6, 6, generator=generator).double(), torch.randint(0, 4, (13,), generator=generator)


def train(kind):
    model = network(kind)
    with evenstep.Run(shards=4, quiet=True) as run:
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(3):
            run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
        return run.fingerprint(), {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("kind", SPAN)
def test_a_subclass_that_adds_to_batch_norm_is_that_of_plain_torch_over_the_whole_batch(kind):
    fingerprint, found = train(kind)
    plain = network(kind)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        x, y = batch()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
    assert {value for value, _ in run_workers(3, lambda _: train(kind))} == {fingerprint}


@pytest.mark.parametrize("kind", SPAN)
def test_a_converted_subclass_is_what_it_was_in_all_else(kind):
    model = network(kind)
    before = model.state_dict()
    state = torch.get_rng_state()
    convert_sync_batchnorm(model)
    assert torch.equal(torch.get_rng_state(), state)
    layer = model[1]
    assert isinstance(layer, SyncBatchNorm)
    assert isinstance(layer, kind)
    assert layer.qualified_name == "1"
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[1]) is type(layer)
        assert torch.equal(twin.eval()(batch()[0]), copy.deepcopy(model).eval()(batch()[0]))
    alone, plain = copy.deepcopy(model), network(kind)
    assert torch.equal(alone(batch()[0]), plain(batch()[0])), "with nobody around it is the layer itself"
    assert torch.equal(alone[1].running_mean, plain[1].running_mean)
    assert alone[1].num_batches_tracked == plain[1].num_batches_tracked == 1
    with pytest.raises(ValueError, match="expected 4D input"):
        layer._check_input_dim(torch.zeros(3, 4))
    assert type(revert_sync_batchnorm(model)[1]) is kind
    assert set(model[1].__dict__) == set(plain[1].__dict__)


@pytest.mark.parametrize("kind", [Ghost, ByHand, Conditional])
def test_a_subclass_with_a_way_of_its_own_is_left_alone_and_named(kind):
    model = nn.Sequential(nn.BatchNorm2d(4), kind(4), kind(4))
    with pytest.warns(UserWarning, match=rf"layer '1' and 1 more of class {kind.__name__} .*sync_batchnorm=False"):
        convert_sync_batchnorm(model)
    assert isinstance(model[0], SyncBatchNorm)
    assert type(model[1]) is kind


def test_a_layer_that_turns_out_to_normalize_pieces_is_refused():
    model = network(LargeGhost)
    with evenstep.Run(shards=2, quiet=True) as run:
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(UnsupportedError, match=r"layer '1' \(LargeGhost\) normalizes 5 of its 7 rows"):
            run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
