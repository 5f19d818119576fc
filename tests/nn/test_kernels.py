"""The Triton kernels, by Triton's interpreter where there is no GPU (``TRITON_INTERPRET=0`` for a GPU)."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from evenstep.nn import functional, gpu, tiles

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
EPS = 1e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes milliseconds for every program."""
    if DEVICE == "cpu":
        monkeypatch.setattr(gpu, "sum_tile", lambda shape, inputs: small_tile(shape))
        monkeypatch.setattr(gpu, "map_tile", lambda shape: tiles.tile(shape, 256, 16, 1, 2, 4))
        monkeypatch.setattr(gpu, "whole", small_whole)
    for cache in (gpu._frame, gpu._alone):
        cache.cache_clear()
    yield
    for cache in (gpu._frame, gpu._alone):
        cache.cache_clear()


def small_tile(shape):
    return tiles.tile(shape, 128, 16, 1, 2, 4)


def small_whole(shape, outer, inputs):
    tile = small_tile(shape)
    walk = tiles.walk(shape, outer, tile)
    parts = tiles.parts_of(shape, walk)
    return tiles.WholeLaunch(tile, tile.positions, walk, 2, parts, (2, 4))


def own_channels(shape, outer, inputs):
    """Every program has two channels for itself."""
    if shape.flat:
        tile = tiles.Tile(tiles.power(2 * shape.inner), 1, 1, 2)
        walk = tiles.Walk(1, -(-shape.channels // 2), 1)
        return tiles.WholeLaunch(tile, 2 * shape.inner, walk, 0, shape.inner, (4, 2))
    tile = tiles.Tile(16, 2, 1, 2, 1)
    walk = tiles.walk(shape, outer, tile)
    return tiles.WholeLaunch(tile, 16, walk, 0, walk.columns, (2, 2))


def draw(shape, dtype=torch.float32, rows=False, seed=0, mean=0.0, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(DEVICE, dtype)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if rows else x


def reference(x, dy, weight, bias, residual=None, activation=None, eps=EPS):
    """Output and gradients of input, weight, bias and residual, by torch in float64."""
    leaves = [t.detach().cpu().double().requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    y = nn.functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True, eps=eps)
    if residual is not None:
        y = y + leaves[3]
    if activation:
        y = y.relu()
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.cpu().double())]


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.cpu().double() - expected).norm() / expected.norm())


CASES = [
    ((3, 3, 5, 9), torch.float32, False, None, False),
    ((3, 3, 5, 9), torch.float32, True, "relu", True),
    ((5, 20, 3, 3), torch.float32, False, "relu", True),  # flat
    ((5, 20, 3, 3), torch.bfloat16, True, "relu", False),
    ((2, 3, 12, 12), torch.bfloat16, False, "relu", True),
    ((2, 3, 12, 12), torch.float16, False, None, True),
    ((37, 21), torch.float32, False, "relu", False),
    ((3, 1, 17), torch.float32, False, None, False),
    ((9, 4, 1, 1), torch.float16, False, "relu", True),
    ((2, 3, 2, 3, 5), torch.float32, True, None, False),
]


WAYS = [(case, "usual") for case in CASES]
WAYS += [(case, "own") for case in CASES[:9:2]] + [(case, "separate") for case in CASES[1:7:4]]


@pytest.mark.long
@pytest.mark.parametrize(("case", "way"), WAYS, ids=str)
def test_a_layer_alone_equals_torch_in_float64(case, way, monkeypatch):
    shape, dtype, rows, activation, has_residual = case
    if way == "own":
        monkeypatch.setattr(gpu, "whole", own_channels)
    if way == "separate":
        monkeypatch.setattr(gpu, "_can_meet", lambda: False)
    x, dy = draw(shape, dtype, rows, 1, mean=0.5), draw(shape, dtype, rows, 2)
    residual = draw(shape, dtype, rows, 3) if has_residual else None
    weight, bias = draw(shape[1:2], seed=4, mean=1.0), draw(shape[1:2], seed=5)
    running = gpu.Running(torch.zeros_like(weight), torch.ones_like(weight), torch.tensor(0, device=DEVICE), 0.3)
    y, found = gpu.forward_alone(x, weight, bias, residual, activation, EPS, running)
    gradients = gpu.backward_alone(dy, x, found, residual, activation, (True,) * 4)
    expected = reference(x, dy, weight, bias, residual, activation)
    names = ("y", "dx", "dweight", "dbias", "dresidual")
    for name, ours, theirs in zip(names, (y, *gradients), expected, strict=False):
        assert error(ours, theirs) < TOLERANCE[dtype], name
    assert y.stride() == x.stride()
    norm = nn.BatchNorm1d(shape[1], momentum=0.3).double()
    norm(x.cpu().double().reshape(*shape[:2], -1))
    assert error(running.mean, norm.running_mean) < 1e-6
    assert error(running.var, norm.running_var) < 1e-6
    assert running.num_batches_tracked.item() == 1


