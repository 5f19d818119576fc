"""Synchronized batch norm gives what one `nn.BatchNorm` gives for the whole batch, wherever the parts are."""

import copy
import itertools

import pytest
import spans
import torch
from torch import nn

from evenstep.nn import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, convert_sync_batchnorm
from evenstep.nn.functional import EpsMode

BOUND = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 8e-3}
SHAPES = {
    "2d": [(5, 3), (2, 3), (9, 3)],
    "3d": [(4, 6, 10), (3, 6, 10), (1, 6, 10)],
    "4d": [(2, 4, 5, 7), (2, 4, 5, 7), (1, 4, 5, 7)],
    "5d": [(2, 3, 2, 3, 4), (1, 3, 2, 3, 4)],
    "different spatial sizes": [(2, 4, 8, 8), (3, 4, 5, 3), (1, 4, 1, 1)],
    "an empty part": [(3, 4, 5, 5), (0, 4, 5, 5), (2, 4, 5, 5)],
    "the first part empty": [(0, 4, 5, 5), (3, 4, 5, 5)],
    "one value in each part": [(1, 8), (1, 8), (1, 8), (1, 8)],
}


def parts_of(shapes, dtype=torch.float32, seed=0, mean=0.3, std=1.7):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator, dtype=torch.float64) * std + mean).to(dtype) for s in shapes]


