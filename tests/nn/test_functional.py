"""The mathematics of batch norm, shard by shard, against plain torch in float64 and nn.BatchNorm."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from evenstep.nn import functional
from evenstep.nn.functional import Stats
from workers import run_workers

EPS = 1e-5
SHAPES = [
    (6, 5),
    (7, 4, 9),
    (4, 3, 5, 7),
    (3, 4, 2, 3, 5),
    (5, 1, 4, 4),
    (9, 6, 1, 1),
    (1, 3, 8, 8),
    (16, 6, 16, 16),
    (4, 512, 3, 3),
]
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels-last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, mean: float = 0.5, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)


def draw_gradient(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A random projection, independent of ``draw(shape)``."""
    return draw((2, *shape), dtype, mean=0.0)[1]


def affine(channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw((channels, 2), dtype, mean=1.0)[:, 0].contiguous(), draw((channels, 3), dtype)[:, 0].contiguous()


def error(found: Tensor, expected: Tensor) -> float:
    """The largest deviation, relative to the largest expected value."""
    assert found.shape == expected.shape
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def tree(parts: list[Stats]) -> Stats:
    while len(parts) > 1:
        parts = [
            functional.merge(*parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)
        ]
    return parts[0]


def batch_norm(
    xs: list[Tensor], dys: list[Tensor], weight: Tensor | None, bias: Tensor | None, eps: float, eps_mode: str = "plus"
) -> tuple[Stats, list[Tensor], list[Tensor], Tensor, Tensor]:
    """Statistics, outputs, input gradients, weight and bias gradient of a batch norm over several shards."""
    stats = tree([functional.statistics(x) for x in xs])
    mean, invstd = stats.mean, functional.inverse_std(stats, eps, eps_mode)
    ys = [functional.normalize(x, mean, invstd, weight, bias) for x in xs]
    sums = [functional.backward_reduce(dy, x, mean) for dy, x in zip(dys, xs, strict=True)]
    sum_dy, sum_dy_xmu = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    masked = functional.mask_clamped(sum_dy_xmu, stats, eps, eps_mode)
    dxs = [
        functional.backward_input(dy, x, mean, invstd, weight, sum_dy, masked, stats.count)
        for dy, x in zip(dys, xs, strict=True)
    ]
    return stats, ys, dxs, sum_dy_xmu * invstd, sum_dy


def reference(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, eps: float) -> list[Tensor]:
    """Output and gradients of input, weight and bias, by torch in float64."""
    x, weight, bias = (t.detach().double().clone().requires_grad_() for t in (x, weight, bias))
    y = nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy.double())]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_shard_equals_torch_in_every_shape_layout_and_dtype(
    shape: tuple[int, ...], layout: str, dtype: torch.dtype
) -> None:
    x, dy = LAYOUTS[layout](draw(shape, dtype)), draw_gradient(shape, dtype)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = affine(shape[1], arithmetic)
    _, (y,), (dx,), dweight, dbias = batch_norm([x], [dy], weight, bias, EPS)
    found, expected = [y, dx, dweight, dbias], reference(x, dy, weight, bias, EPS)
    assert y.dtype == dx.dtype == dtype
    assert dweight.dtype == dbias.dtype == torch.float64
    for name, ours, theirs in zip(("y", "dx"), found, expected, strict=False):
        assert error(ours, theirs) < TOLERANCE[dtype], name
    for name, ours, theirs in zip(("dweight", "dbias"), found[2:], expected[2:], strict=True):
        # Inputs of half types are exact here, so the sums are as exact as the arithmetic.
        assert error(ours, theirs) < TOLERANCE[arithmetic], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_uneven_and_empty_shards_of_different_size_equal_the_concatenated_batch(
    layout: str, dtype: torch.dtype
) -> None:
    shapes = [(0, 6, 4, 4), (3, 6, 5, 5), (16, 6, 16, 16), (2, 6, 1, 1), (0, 6, 2, 2), (1, 6, 7, 3), (5, 6, 2, 9)]
    xs = [LAYOUTS[layout](draw(shape, dtype, mean=i - 1.0)) for i, shape in enumerate(shapes)]
    dys = [LAYOUTS[layout](draw_gradient(shape, dtype)) for shape in shapes]
    weight, bias = affine(6, dtype)
    stats, ys, dxs, dweight, dbias = batch_norm(xs, dys, weight, bias, EPS)

    def joined(ts: list[Tensor]) -> Tensor:
        return torch.cat([t.movedim(1, -1).reshape(-1, 6) for t in ts])

    expected = reference(joined(xs), joined(dys), weight, bias, EPS)
    for name, ours, theirs in zip(
        ("y", "dx", "dweight", "dbias"), (joined(ys), joined(dxs), dweight, dbias), expected, strict=True
    ):
        assert error(ours, theirs) < TOLERANCE[dtype], name
    assert stats.count.item() == joined(xs).shape[0]


