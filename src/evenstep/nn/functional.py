"""The mathematics of batch normalization, cut where shards meet.

A batch norm over several shards is five local computations with two meetings between them. This module holds the
local computations as pure functions of tensors::

    stats = statistics(x)                                   # each shard; then merge() over the fixed tree: meeting 1
    invstd = inverse_std(stats, eps, eps_mode)
    y = normalize(x, stats.mean, invstd, weight, bias)
    sum_dy, sum_dy_xmu = backward_reduce(dy, x, mean, invstd)  # each shard; then tree sums: meeting 2
    dx = backward_input(dy, x, mean, invstd, weight, sum_dy, mask_clamped(sum_dy_xmu, stats, eps, eps_mode), count)

It is not for moving anything between shards, nor for autograd: these functions are what an ``autograd.Function``
calls, they record no graph, and called with gradients enabled on tensors that require them they raise.

What the caller must keep:

- All vectors named mean, invstd, weight, bias, sum_dy, sum_dy_xmu are ``[C]``; all but weight and bias have
  ``accumulation_dtype(x.dtype)`` and live on the device of ``x``.
- The global count is at least 2 before ``update_running`` and at least 1 before ``inverse_std``; asking is the caller's
  business, because it is the caller who knows the error to give.
- The result of every function is a function of the values, shape and memory layout of its arguments, the device and the
  number of intra-op threads, bit for bit; it does not depend on what ran before. Another number of threads may change
  the last bits.

How exact it is: the mean is exact to about a rounding of the accumulation dtype, and M2 is taken about the mean, never
as a difference of squares. Outputs and input gradients are formed as ``x * a + b`` per channel, as ``nn.BatchNorm``
forms its outputs, so where |mean| is far above the standard deviation they carry an error of about one rounding of the
mean, which is as much as rounding the mean itself costs.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "EpsMode",
    "Stats",
    "accumulation_dtype",
    "backward_input",
    "backward_reduce",
    "inverse_std",
    "mask_clamped",
    "merge",
    "normalize",
    "statistics",
    "update_running",
]

EpsMode = Literal["plus", "clamp"]
"""How eps keeps the variance from zero: ``var + eps`` (torch) or ``max(var, eps)``."""

# torch's CPU kernels for rows of channels keep one running sum per column. Folding several rows into one wider row
# gives several shorter sums per channel: more exact by an order of magnitude, and faster. 2048 columns stay in L1.
_SUMMED_WIDTH = 2048

# Elementwise work on rows needs no more than a few vector registers in a row.
_ELEMENTWISE_WIDTH = 64

# Bytes of centred input per thread that statistics() has alive at once: about half an L2 cache.
_CENTRED_BYTES = 1 << 20

# A running sum of float32 loses about sqrt(rows) roundings of the mean. That is harmless while the mean is at most
# this many standard deviations; beyond it statistics() takes the centred way.
_PLAIN_SUM_LIMIT = 4.0


class Stats(NamedTuple):
    """The statistics of some elements of a batch, in a form that merges exactly.

    Attributes:
        count: Number of elements per channel, 0-dim (or any shape that broadcasts with ``[C]``), in the accumulation
            dtype.
        mean: Mean, ``[C]``; 0 where count is 0.
        m2: Sum of squared deviations from ``mean``, ``[C]``; 0 where count is 0.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over elements of ``dtype`` are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics(x: Tensor) -> Stats:
    """Count, mean and M2 of each channel of ``x``.

    On a CPU it reads a value back to choose between a fast and an exact sum; on other devices it does not wait.

    Args:
        x: Input, ``[N, C, *spatial]``, 2-D to 5-D, any floating dtype and layout; may be empty.

    Returns:
        The statistics, in the accumulation dtype; all zero where ``x`` has no elements.
    """
    dtype = accumulation_dtype(x.dtype)
    channels = x.shape[1]
    size = x.numel() // max(channels, 1)
    count = torch.full((), size, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return Stats(count, *torch.zeros(2, channels, dtype=dtype, device=x.device))
    if x.device.type != "cpu":
        # The accelerators' kernel is a Welford reduction already; the chunks below would only cost launches.
        zeros = torch.zeros(channels, dtype=dtype, device=x.device)
        mean, var = torch.batch_norm_update_stats(_dense(x), zeros, zeros.clone(), 0.0)
        return Stats(count, mean, var * count)
    x = _dense(x)
    if _is_rows(x) and x.dtype == dtype:
        mean, m2 = _folded_moments(x, size)
        # A NaN fails the comparison and takes the slow way to the same NaN.
        if torch.addcmul(m2, mean, mean, value=-size / _PLAIN_SUM_LIMIT**2).amin().item() >= 0:
            return Stats(count, mean, m2)
    return Stats(count, *_centred_moments(x, size))


def merge(a: Stats, b: Stats) -> Stats:
    """The statistics of the elements of ``a`` and ``b`` together (Chan's formula).

    Not associative in its last bits: whoever merges more than two keeps to one fixed tree.

    Args:
        a: Statistics of one part.
        b: Statistics of the other part, of the same dtype and number of channels.

    Returns:
        The merged statistics. Where one side has count 0 these are the other side's, bit for bit.
    """
    count = a.count + b.count
    share = b.count / count.clamp(min=1)
    delta = b.mean - a.mean
    mean = torch.addcmul(a.mean, delta, share)
    m2 = a.m2 + b.m2 + delta.square() * (a.count * share)
    a_empty, b_empty = a.count == 0, b.count == 0
    return Stats(
        count,
        torch.where(b_empty, a.mean, torch.where(a_empty, b.mean, mean)),
        torch.where(b_empty, a.m2, torch.where(a_empty, b.m2, m2)),
    )


def inverse_std(stats: Stats, eps: float, eps_mode: EpsMode = "plus") -> Tensor:
    """The factor that brings each channel to variance 1.

    Args:
        stats: The global statistics, count at least 1.
        eps: Keeps the variance from zero.
        eps_mode: "plus" for ``(var + eps) ** -0.5``, "clamp" for ``max(var, eps) ** -0.5``.

    Returns:
        The inverse standard deviation (biased), ``[C]``.

    Raises:
        ValueError: If ``eps_mode`` is neither of the two.
    """
    variance = stats.m2 / stats.count
    return (variance.clamp_(min=eps) if _clamps(eps_mode) else variance.add_(eps)).rsqrt_()


def normalize(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The output of batch norm: ``(x - mean) * invstd * weight + bias`` per channel.

    Args:
        x: Input, ``[N, C, *spatial]``.
        mean: Mean, ``[C]``.
        invstd: Inverse standard deviation, ``[C]``.
        weight: Scale, ``[C]``, or None for 1.
        bias: Offset, ``[C]``, or None for 0.

    Returns:
        A tensor of its own (no view) with the shape and dtype of ``x``, and its layout where that is contiguous or
        channels-last, else contiguous.
    """
    x = _dense(x)
    if x.numel() == 0:
        return torch.empty_like(x)
    return _affine(x, mean, invstd if weight is None else invstd * weight, bias)


def backward_reduce(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums over a shard that the backward of batch norm needs.

    The shard's bias gradient is the first, its weight gradient the second times ``invstd``.

    Args:
        dy: Gradient of the output, shaped as ``x``, any layout.
        x: Input of this shard, ``[N, C, *spatial]``; may be empty.
        mean: The global mean, ``[C]``.
        invstd: The global inverse standard deviation, ``[C]``; the sums do not depend on it.

    Returns:
        ``sum(dy)`` and ``sum(dy * (x - mean))``, each ``[C]``, in the accumulation dtype.
    """
    if x.numel() == 0:
        return torch.zeros_like(invstd), torch.zeros_like(invstd)
    x = _dense(x)
    dy = _like(dy, x)
    if not _is_rows(x):
        return _sums(dy, x, mean)
    fold = _fold(x, _SUMMED_WIDTH)
    sum_dy, sum_dy_xmu = _sums(_folded_image(dy, fold), _folded_image(x, fold), _repeated(mean, fold))
    if fold > 1:
        sum_dy, sum_dy_xmu = sum_dy.view(fold, -1).sum(0), sum_dy_xmu.view(fold, -1).sum(0)
    return sum_dy, sum_dy_xmu


def backward_input(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input of a shard, given the sums over all shards.

    ``(dy - sum_dy / count - (x - mean) * invstd**2 * sum_dy_xmu / count) * invstd * weight`` per channel. The last term
    is the gradient through the variance: where "clamp" held the variance at eps there is none, and the caller passes
    ``mask_clamped(sum_dy_xmu, ...)``.

    Args:
        dy: Gradient of the output, shaped as ``x``, any layout.
        x: Input of this shard, ``[N, C, *spatial]``; may be empty.
        mean: The global mean, ``[C]``.
        invstd: The global inverse standard deviation, ``[C]``.
        weight: Scale, ``[C]``, or None for 1.
        sum_dy: First of the sums of ``backward_reduce``, over all shards, ``[C]``.
        sum_dy_xmu: Second of these sums over all shards, masked in "clamp" mode, ``[C]``.
        count: The global count, 0-dim.

    Returns:
        The gradient, with shape, dtype and layout as ``normalize`` gives them.
    """
    x = _dense(x)
    if x.numel() == 0:
        return torch.empty_like(x)
    dtype = mean.dtype
    scale = invstd if weight is None else (invstd * weight).to(dtype)
    per_element = scale / -count
    slope = invstd.square().mul_(sum_dy_xmu).mul_(per_element)
    # Half types are widened here: rounding the intermediate result to them would double the error of the gradient.
    wide_x, wide_dy = x.to(dtype), _like(dy, x).to(dtype)
    dx = _affine(wide_x, mean, slope, per_element.mul_(sum_dy))
    if _is_rows(x):
        fold = _fold(x, _ELEMENTWISE_WIDTH)
        _folded_rows(dx, fold).addcmul_(_folded_rows(wide_dy, fold), _repeated(scale, fold))
    else:
        dx.addcmul_(wide_dy, scale.view(-1, *[1] * (x.dim() - 2)))
    return dx.to(x.dtype)


def mask_clamped(sum_dy_xmu: Tensor, stats: Stats, eps: float, eps_mode: EpsMode) -> Tensor:
    """``sum_dy_xmu`` with 0 where eps_mode "clamp" held the variance at eps, so that no gradient flows through it.

    Only for ``backward_input``: the weight gradient wants the unmasked sum.

    Args:
        sum_dy_xmu: The second sum of ``backward_reduce``, ``[C]``.
        stats: The global statistics of the forward.
        eps: As given to ``inverse_std``.
        eps_mode: As given to ``inverse_std``; "plus" masks nothing.

    Returns:
        The masked sum, ``[C]``.

    Raises:
        ValueError: If ``eps_mode`` is neither of the two.
    """
    if not _clamps(eps_mode):
        return sum_dy_xmu
    return torch.where(stats.m2 / stats.count < eps, torch.zeros_like(sum_dy_xmu), sum_dy_xmu)


@torch.no_grad()
def update_running(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    stats: Stats,
    momentum: float | None,
) -> None:
    """Moves the running statistics, in place, as ``nn.BatchNorm`` does.

    Args:
        running_mean: Running mean, ``[C]``, any floating dtype, or None.
        running_var: Running variance (unbiased), ``[C]``, any floating dtype, or None.
        num_batches_tracked: Number of batches so far, 0-dim integer, increased by 1; or None.
        stats: The global statistics, count at least 2.
        momentum: Weight of this batch, or None for the average over all batches.

    Raises:
        ValueError: If ``momentum`` is None and there is no ``num_batches_tracked`` to average over.
    """
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    factor: float | Tensor
    if momentum is not None:
        factor = momentum
    elif num_batches_tracked is not None:
        factor = num_batches_tracked.to(stats.mean.dtype).reciprocal()
    else:
        raise ValueError("momentum=None averages over all batches and needs num_batches_tracked; pass it or a momentum")
    batch = (stats.mean, stats.m2 / (stats.count - 1))
    for running, value in zip((running_mean, running_var), batch, strict=True):
        if running is None:
            continue
        if running.dtype == value.dtype:
            running.lerp_(value, factor)
        else:
            dtype = torch.promote_types(running.dtype, value.dtype)
            weight = factor.to(dtype) if isinstance(factor, Tensor) else factor
            running.copy_(torch.lerp(running.to(dtype), value.to(dtype), weight))


def _clamps(eps_mode: str) -> bool:
    if eps_mode not in ("plus", "clamp"):
        raise ValueError(f'eps_mode is {eps_mode!r}; expected "plus" (var + eps) or "clamp" (max(var, eps))')
    return eps_mode == "clamp"


def _is_rows(x: Tensor) -> bool:
    """Whether the channels of one position lie side by side: channels-last, or nothing but N and C."""
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    if x.dim() == 5:
        return x.is_contiguous(memory_format=torch.channels_last_3d)
    return x.movedim(1, -1).is_contiguous()


def _dense(x: Tensor) -> Tensor:
    """``x`` as rows of channels or as contiguous planes, the two layouts the kernels know."""
    return x if _is_rows(x) else x.contiguous()


def _like(dy: Tensor, x: Tensor) -> Tensor:
    """``dy`` in the layout of the dense tensor ``x``."""
    if not _is_rows(x):
        return dy.contiguous()
    return dy if _is_rows(dy) else torch.empty_like(x, dtype=dy.dtype).copy_(dy)


@lru_cache(maxsize=4096)
def _largest_fold(rows: int, channels: int, width: int) -> int:
    widest = max(1, min(rows, width // channels))
    return next(fold for fold in range(widest, 0, -1) if rows % fold == 0)


def _fold(x: Tensor, width: int) -> int:
    """How many rows of ``x`` to see as one so that a row has at most ``width`` columns, if it can be so few."""
    return _largest_fold(x.numel() // x.shape[1], x.shape[1], width)


def _repeated(vector: Tensor, fold: int) -> Tensor:
    return vector.repeat(fold) if fold > 1 else vector


def _folded_rows(x: Tensor, fold: int) -> Tensor:
    """Rows as ``[rows / fold, fold * C]``."""
    width = fold * x.shape[1]
    return x.as_strided((x.numel() // width, width), (width, 1))


def _folded_image(x: Tensor, fold: int) -> Tensor:
    """Rows as ``[1, fold * C, rows / fold, 1]`` with the strides of channels-last, for the batch-norm kernels."""
    width = fold * x.shape[1]
    return x.as_strided((1, width, x.numel() // width, 1), (x.numel(), 1, width, width))


def _affine(x: Tensor, mean: Tensor, slope: Tensor, offset: Tensor | None) -> Tensor:
    """``(x - mean) * slope + offset`` per channel of a dense tensor, in its layout."""
    dtype = mean.dtype
    slope = slope.to(dtype)
    offset = None if offset is None else offset.to(dtype)
    if not _is_rows(x) or x.dtype != dtype:
        # The inference kernel with variance 1 and eps 0; its output is a tensor of its own, in the layout of x.
        y: Tensor = torch.native_batch_norm(x, slope, offset, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
        return y
    constant = -mean * slope if offset is None else torch.addcmul(offset, mean, slope, value=-1)
    fold = _fold(x, _ELEMENTWISE_WIDTH)
    y = torch.empty_like(x)
    torch.addcmul(_repeated(constant, fold), _folded_rows(x, fold), _repeated(slope, fold), out=_folded_rows(y, fold))
    return y


def _sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """``sum(dy)`` and ``sum(dy * (x - mean))``: the training backward without its input gradient."""
    ones = torch.ones_like(mean)
    _, sum_dy_xmu, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, None, None, mean, ones, True, 0.0, [False, True, True]
    )
    return sum_dy, sum_dy_xmu


def _folded_moments(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and M2 of rows, by the kernel's two passes over folded rows and the merge of the folds."""
    fold = _fold(x, _SUMMED_WIDTH)
    mean, variance = torch.batch_norm_update_stats(_folded_image(x, fold), None, None, 0.0)
    if fold > 1:
        within = variance.view(fold, -1).mean(0)
        channels = x.shape[1]
        folds = mean.as_strided((1, channels, fold, 1), (mean.numel(), 1, channels, channels))
        mean, between = torch.batch_norm_update_stats(folds, None, None, 0.0)
        variance = within.add_(between)
    return mean, variance.mul_(size)


def _centred_moments(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and M2 of a dense tensor by sums over ``x - m``, m being the mean up to rounding errors.

    The rounding error of m is itself measured and taken out, so mean and M2 are right even where the resolution of the
    input is a tenth of its standard deviation.
    """
    dtype = accumulation_dtype(x.dtype)
    channels = x.shape[1]
    if rows := _is_rows(x):
        fold = _fold(x, _SUMMED_WIDTH)
        blocks = _folded_rows(x, fold)
        start = _folded_rows(x, 1).mean(0, dtype=dtype)
        centre = _repeated(start, fold)
    else:
        blocks = x.view(x.shape[0], channels, -1)
        start = blocks.mean((0, 2), dtype=dtype)
        centre = start.view(channels, 1)
    step = max(1, _CENTRED_BYTES * torch.get_num_threads() // (x.numel() // blocks.shape[0] * dtype.itemsize))
    scratch = torch.empty((min(step, blocks.shape[0]), *blocks.shape[1:]), dtype=dtype, device=x.device)
    zero = torch.zeros(centre.numel(), dtype=dtype, device=x.device)
    partial: list[Tensor] = []
    for block in blocks.split(step):
        centred = torch.sub(block, centre, out=scratch[: block.shape[0]])
        view = _folded_image(centred, 1) if rows else centred
        partial += _sums(view, view, zero)
    sums, squares = torch.stack(partial).view(len(partial) // 2, 2, -1, channels).sum((0, 2))
    shift = sums / size
    return start + shift, squares.addcmul_(sums, shift, value=-1).clamp_(min=0)
