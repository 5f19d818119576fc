"""Batch norm with a residual and an activation, and the converter that finds where they follow."""

import copy
import pickle

import pytest
import spans
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.core.errors import UnsupportedError
from evenstep.nn import DataParallel, SyncBatchNorm, SyncBatchNorm2d, convert_sync_batchnorm, revert_sync_batchnorm
from evenstep.nn.fuse import _Fused

SHAPE = (6, 4, 3, 5)


def draw(shape=SHAPE, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fused_and_plain(channels=4, **options):
    """A fused layer and its plain twin, in float64 with random weights."""
    fused, plain = SyncBatchNorm2d(channels, activation="relu", **options).double(), nn.BatchNorm2d(channels).double()
    with torch.no_grad():
        for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
            mine.copy_(theirs.copy_(draw(theirs.shape, 7) + 0.5))
    return fused, plain


def compare(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def step(function, parameters, x, residual, dy):
    leaves = [t.clone().requires_grad_() for t in (x, residual) if t is not None]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *parameters], dy)]


@pytest.mark.parametrize("devices", [0, 2, 3])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_alone_and_on_replicas_it_is_what_three_modules_give(activation, with_residual, devices):
    fused, plain = fused_and_plain()
    fused.activation = activation

    def separate(x, residual=None):
        y = plain(x) if residual is None else plain(x) + residual
        return y.relu() if activation else y

    layer = DataParallel(fused, devices=["cpu"] * devices) if devices else fused
    x, dy, residual = draw(), draw(seed=1), draw(seed=2) if with_residual else None
    compare(
        step(layer, list(fused.parameters()), x, residual, dy),
        step(separate, list(plain.parameters()), x, residual, dy),
    )
    compare(fused.buffers(), plain.buffers())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_on_shards_it_is_what_separate_modules_give(num_workers):
    fused, plain = fused_and_plain()
    parts = [draw((2, 4, 3, 5), seed) for seed in range(4)]
    found = spans.over_shards(fused, parts, num_workers)
    expected = spans.alone(_Flat(plain), parts)
    compare(found.outputs, expected.outputs)
    compare(found.input_gradients, expected.input_gradients)
    compare(found.gradients.values(), expected.gradients.values())


class _Flat(nn.Module):
    """The plain twin for inputs [1, C, n], as `spans.alone` has them."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.unsqueeze(-1)).squeeze(-1).relu()


def test_on_ranks_it_is_what_separate_modules_give(tmp_path):
    fused, plain = fused_and_plain()
    parts = [draw((2, 4, 3, 5), seed) for seed in range(2)]
    found = spans.over_ranks(fused, parts, tmp_path)
    expected = spans.alone(_Flat(plain), parts)
    compare(found.outputs, expected.outputs)
    compare(found.input_gradients, expected.input_gradients)


@pytest.mark.parametrize("with_residual", [False, True])
def test_first_and_second_derivatives_are_right_for_a_layer_alone(with_residual):
    fused, _ = fused_and_plain()
    inputs = [draw((3, 4, 2, 2), s).requires_grad_() for s in range(1 + with_residual)]
    parameters = [p.detach().clone().requires_grad_() for p in fused.parameters()]

    def function(weight, bias, *tensors):
        return torch.func.functional_call(fused, {"weight": weight, "bias": bias}, tensors)

    assert torch.autograd.gradcheck(function, (*parameters, *inputs))
    assert torch.autograd.gradgradcheck(function, (*parameters, *inputs))


def test_in_company_first_derivatives_are_right():
    fused, _ = fused_and_plain()
    parallel = DataParallel(fused, devices=["cpu", "cpu"])
    inputs = [draw((4, 4, 2, 2), s).requires_grad_() for s in range(2)]
    assert torch.autograd.gradcheck(parallel, inputs)


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])  # the latter goes the way of a layer in company
def test_the_output_is_not_kept_for_backward(eps_mode):
    fused, _ = fused_and_plain(eps_mode=eps_mode)
    kept = []
    x = draw().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        fused(x)
    assert [n for n in kept if n > 10] == [x.numel()], "the input, and nothing else of its size"


def test_eval_mode_and_clamp_mode_know_residual_and_activation():
    for options in ({}, {"eps_mode": "clamp", "eps": 1e-30}):
        fused, plain = fused_and_plain(**options)
        plain.eps = fused.eps
        x, residual = draw(), draw(seed=1)
        compare([fused(x, residual)], [(plain(x) + residual).relu()])
        compare([fused.eval()(x, residual)], [(plain.eval()(x) + residual).relu()])


def test_a_residual_of_another_shape_or_type_is_added_as_torch_does():
    fused, plain = fused_and_plain()
    x = draw()
    compare([fused(x, draw((1, 4, 1, 1), 1))], [(plain(x) + draw((1, 4, 1, 1), 1)).relu()])
    y = fused.float()(x.float(), draw(seed=1))
    assert y.dtype == torch.float64


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="'gelu'"):
        SyncBatchNorm2d(3, activation="gelu")
    with pytest.raises(ValueError, match="'gelu'"):
        SyncBatchNorm2d(3)(draw((2, 3, 2, 2), dtype=torch.float32), activation="gelu")


def test_a_fused_layer_is_copied_pickled_described_and_loads_a_plain_state():
    fused, plain = fused_and_plain()
    fused.load_state_dict(plain.state_dict())
    plain.load_state_dict(fused.state_dict())
    assert fused.extra_repr().endswith("activation=relu")
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert again.activation == "relu"
        compare([again(draw())], [copy.deepcopy(plain)(draw()).relu()])
    assert "activation" not in SyncBatchNorm2d(3).__dict__


# ---- the converter ----


class Block(nn.Module):
    """All ways to write it."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv3, self.norm3 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.scale = 1

    def forward(self, x):
        return self._head(F.relu(self.norm1(self.conv1(x))), x)

    def _head(self, hidden, x):
        hidden = self.relu(self.norm2(self.conv2(hidden)))
        hidden = self.norm3(self.conv3(hidden))
        hidden += self.shortcut(x)
        return torch.relu(hidden)