@pytest.mark.parametrize("num_shards", [1, 2, 8])
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("shape", [(16, 6, 16, 16), (64, 24, 7, 7), (64, 6)], ids=str)
def test_float32_with_mean_1e4_and_std_1e_2_is_right(shape: tuple[int, ...], layout: str, num_shards: int) -> None:
    x, dy = LAYOUTS[layout](draw(shape, mean=1e4, std=1e-2)), draw_gradient(shape)
    weight, bias = affine(shape[1], torch.float32)
    xs, dys = (list(t.tensor_split(num_shards)) for t in (x, dy))
    stats, ys, dxs, _, _ = batch_norm(xs, dys, weight, bias, 1e-12)
    variance = x.double().movedim(1, 0).flatten(1).var(1, unbiased=False)
    # float32 knows 1e4 to half of 1e-3, a twentieth of the standard deviation; means are float64 and do not suffer.
    assert error(stats.m2 / stats.count, variance) < 1e-5
    y, dx, _, _ = reference(x, dy, weight, bias, 1e-12)
    assert error(torch.cat(ys), y) < 1e-5
    assert error(torch.cat(dxs), dx) < 1e-5


def test_the_variance_of_a_constant_channel_is_zero() -> None:
    for layout, value in product(("contiguous", "channels-last"), (0.0, 0.1, -12345.678)):
        stats = functional.statistics(LAYOUTS[layout](torch.full((16, 3, 16, 16), value)))
        torch.testing.assert_close(stats.mean, torch.full((3,), value).double(), rtol=1e-7, atol=0)
        assert (stats.m2 <= 4096 * (1e-7 * value) ** 2).all()


def test_a_single_outlier_does_not_spoil_the_statistics() -> None:
    for layout in ("contiguous", "channels-last"):
        x = LAYOUTS[layout](draw((16, 3, 16, 16)))
        x[0, :, 0, 0] = 1e6
        stats = functional.statistics(x)
        expected = x.double().movedim(1, 0).flatten(1)
        assert error(stats.mean, expected.mean(1)) < 1e-6
        assert error(stats.m2 / stats.count, expected.var(1, unbiased=False)) < 1e-6


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_nan_stays_in_its_channel_and_reaches_the_output(layout: str) -> None:
    x = LAYOUTS[layout](draw((4, 3, 5, 5)))
    x[1, 2, 0, 0] = torch.nan
    stats = functional.statistics(x)
    assert stats.mean.isnan().tolist() == stats.m2.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) > 3], ids=str)
def test_outputs_and_gradients_keep_the_layout_and_are_no_views(shape: tuple[int, ...]) -> None:
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for dtype, layout in product((torch.float32, torch.bfloat16), (torch.contiguous_format, memory_format)):
        x = draw(shape, dtype).contiguous(memory_format=layout)
        _, (y,), (dx,), _, _ = batch_norm([x], [torch.ones_like(x)], None, None, EPS)
        for result in (y, dx):
            assert result.is_contiguous(memory_format=layout)
            assert result.stride() == x.stride()
            # A view that leaves an autograd.Function of several outputs cannot be modified in place (nn.ReLU(True)).
            assert not result._is_view()