def pair(channels, dtype=torch.float32, eps_mode: EpsMode = "plus", **options):
    """A synchronized layer, and torch's with the same values."""
    torch.manual_seed(1)
    ours = SyncBatchNorm(channels, dtype=dtype, eps_mode=eps_mode, **options)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, mean=0.5)
    if ours.running_mean is not None:
        nn.init.normal_(ours.running_mean)
        nn.init.uniform_(ours.running_var, 0.5, 2.0)
    theirs = nn.BatchNorm1d(channels, dtype=dtype, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def compare(span, shapes, dtype=torch.float32, bound=None, **options):
    parts = parts_of(shapes, dtype)
    ours, theirs = pair(shapes[0][1], dtype, **options)
    expected = spans.alone(theirs, parts)
    spans.assert_close(span(ours, parts), expected, bound or BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_replicas_equal_one_batch_norm(shapes, dtype):
    compare(spans.over_replicas, shapes, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_shards_equal_one_batch_norm(shapes, dtype):
    compare(spans.over_shards, shapes, dtype)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_equal_one_batch_norm(num_ranks, tmp_path):
    cases = [(name, dtype) for name in SHAPES for dtype in (torch.float32, torch.float64)]
    cases = [case for case in cases if len(SHAPES[case[0]]) == num_ranks]

    def body(rank):
        return [
            spans.one_rank(pair(SHAPES[name][0][1], dtype)[0], parts_of(SHAPES[name], dtype), rank)
            for name, dtype in cases
        ]

    found = spans.run_ranks(num_ranks, body, tmp_path)
    for n, (name, dtype) in enumerate(cases):
        ranks = [f[n] for f in found]
        for other in ranks[1:]:
            spans.assert_same_bytes(other.buffers, ranks[0].buffers)
        together = spans.Found(
            [f.outputs[0] for f in ranks],
            [f.input_gradients[0] for f in ranks],
            {key: sum(f.gradients[key] for f in ranks) for key in ranks[0].gradients},
            ranks[0].buffers,
        )
        expected = spans.alone(pair(SHAPES[name][0][1], dtype)[1], parts_of(SHAPES[name], dtype))
        spans.assert_close(together, expected, BOUND[dtype])


OPTIONS = [
    {"affine": affine, "track_running_stats": track, "momentum": momentum}
    for affine, track, momentum in itertools.product((True, False), (True, False), (0.1, None, 1.0))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_combination_of_options(options):
    compare(spans.over_replicas, SHAPES["4d"], **options)


@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
def test_every_combination_of_options_on_shards(options):
    compare(spans.over_shards, SHAPES["4d"], **options)


def test_a_layer_without_bias():
    ours = SyncBatchNorm(4)
    theirs = nn.BatchNorm1d(4)
    ours.bias = theirs.bias = None
    parts = parts_of(SHAPES["4d"])
    spans.assert_close(spans.over_replicas(ours, parts), spans.alone(theirs, parts), 1e-6)


def test_cumulative_running_statistics_over_several_batches():
    ours, theirs = pair(4, momentum=None)
    for seed in range(3):
        parts = parts_of(SHAPES["4d"], seed=seed)
        expected = spans.alone(theirs, parts)
        found = spans.over_replicas(ours, parts)
        ours.zero_grad()
        theirs.zero_grad()
        spans.assert_close(
            spans.Found(found.outputs, found.input_gradients, {}, found.buffers),
            spans.Found(expected.outputs, expected.input_gradients, {}, expected.buffers),
            1e-6,
        )
    assert ours.num_batches_tracked == 3


def test_momentum_one_leaves_the_mean_and_the_unbiased_variance():
    ours = SyncBatchNorm(4, momentum=1.0, dtype=torch.float64)
    parts = parts_of(SHAPES["4d"], torch.float64)
    spans.over_replicas(ours, parts)
    values = torch.cat([p.movedim(1, 0).reshape(4, -1) for p in parts], dim=1)
    torch.testing.assert_close(ours.running_mean, values.mean(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours.running_var, values.var(1, unbiased=True), rtol=1e-13, atol=1e-13)


def clamped(x, eps, weight, bias):
    """The clamp formula, by autograd."""
    mean, variance = x.mean((0, 2), keepdim=True), x.var((0, 2), unbiased=False, keepdim=True)
    return (x - mean) * variance.clamp(min=eps).rsqrt() * weight.view(1, -1, 1) + bias.view(1, -1, 1)


@pytest.mark.parametrize("span", [spans.over_replicas, spans.over_shards])
def test_clamp_mode_raises_the_variance_to_eps(span):
    shapes = [(4, 3, 5), (2, 3, 5)]
    parts = parts_of(shapes, torch.float64)
    for part in parts:
        part[:, 1] *= 0.01  # its variance is far below eps
    ours = pair(3, torch.float64, eps_mode="clamp", eps=0.1)[0]
    model = nn.Module()
    model.weight, model.bias = (nn.Parameter(p.detach().clone()) for p in (ours.weight, ours.bias))
    model.forward = lambda x: clamped(x, 0.1, model.weight, model.bias)
    expected = spans.alone(model, parts)
    found = span(ours, parts)
    found.buffers = {}
    spans.assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_clamp_mode_counts_in_eval_mode_and_alone_too(training):
    layer = SyncBatchNorm1d(3, eps=0.1, eps_mode="clamp", momentum=1.0, dtype=torch.float64)
    x = parts_of([(40, 3)], torch.float64)[0] * torch.tensor([1.0, 0.01, 3.0], dtype=torch.float64)
    layer(x)
    layer.train(training)
    variance = x.var(0, unbiased=not training).clamp(min=0.1)
    torch.testing.assert_close(layer(x), (x - x.mean(0)) * variance.rsqrt(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("span", [spans.over_replicas, spans.over_shards])
def test_a_mean_of_1e4_and_a_deviation_of_1e_2(span):
    """float32 resolves the input to a tenth of its deviation; the sum of squares has no digit left."""
    parts = parts_of([(64, 4, 6, 6), (32, 4, 6, 6)], mean=1e4, std=1e-2)
    values = torch.cat([p.movedim(1, 0).reshape(4, -1) for p in parts], dim=1)
    sum_of_squares = (values.square().mean(1) - values.mean(1).square()).double()
    exact = values.double().var(1, unbiased=False)
    assert float(((sum_of_squares - exact) / exact).abs().max()) > 1.0, "the case is too easy"
    ours, theirs = pair(4, momentum=1.0, eps=1e-8)
    wide = spans.alone(copy.deepcopy(theirs).double(), [p.double() for p in parts])
    plain = spans.alone(theirs, parts)
    found = span(ours, parts)
    torch.testing.assert_close(found.buffers["running_var"].double(), wide.buffers["running_var"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        found.buffers["running_mean"].double(), wide.buffers["running_mean"], rtol=1e-7, atol=0.0
    )

    def error(of):
        return max(float((a.double() - b).abs().max()) for a, b in zip(of.outputs, wide.outputs, strict=True))

    assert error(found) <= max(error(plain) * 1.5, 0.2), (error(found), error(plain))
    for name, gradient in found.gradients.items():
        bound = 3 * float((plain.gradients[name].double() - wide.gradients[name]).abs().max()) + 1e-3
        assert float((gradient.double() - wide.gradients[name]).abs().max()) <= bound


@pytest.mark.parametrize("mean", [0.3, 1e3])
def test_half_types_accumulate_in_float32(mean):
    parts = parts_of(SHAPES["4d"], torch.bfloat16, mean=mean, std=1.7 if mean < 1 else 16.0)
    ours = pair(4, torch.float32)[0]
    theirs = pair(4, torch.float32)[1]
    found = spans.over_replicas(ours, parts)
    expected = spans.alone(theirs, [p.float() for p in parts])
    assert all(y.dtype == torch.bfloat16 for y in (*found.outputs, *found.input_gradients))
    for ours_, theirs_ in zip(found.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(ours_.float(), theirs_, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(found.buffers["running_var"], expected.buffers["running_var"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("span", [spans.over_replicas, spans.over_shards])
def test_channels_last_stays_channels_last(span):
    shapes = [(2, 4, 5, 7), (3, 4, 5, 7)]
    parts = [p.to(memory_format=torch.channels_last) for p in parts_of(shapes)]
    ours, theirs = pair(4)
    found = span(ours, parts)
    for tensor in (*found.outputs, *found.input_gradients):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    spans.assert_close(found, spans.alone(theirs, parts), 1e-6)


def test_buffers_are_updated_in_place():
    layer = SyncBatchNorm2d(4)
    mean, variance, number = layer.running_mean, layer.running_var, layer.num_batches_tracked
    spans.over_replicas(layer, parts_of(SHAPES["4d"]))
    assert layer.running_mean is mean
    assert layer.running_var is variance
    assert layer.num_batches_tracked is number
    assert float(mean.abs().sum()) > 0
    assert number == 1


def test_one_value_per_channel_in_all_is_torchs_error(tmp_path):
    shapes = [(1, 3), (0, 3)]
    with pytest.raises(
        ValueError, match="Expected more than 1 value per channel when training, got input size"
    ) as plain:
        nn.BatchNorm1d(3)(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"in replica 0 on cpu: Expected more than 1 value per channel when training"):
        spans.over_replicas(SyncBatchNorm1d(3), parts_of(shapes))
    with pytest.raises(ValueError) as alone:  # noqa: PT011  # compared below
        SyncBatchNorm1d(3)(torch.zeros(1, 3))
    assert str(alone.value) == str(plain.value)

    def body(rank):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            SyncBatchNorm1d(3)(parts_of(shapes)[rank])
        return True

    assert spans.run_ranks(2, body, tmp_path) == [True, True]


def test_no_value_at_all_is_an_empty_output_as_in_torch():
    shapes = [(0, 3), (0, 3)]
    ours, theirs = pair(3)
    parts = parts_of(shapes)
    expected = theirs(torch.zeros(0, 3))
    found = spans.over_replicas(ours, parts)
    assert [y.shape for y in found.outputs] == [expected.shape] * 2
    spans.assert_same_bytes(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_the_number_of_channels_is_checked():
    with pytest.raises(ValueError, match="expected input with 3 channels \\(got 4 channels\\)"):
        SyncBatchNorm2d(3)(torch.zeros(2, 4, 5, 5))


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (2, 3, 4, 4)), (nn.BatchNorm2d, (2, 3)), (nn.BatchNorm3d, (2, 3, 4, 4))]
)
def test_dimensions_are_checked_with_torchs_words(kind, shape):
    with pytest.raises(ValueError) as plain:  # noqa: PT011  # compared below
        kind(3)(torch.zeros(shape))
    with pytest.raises(ValueError) as ours:  # noqa: PT011  # compared below
        convert_sync_batchnorm(kind(3))(torch.zeros(shape))
    assert str(ours.value) == str(plain.value)
    with pytest.raises(ValueError, match="2D to 5D"):
        SyncBatchNorm(3)(torch.zeros(3))


def test_alone_it_is_torchs_layer_to_the_byte():
    ours, theirs = pair(4)
    x = parts_of([(6, 4, 9)])[0]
    for _ in range(2):
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours.eval()(x), theirs.eval()(x))
        ours.train()
        theirs.train()
    spans.assert_same_bytes(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_shards_have_the_same_bytes_on_any_number_of_workers():
    shapes = [(2, 4, 5, 7), (3, 4, 5, 7), (0, 4, 5, 7), (1, 4, 2, 2)]
    parts = parts_of(shapes)
    one = spans.over_shards(pair(4)[0], parts)
    for num_workers in (2, 3, 4):
        many = spans.over_shards(pair(4)[0], parts, num_workers)
        for kind in ("gradients", "buffers"):
            spans.assert_same_bytes(getattr(many, kind), getattr(one, kind))
        for kind in ("outputs", "input_gradients"):
            spans.assert_same_bytes(dict(enumerate(getattr(many, kind))), dict(enumerate(getattr(one, kind))))


def test_gradcheck_over_replicas():
    layer = SyncBatchNorm1d(3, dtype=torch.float64)
    parallel = spans.DataParallel(layer, devices=["cpu"] * 3)
    x = parts_of([(7, 3)], torch.float64)[0].requires_grad_()
    weight, bias = layer.weight, layer.bias
    assert torch.autograd.gradcheck(lambda x, w, b: parallel(x), (x, weight, bias))


def test_gradcheck_alone_in_clamp_mode():
    layer = SyncBatchNorm1d(3, eps=0.5, eps_mode="clamp", dtype=torch.float64)
    x = (parts_of([(7, 3)], torch.float64)[0] * torch.tensor([1.0, 0.1, 2.0])).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, b: layer(x), (x, layer.weight, layer.bias))


def test_inputs_that_need_no_gradient_and_frozen_parameters():
    parts = parts_of(SHAPES["4d"])
    for frozen in ("input", "weight", "bias", "affine"):
        ours, theirs = pair(4)
        for name, p in (*ours.named_parameters(), *theirs.named_parameters()):
            p.requires_grad_(not (frozen == name or frozen == "affine"))
        x = torch.cat([parts[0], parts[1]])
        outputs = []
        for layer in (spans.DataParallel(ours, devices=["cpu", "cpu"]), theirs):
            leaf = x.clone().requires_grad_(frozen != "input")
            y = layer(leaf if layer is not theirs else leaf.flatten(2))
            (y.reshape(-1) * torch.linspace(-1, 1, y.numel())).sum().backward()
            outputs.append((y.detach().reshape(x.shape), leaf.grad))
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
        for name, p in ours.named_parameters():
            expected = dict(theirs.named_parameters())[name].grad
            assert (p.grad is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-5)