def calls(model, x):
    """With which residuals and activations the norms were called."""
    seen = []
    forward = SyncBatchNorm.forward

    def watch(self, input, residual=None, *, activation=None):
        seen.append((residual is not None, activation))
        return forward(self, input, residual, activation=activation)

    SyncBatchNorm.forward = watch
    try:
        model(x)
    finally:
        SyncBatchNorm.forward = forward
    return seen


def check_equal(model, x):
    """The fused model computes what the plain one does, in both modes, with gradients."""
    plain = copy.deepcopy(model)
    convert_sync_batchnorm(model, fuse=True)
    for ours, theirs in ((model, plain), (model.eval(), plain.eval())):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = ours(a), theirs(b)
        dy = draw(y.shape, 5)
        compare(
            [y, *torch.autograd.grad(y, [a, *ours.parameters()], dy)],
            [z, *torch.autograd.grad(z, [b, *theirs.parameters()], dy)],
        )
    compare(model.buffers(), plain.buffers())
    return model.train()


def test_a_block_is_fused_and_computes_the_same():
    model = nn.Sequential(Block(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), Block()).double()
    check_equal(model, draw())
    relu, added = (False, "relu"), (True, "relu")
    block = [relu, relu, relu, added]
    assert calls(model, draw()) == [*block, relu, *block]
    assert isinstance(model[0], Block)
    assert model[0].norm1.activation is None, "called directly, a layer is what it was"


def test_copies_and_pickles_are_fused_too():
    model = convert_sync_batchnorm(Block().double(), fuse=True)
    expected = copy.deepcopy(model)(draw())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(again, _Fused)
        compare([again(draw())], [expected])
        assert len([call for call in calls(again, draw()) if call[1]]) == 4


def test_replicas_are_fused_and_compute_with_their_own_parameters():
    plain = Block().double()
    model = convert_sync_batchnorm(copy.deepcopy(plain), fuse=True)
    compare([DataParallel(model, devices=["cpu", "cpu"])(draw())], [plain(draw())])


def test_revert_brings_the_classes_back():
    model = nn.Sequential(Block(), nn.BatchNorm2d(4), nn.ReLU()).double()
    kinds = [type(m) for m in model.modules()]
    keys = [set(m.__dict__) for m in model.modules()]
    convert_sync_batchnorm(model, fuse=True)(draw())
    assert any(isinstance(m, _Fused) for m in model.modules())
    revert_sync_batchnorm(model)
    assert [type(m) for m in model.modules()] == kinds
    assert [set(m.__dict__) for m in model.modules()] == keys