@pytest.mark.parametrize(
    ("shape", "rows"), [((6, 3, 5, 5), False), ((6, 3, 5, 5), True), ((6, 5, 2, 2), False)], ids=str
)
@pytest.mark.long
def test_shards_give_the_same_bits_in_one_launch_and_one_by_one(shape, rows):
    parts = [draw(shape, rows=rows, seed=s)[: n + 1].clone() for s, n in enumerate((5, 1, 3))]
    dys = [draw(p.shape, rows=rows, seed=10 + s) for s, p in enumerate(parts)]
    residuals = [draw(p.shape, rows=rows, seed=20 + s) for s, p in enumerate(parts)]
    parts = [functional.dense(p) for p in parts]
    weight, bias = draw(shape[1:2], seed=4, mean=1.0), draw(shape[1:2], seed=5)

    def run(groups):
        forward = [gpu.Shards([parts[i] for i in g], None, [residuals[i] for i in g], "relu") for g in groups]
        rows = torch.cat([s.statistics() for s in forward])
        found = gpu.finish(rows, weight, bias, EPS, "plus")
        ys = [y for s in forward for y in s.normalize(found.coefs)]
        backward = [
            gpu.Shards([parts[i] for i in g], [dys[i] for i in g], [residuals[i] for i in g], "relu", gate=True)
            for g in groups
        ]
        sums, dweights, dbiases = (
            torch.cat(t) for t in zip(*(s.reduce(found, weight=True, bias=True) for s in backward), strict=True)
        )
        slopes = gpu.finish_sums(sums, found, EPS, "plus")
        dxs = [dx for s in backward for dx in s.gradients(found, slopes)]
        gated = [g for s in backward for g in s.gated]
        return [rows, *ys, sums, dweights, dbiases, *dxs, *gated]

    together, apart = run([[0, 1, 2]]), run([[0], [1], [2]])
    for ours, theirs in zip(together, apart, strict=True):
        assert torch.equal(ours, theirs)
    rows, ys, dxs = together[0], together[1:4], together[7:10]

    def joined(ts):
        return torch.cat([t.movedim(1, -1).reshape(-1, shape[1]) for t in ts])

    expected = reference(joined(parts), joined(dys), weight, bias, joined(residuals), "relu")
    assert error(joined(ys), expected[0]) < 1e-6
    assert error(joined(dxs), expected[1]) < 1e-6
    merged = functional.merge_rows(rows.clone())
    found = gpu.finish(rows, None, None, EPS, "plus")
    torch.testing.assert_close(found.vectors[: shape[1]], merged.mean, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(found.vectors[shape[1] : 2 * shape[1]], merged.m2, rtol=1e-13, atol=0)


def test_empty_shards_count_for_nothing_and_clamp_holds_the_variance():
    x = draw((4, 3, 4, 4), mean=2.0) * torch.tensor([1.0, 1e-4, 0.0], device=DEVICE).view(1, 3, 1, 1)
    row = gpu.Shards([x]).statistics()
    none = torch.zeros_like(row)
    found = gpu.finish(torch.cat([none, row, none]), None, None, 1e-3, "clamp")
    expected = functional.merge_rows(row.clone().cpu())
    assert torch.equal(found.vectors[:3].cpu(), expected.mean)
    assert found.vectors[-1].item() == 64
    variance = (expected.m2 / 64).clamp(min=1e-3)
    torch.testing.assert_close(found.vectors[6:9].cpu(), variance.rsqrt())
    sums = torch.ones_like(row)
    slopes = gpu.finish_sums(torch.cat([none, sums]), found, 1e-3, "clamp")
    assert slopes[:3].count_nonzero().item() == 1, "no gradient flows through a variance that was raised"


@pytest.mark.parametrize("rows", [False, True])
def test_a_mean_of_1e4_with_deviation_1e_2_is_right(rows):
    shape = (6, 3, 5, 9)
    x, dy = draw(shape, rows=rows, mean=1e4, std=1e-2), draw(shape, rows=rows, seed=1)
    one = torch.ones(3, device=DEVICE)
    y, found = gpu.forward_alone(x, one, one, None, None, 1e-12, gpu.Running())
    dx = gpu.backward_alone(dy, x, found, None, None, (True,) * 4)[0]
    expected = reference(x, dy, one, one, eps=1e-12)
    assert error(y, expected[0]) < 1e-5
    assert error(dx, expected[1]) < 1e-5


def test_nan_passes_the_activation():
    x = draw((3, 2, 4, 4))
    x[0, 1, 0, 0] = torch.nan
    y, _ = gpu.forward_alone(x, None, None, None, "relu", EPS, gpu.Running())
    assert y[:, 1].isnan().all()
    assert not y[:, 0].isnan().any()


def test_without_triton_everything_but_the_kernels_is_there_and_nothing_is_said():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, evenstep.nn\n"
        "from evenstep.nn import gpu\n"
        "assert gpu._kernels() is None and not gpu.takes(torch.zeros(1))\n"
        "evenstep.nn.SyncBatchNorm2d(2, activation='relu')(torch.randn(2, 2, 3, 3)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