def test_weight_and_bias_may_each_be_missing_and_of_a_half_type() -> None:
    x, dy = draw((4, 3, 5, 5)), draw_gradient((4, 3, 5, 5))
    weight, bias = (t.bfloat16() for t in affine(3, torch.float32))
    for w, b in product((weight, None), (bias, None)):
        _, (y,), (dx,), _, _ = batch_norm([x], [dy], w, b, EPS)
        ones, zeros = torch.ones(3), torch.zeros(3)
        expected = reference(x, dy, ones if w is None else w, zeros if b is None else b, EPS)
        assert max(error(y, expected[0]), error(dx, expected[1])) < 1e-6


def test_an_expanded_output_gradient_is_understood() -> None:
    x = LAYOUTS["channels-last"](draw((4, 3, 5, 5)))
    dy = torch.tensor([1.0, 2.0, -1.0]).view(1, 3, 1, 1).expand(4, 3, 5, 5)
    dense = batch_norm([x], [dy.contiguous()], None, None, EPS)
    expanded = batch_norm([x], [dy], None, None, EPS)
    assert error(expanded[4], torch.tensor([100.0, 200.0, -100.0])) < 1e-6
    torch.testing.assert_close(expanded[3], dense[3], rtol=1e-5, atol=1e-4)


def test_merging_with_an_empty_side_returns_the_other_sides_bits() -> None:
    some = Stats(*(torch.tensor(v).double() for v in (7.0, [-0.0, 1e-30, 3.3], [0.0, 1e30, 0.1])))
    none = functional.statistics(torch.empty(0, 3, 4, 4))
    for merged in (functional.merge(some, none), functional.merge(none, some)):
        for ours, theirs in zip(merged, some, strict=True):
            assert ours.numpy().tobytes() == theirs.numpy().tobytes()
    assert all((part == 0).all() for part in functional.merge(none, none))


def test_an_empty_shard_gives_zeros_and_empty_tensors_of_the_right_shape() -> None:
    for shape in ((0, 3), (0, 3, 4, 4), (2, 3, 0, 4)):
        x = torch.empty(shape, dtype=torch.bfloat16)
        stats = functional.statistics(x)
        assert [part.tolist() for part in stats] == [0.0, [0.0] * 3, [0.0] * 3]
        assert stats.mean.dtype == stats.count.dtype == torch.float64
        one = torch.ones(3, dtype=torch.float64)
        assert functional.normalize(x, one, one, one, one).shape == x.shape
        assert [part.tolist() for part in functional.backward_reduce(x, x, one)] == [[0.0] * 3, [0.0] * 3]
        assert functional.backward_input(x, x, one, one, one, one, one, torch.tensor(4.0)).shape == x.shape


def test_clamp_mode_has_no_gradient_through_a_clamped_variance() -> None:
    x = draw((6, 4, 5, 5), torch.float64) * torch.tensor([1.0, 1e-3, 0.0, 2.0]).view(1, 4, 1, 1)
    dy, eps = draw_gradient(x.shape, torch.float64), 1e-4
    weight, bias = affine(4, torch.float64)
    _, (y,), (dx,), dweight, dbias = batch_norm([x], [dy], weight, bias, eps, "clamp")
    leaf, w, b = (t.clone().requires_grad_() for t in (x, weight, bias))
    centred = leaf - leaf.mean((0, 2, 3), keepdim=True)
    scale = centred.square().mean((0, 2, 3), keepdim=True).clamp(min=eps).rsqrt()
    expected = centred * scale * w.view(1, 4, 1, 1) + b.view(1, 4, 1, 1)
    gradients = torch.autograd.grad(expected, (leaf, w, b), dy)
    for ours, theirs in zip((y, dx, dweight, dbias), (expected.detach(), *gradients), strict=True):
        assert error(ours, theirs) < 1e-12