def test_revert_refuses_a_layer_that_was_built_with_an_activation():
    model = nn.Sequential(nn.BatchNorm2d(4), SyncBatchNorm2d(4, activation="relu"))
    convert_sync_batchnorm(model)
    with pytest.raises(UnsupportedError, match=r"'1'.*activation='relu'.*nn.ReLU"):
        revert_sync_batchnorm(model)
    assert type(model[0]) is SyncBatchNorm2d


class Used(Block):
    def forward(self, x):
        y = self.norm1(x)
        return F.relu(y) + y


class Changed(Block):
    def forward(self, x):
        identity = x
        identity += self.norm1(self.conv1(x))
        return F.relu(identity)


class ChangedLocally(Block):
    def forward(self, x):
        hidden = self.norm1(self.conv1(x))
        hidden = x
        hidden += self.norm2(self.conv2(x))
        return F.relu(hidden)


class Counting(Block):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return F.relu(self.norm1(x))


class WithoutGradient(Block):
    def forward(self, x):
        with torch.no_grad():
            x = self.conv1(x)
        return F.relu(self.norm1(x))


class Steered(Block):
    def forward(self, x, twice=False):
        y = F.relu(self.norm1(x))
        return y * 2 if twice else y


class ByMode(Block):
    def forward(self, x):
        y = self.norm1(x)
        if self.training:
            return F.relu(y)
        return y


class Dropping(Block):
    def forward(self, x):
        return F.dropout(F.relu(self.norm1(x)), 0.5, self.training)


class Random(Block):
    def forward(self, x):
        return F.relu(self.norm1(x)) + torch.rand(1)


class Looping(Block):
    def forward(self, x):
        for _ in range(2):
            x = F.relu(self.norm1(x))
        return x


class Moved(Block):
    def forward(self, x):
        hidden = self.conv1(x)
        y = self.norm1(hidden)
        hidden.mul_(2)
        return F.relu(y + hidden)


@pytest.mark.parametrize(
    "kind",
    [Used, Changed, ChangedLocally, Counting, WithoutGradient, Steered, ByMode, Dropping, Random, Looping, Moved],
    ids=lambda k: k.__name__,
)
def test_what_is_not_understood_is_left_alone(kind):
    model = convert_sync_batchnorm(kind(), fuse=True)
    assert type(model) is kind
    assert set(model._buffers) == set()


def test_layers_with_hooks_are_left_alone_also_when_the_hook_comes_later():
    for name in ("norm1", "relu"):
        model = Block().double()
        seen = []
        getattr(model, name).register_forward_hook(lambda *_, seen=seen: seen.append(1))
        check_equal(model, draw())
        assert seen
    model = convert_sync_batchnorm(Block().double(), fuse=True)
    assert (False, "relu") in calls(model, draw())
    handle = model.norm1.register_forward_hook(lambda *_: seen.append(2))
    assert [call for call in calls(model, draw()) if call[0]] == [], "the module's own forward runs"
    assert 2 in seen
    handle.remove()
    assert [call for call in calls(model, draw()) if call[0]], "and the fused one again"


def test_a_sequential_may_change_after_it_was_fused():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()).double(), fuse=True)
    model.append(nn.Hardtanh())
    compare([model(draw())], [F.hardtanh(nn.BatchNorm2d(4).double()(draw()).relu())])
    compare([model[:1](draw())], [nn.BatchNorm2d(4).double()(draw())])
    model[1] = nn.Identity()
    assert calls(model, draw()) == [(False, None)]


def test_a_block_whose_parts_were_replaced_runs_its_own_forward():
    plain = Block().double()
    model = convert_sync_batchnorm(copy.deepcopy(plain), fuse=True)
    model.norm3, plain.norm3 = nn.Identity(), nn.Identity()
    compare([model(draw())], [plain(draw())])
    model.scale = 2
    assert [call for call in calls(model, draw()) if call[1]] == [(False, "relu")], "only the sequential in it"
