"""The mathematics of batch normalization, cut where shards meet.

A batch norm over several shards is five local computations with two meetings between them. This module holds the
local computations as pure functions of tensors::

    stats = statistics(x)                                   # each shard; then merge() over the fixed tree: meeting 1
    invstd = inverse_std(stats, eps, eps_mode)
    y = normalize(x, stats.mean, invstd, weight, bias)
    sum_dy, sum_dy_xmu = backward_reduce(dy, x, stats.mean)    # each shard; then tree sums: meeting 2
    dx = backward_input(dy, x, mean, invstd, weight, sum_dy, mask_clamped(sum_dy_xmu, stats, eps, eps_mode), count)

It is not for moving anything between shards, nor for autograd: these functions are what an ``autograd.Function``
calls, they record no graph.

What the caller must keep:

- Vectors per channel (mean, invstd, sum_dy, sum_dy_xmu) are ``[C]`` in float64, on the device of ``x``: they are small,
  and so neither a large mean nor a large count costs anything. Elements are read as they are and summed in float32
  (float64 for float64) within blocks, in float64 between them.
- The global count is at least 2 before ``update_running`` and at least 1 before ``inverse_std``; asking is the caller's
  business, because it is the caller who knows the error to give.
- The result of every function is a function of the values, shape and memory layout of its arguments and the device,
  bit for bit. On the CPU it does not depend on the number of intra-op threads either, although they share the work.

On the CPU the four passes are the C core's (`cpu`), each one read of its inputs; on a GPU those of Triton (`gpu`) where
it is installed and has the dtype; elsewhere torch's.

A residual that is added and an activation belong to `normalize`; backward first asks `gate` for the gradient that
passes the activation.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from evenstep.native import core
from evenstep.nn import cpu, gpu

__all__ = [
    "EpsMode",
    "Stats",
    "as_row",
    "backward_input",
    "backward_reduce",
    "dense",
    "gate",
    "inverse_std",
    "like",
    "mask_clamped",
    "merge",
    "merge_rows",
    "normalize",
    "statistics",
    "statistics_row",
    "update_running",
]

EpsMode = Literal["plus", "clamp"]
"""How eps keeps the variance from zero: ``var + eps`` (torch) or ``max(var, eps)``."""


class Stats(NamedTuple):
    """The statistics of some elements of a batch, in a form that merges exactly.

    Attributes:
        count: Number of elements per channel, 0-dim (or any shape that broadcasts with ``[C]``).
        mean: Mean, ``[C]``; 0 where count is 0.
        m2: Sum of squared deviations from ``mean``, ``[C]``; 0 where count is 0.
    """

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody asks of statistics
    mean: Tensor
    m2: Tensor


def statistics(x: Tensor) -> Stats:
    """Count, mean and M2 of each channel of ``x``.

    Args:
        x: Input, ``[N, C, *spatial]``, 2-D to 5-D, any floating dtype and layout; may be empty.

    Returns:
        The statistics in float64; all zero where ``x`` has no elements.
    """
    return _from_row(statistics_row(x))


def statistics_row(x: Tensor) -> Tensor:
    """The same as one vector ``[1 + 2C]`` for the wire: count, mean, M2."""
    if x.numel() == 0:
        return torch.zeros(1 + 2 * x.shape[1], dtype=torch.float64, device=x.device)
    x = dense(x)
    if x.device.type == "cpu":
        return cpu.statistics(x)
    if gpu.takes(x):
        return gpu.Shards([x]).statistics()[0]
    size = x.numel() // x.shape[1]
    count = torch.full((), size, dtype=torch.float64, device=x.device)
    zeros = torch.zeros(x.shape[1], dtype=_arithmetic(x), device=x.device)
    found, variance = torch.batch_norm_update_stats(x, zeros, zeros.clone(), 0.0)
    return as_row(Stats(count, found.double(), variance.double() * size))


def merge(a: Stats, b: Stats) -> Stats:
    """The statistics of the elements of ``a`` and ``b`` together (Chan's formula).

    Not associative in its last bits: to merge more than two, use one fixed tree.

    Args:
        a: Statistics of one part.
        b: Statistics of the other part, of the same dtype and number of channels.

    Returns:
        The merged statistics. Where one side has count 0 these are the other side's, bit for bit.
    """
    return merge_rows(torch.stack([as_row(a), as_row(b)]))


def as_row(stats: Stats) -> Tensor:
    """Statistics as ``statistics_row`` gives them."""
    return torch.cat([stats.count.view(1), stats.mean, stats.m2])


def _from_row(row: Tensor) -> Stats:
    count, mean, m2 = row.split_with_sizes((1, len(row) // 2, len(row) // 2))
    return Stats(count.view(()), mean, m2)


def merge_rows(rows: Tensor) -> Stats:
    """Merge the statistics of several shards, one row each, in the fixed tree over shards.

    Args:
        rows: ``[K, 1 + 2C]``, each as ``statistics_row`` gives it. Overwritten.
    """
    host = rows.cpu().contiguous()
    core.norm_merge(len(host), host.shape[1] // 2, host.data_ptr())
    return _from_row(host[0].to(rows.device))


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


def normalize(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The output of batch norm: ``(x - mean) * invstd * weight + bias`` per channel, plus the residual, activated.

    Args:
        x: Input, ``[N, C, *spatial]``.
        mean: Mean, ``[C]``.
        invstd: Inverse standard deviation, ``[C]``.
        weight: Scale, ``[C]``, or None for 1.
        bias: Offset, ``[C]``, or None for 0.
        residual: Added, shape and dtype as ``x``; or None.
        activation: "relu" or None.

    Returns:
        A tensor of its own (no view) with the shape and dtype of ``x``, and its layout where that is contiguous or
        channels-last, otherwise contiguous.
    """
    x = dense(x)
    if x.numel() == 0:
        return torch.empty_like(x)
    if gpu.takes(x):
        residuals = None if residual is None else [like(residual, x)]
        shards = gpu.Shards([x], None, residuals, activation)
        return shards.normalize(gpu.coefs(mean, invstd, weight, bias))[0]
    if x.device.type == "cpu":
        y = cpu.normalize(x, mean, invstd, weight, bias)
    else:
        scale = invstd if weight is None else invstd * weight
        offset = torch.zeros_like(scale) if bias is None else bias.double()
        centre, rest = _head(mean, x)
        y = _affine(x, centre, scale, offset - rest * scale)
    if residual is not None:
        y.add_(residual)
    return y.relu_() if activation == "relu" else y


def gate(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> Tensor:
    """The gradient before the activation: ``dy`` where the output was not held at 0.

    The output is not kept for this: it is computed again, by the same operations, so the answer is the same.

    Args:
        dy: Gradient of the output, shaped as ``x``.
        x: As given to `normalize`, and so are the others.
        mean: Mean, ``[C]``.
        invstd: Inverse standard deviation, ``[C]``.
        weight: Scale, ``[C]``, or None.
        bias: Offset, ``[C]``, or None.
        residual: What was added, or None.
        activation: "relu" or None.

    Returns:
        The gradient of the residual, and of what batch norm alone would have given.
    """
    if activation is None:
        return dy
    before = normalize(x, mean, invstd, weight, bias, residual)
    return torch.where(before <= 0, torch.zeros((), dtype=dy.dtype, device=dy.device), dy)


def backward_reduce(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The two sums over a shard that the backward of batch norm needs.

    The shard's bias gradient is the first, its weight gradient the second times ``invstd``.

    Args:
        dy: Gradient of the output, shaped as ``x``, any layout.
        x: Input of this shard, ``[N, C, *spatial]``; may be empty.
        mean: The global mean, ``[C]``.

    Returns:
        ``sum(dy)`` and ``sum(dy * (x - mean))``, each ``[C]``.
    """
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    x = dense(x)
    dy = like(dy, x)
    if x.device.type == "cpu":
        sum_dy, sum_dy_xmu = cpu.backward_reduce(dy, x, mean).unbind()
        return sum_dy, sum_dy_xmu
    if gpu.takes(x):
        found = gpu.JointStatistics(mean, gpu.coefs(mean, mean, None, None))  # no other vector is read
        row = gpu.Shards([x], [dy]).reduce(found)[0][0]
        return row[1 : 1 + mean.numel()], row[1 + mean.numel() :]
    centre, rest = _head(mean, x)
    ones = torch.ones_like(centre)
    # The training backward without its input gradient gives just these sums.
    _, weighted, plain = torch.ops.aten.native_batch_norm_backward(
        dy, x, ones, None, None, centre, ones, True, 0.0, [False, True, True]
    )
    return plain.double(), weighted.double() - rest * plain


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
    x = dense(x)
    if x.numel() == 0:
        return torch.empty_like(x)
    dy = like(dy, x)
    if x.device.type == "cpu":
        return cpu.backward_input(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
    scale = invstd if weight is None else invstd * weight
    slope, shift = invstd.square() * sum_dy_xmu / count, sum_dy / count
    centre, rest = _head(mean, x)
    if gpu.takes(x):
        slopes = torch.cat([-slope * scale, (rest * slope - shift) * scale]).float()
        found = gpu.JointStatistics(mean, gpu.coefs(mean, invstd, weight, None))
        return gpu.Shards([x], [dy]).gradients(found, slopes)[0]
    # Half types are widened: rounding the intermediate result to them would double the error of the gradient.
    wide = _affine(x.to(centre.dtype), centre, -slope * scale, (rest * slope - shift) * scale)
    return wide.addcmul_(dy.to(centre.dtype), _per_channel(scale, wide)).to(x.dtype)


def mask_clamped(sum_dy_xmu: Tensor, stats: Stats, eps: float, eps_mode: EpsMode) -> Tensor:
    """``sum_dy_xmu`` with 0 where eps_mode "clamp" held the variance at eps, so that no gradient flows through it.

    Only for ``backward_input``: the weight gradient needs the unmasked sum.

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
    """Update the running statistics, in place, as ``nn.BatchNorm`` does.

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
    if stats.mean.device.type == "cpu":
        cpu.update_running(running_mean, running_var, *stats, float(factor))
        return
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


def dense(x: Tensor) -> Tensor:
    """``x`` as rows of channels or as contiguous planes, the two layouts the kernels know."""
    return _aligned(x if _is_rows(x) else x.contiguous())


def like(dy: Tensor, x: Tensor) -> Tensor:
    """``dy`` in the layout and dtype of the dense tensor ``x``."""
    dy = dy.to(x.dtype)
    if not _is_rows(x):
        return _aligned(dy.contiguous())
    return _aligned(dy if _is_rows(dy) else torch.empty_like(x).copy_(dy))


def _aligned(x: Tensor) -> Tensor:
    """``x``, copied if it is not aligned: GPU kernels read 16 bytes at once, and alignment must not affect bits."""
    return x if x.device.type == "cpu" or x.data_ptr() % 16 == 0 else x.clone()


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- other devices: torch's kernels ----


def _head(mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean rounded to the arithmetic of ``x``, and the rest, so that a large mean costs no accuracy."""
    centre = mean.to(_arithmetic(x))
    return centre, mean - centre


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _affine(x: Tensor, centre: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """``(x - centre) * scale + offset`` per channel: the inference kernel with variance 1 and eps 0."""
    dtype = centre.dtype
    y: Tensor = torch.native_batch_norm(
        x, scale.to(dtype), offset.to(dtype), centre, torch.ones_like(centre), False, 0.0, 0.0
    )[0]
    return y