def test_an_unknown_eps_mode_is_refused_with_the_two_known_ones() -> None:
    stats = functional.statistics(draw((4, 3)))
    with pytest.raises(ValueError, match=r"'add'.*\"plus\".*\"clamp\""):
        functional.inverse_std(stats, EPS, "add")


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_running_statistics_follow_nn_batch_norm(dtype: torch.dtype, momentum: float | None) -> None:
    norm = nn.BatchNorm2d(3, momentum=momentum).to(dtype)
    mean, var, num = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype), torch.tensor(0)
    kept = mean, var
    for step in range(4):
        x = draw((4, 3, 5, 5), dtype, mean=step, std=step + 1)
        norm(x)
        functional.update_running(mean, var, num, functional.statistics(x), momentum)
    assert num.item() == norm.num_batches_tracked.item() == 4
    assert error(kept[0], norm.running_mean) < TOLERANCE[dtype]
    assert error(kept[1], norm.running_var) < TOLERANCE[dtype]


def test_running_buffers_may_be_missing_or_of_another_dtype() -> None:
    stats = functional.statistics(draw((8, 3, 4, 4)))
    functional.update_running(None, None, None, stats, 0.1)
    for dtype, momentum in product((torch.bfloat16, torch.float64), (0.1, None)):
        mean, var, num = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype), torch.tensor(1)
        functional.update_running(mean, var, num, stats, momentum)
        factor = 0.5 if momentum is None else momentum
        torch.testing.assert_close(mean, (stats.mean * factor).to(dtype), rtol=1e-2, atol=0)
        torch.testing.assert_close(var, (1 - factor + stats.m2 / 127 * factor).to(dtype), rtol=1e-2, atol=0)
    with pytest.raises(ValueError, match="num_batches_tracked"):
        functional.update_running(torch.zeros(3), torch.ones(3), None, stats, None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(16, 6, 16, 16), (33, 64, 7, 7), (128, 10)], ids=str)
def test_bits_depend_on_nothing_that_ran_before(shape: tuple[int, ...], layout: str) -> None:
    def run(make: Callable[[Tensor], Tensor]) -> bytes:
        x, dy = make(LAYOUTS[layout](draw(shape))), make(draw_gradient(shape))
        weight, bias = affine(shape[1], torch.float32)
        stats, ys, dxs, dweight, dbias = batch_norm([x], [dy], weight, bias, EPS)
        return b"".join(t.contiguous().numpy().tobytes() for t in (*stats, *ys, *dxs, dweight, dbias))

    def misaligned(x: Tensor) -> Tensor:
        if layout == "sliced":
            return x
        room = torch.empty(x.numel() + 1)
        return room[1:].as_strided(x.shape, x.stride(), 1).copy_(x)

    first = run(lambda x: x)
    garbage = [torch.randn(n).mul_(1e30) for n in (1 << 10, 1 << 18, 1 << 20)]
    batch_norm([draw((3, 7, 5, 5))], [draw((3, 7, 5, 5))], None, None, EPS)
    del garbage
    assert run(lambda x: x) == first
    assert run(misaligned) == first


def passes_of(x: Tensor, dy: Tensor, num_threads: int) -> bytes:
    weight, bias = affine(x.shape[1], torch.float32)
    torch.set_num_threads(num_threads)
    try:
        stats, ys, dxs, dweight, dbias = batch_norm([x], [dy], weight, bias, EPS)
    finally:
        torch.set_num_threads(1)  # before any copy: threads that torch starts cannot be forked
    return b"".join(t.contiguous().numpy().tobytes() for t in (*stats, *ys, *dxs, dweight, dbias))


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("shape", [(16, 64, 16, 16), (40, 512, 7, 7), (3, 5, 120, 111), (700, 300)], ids=str)
def test_no_bit_depends_on_the_number_of_threads(shape: tuple[int, ...], layout: str) -> None:
    x, dy = LAYOUTS[layout](draw(shape)), LAYOUTS[layout](draw_gradient(shape))
    assert len({passes_of(x, dy, num_threads) for num_threads in (1, 2, 3, 5)}) == 1


def test_a_fork_does_not_wait_for_the_threads_of_its_parent() -> None:
    x, dy = draw((64, 8, 32, 32)), draw_gradient((64, 8, 32, 32))
    here = passes_of(x, dy, 2)
    assert run_workers(1, lambda _: passes_of(x, dy, 2), timeout_s=20.0) == [here]
    assert passes_of(x, dy, 1) == here
