"""The kernels on a GPU, at sizes that fill it: run with ``TRITON_INTERPRET=0``; skipped where there is no GPU."""

import os

import pytest
import torch
from torch import nn

from evenstep.nn import gpu

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0", reason="needs a GPU"
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
SHAPES = [
    (64, 64, 56, 56),
    (8, 3, 224, 224),
    (64, 1024, 14, 14),
    (33, 513, 9, 11),
    (64, 2048, 7, 7),
    (70, 300, 5, 5),
    (5, 1, 300, 301),
    (50000, 37),
    (300, 2048),
    (1, 7, 1000, 999),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever the kernels do not write is NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poison(*arguments, _make=make, **options):
            made = _make(*arguments, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, poison)


def draw(shape, dtype, rows, seed, mean=0.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda").add_(mean).to(dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if rows else x


def error(found, expected):
    difference = found.double() - expected
    return float(difference.norm() / expected.norm())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_alone_writes_everything_and_the_same_bits_again(shape, dtype, rows, fused):
    mean = 3.0 if dtype == torch.float32 else 0.5
    x, dy, residual = (draw(shape, dtype, rows, seed, m) for seed, m in ((1, mean), (2, 0.0), (3, 0.0)))
    weight, bias = draw(shape[1:2], torch.float32, False, 4, 1.0), draw(shape[1:2], torch.float32, False, 5)
    added, activation = (residual, "relu") if fused else (None, None)

    def run():
        y, found = gpu.forward_alone(x, weight, bias, added, activation, 1e-5, gpu.Running())
        return [y, *gpu.backward_alone(dy, x, found, added, activation, (True,) * 4)]

    first = run()
    for _ in range(3):
        for one, other in zip(first, run(), strict=True):
            assert torch.equal(one, other)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias, residual)]
    y = nn.functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True, eps=1e-5)
    if fused:
        y = (y + leaves[3]).relu()
    gradients = torch.autograd.grad(y, leaves[: 4 if fused else 3], dy.double())
    for found, expected in zip(first, (y.detach(), *gradients), strict=False):
        assert error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("shape", [(3, 16, 8192, 8192), (3, 4096, 512, 512)], ids=str)
def test_more_than_2_to_the_31_elements(shape, rows):
    assert torch.Size(shape).numel() > 1 << 31
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    if rows:
        x = x.to(memory_format=torch.channels_last)
    dy = torch.empty_like(x)
    for number, t in enumerate((x, dy)):
        torch.manual_seed(number)
        for sample in t:
            sample.normal_()
    y, found = gpu.forward_alone(x, None, None, None, None, 1e-5, gpu.Running())
    dx = gpu.backward_alone(dy, x, found, None, None, (True, False, False, False))[0]
    for c in (0, 1, shape[1] - 1):
        one = x[:, c].double().requires_grad_()
        expected = nn.functional.batch_norm(one[:, None], None, None, training=True, eps=1e-5)[:, 0]
        (gradient,) = torch.autograd.grad(expected, one, dy[:, c].double())
        assert error(y[:, c], expected.detach()) < TOLERANCE[torch.bfloat16]
        assert error(dx[:, c], gradient) < TOLERANCE[torch.bfloat16]
    assert not any(sample.isnan().any() for t in (y, dx) for sample in t)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("shape", [(8, 64, 56, 56), (8, 2048, 7, 7), (1, 3, 500, 501)], ids=str)
def test_shards_give_the_same_bits_in_one_launch_and_one_by_one(shape, rows):
    xs = [draw((n, *shape[1:]), torch.bfloat16, rows, n) for n in (shape[0], shape[0] + 1, 2, 5)]
    dys = [draw(x.shape, torch.bfloat16, rows, 100 + n) for n, x in enumerate(xs)]

    def run(groups):
        forward = [gpu.Shards([xs[i] for i in g]) for g in groups]
        rows = torch.cat([s.statistics() for s in forward])
        found = gpu.finish(rows, None, None, 1e-5, "plus")
        ys = [y for s in forward for y in s.normalize(found.coefs)]
        backward = [gpu.Shards([xs[i] for i in g], [dys[i] for i in g]) for g in groups]
        sums = torch.cat([s.reduce(found)[0] for s in backward])
        slopes = gpu.finish_sums(sums, found, 1e-5, "plus")
        return [rows, *ys, sums, *(dx for s in backward for dx in s.gradients(found, slopes))]

    for one, other in zip(run([[0, 1, 2, 3]]), run([[0], [1], [2], [3]]), strict=True):
        assert torch.equal(one, other)
        assert not one.isnan().any()


def test_layers_on_several_streams_do_not_disturb_each_other():
    x = draw((64, 64, 56, 56), torch.bfloat16, True, 1)
    expected = gpu.forward_alone(x, None, None, None, None, 1e-5, gpu.Running())[0]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gpu.forward_alone(x, None, None, None, None, 1e-5, gpu.Running())[0])
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


def test_a_graph_of_launches_that_meet_can_be_replayed():
    x = draw((64, 64, 56, 56), torch.bfloat16, True, 1)
    expected = gpu.forward_alone(x, None, None, None, None, 1e-5, gpu.Running())[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gpu.forward_alone(x, None, None, None, None, 1e-5, gpu.Running())[0]
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
