"""Batch norm, with what is fused to it, for a layer that has nobody to meet.

It is `nn.BatchNorm` in everything that a caller sees, second derivatives included, up to rounding. It is used
where that pays: for a fused layer, and on a GPU whose kernels (`gpu`) are faster than torch's.
"""

from typing import Any

import torch
from torch import Tensor

from evenstep.nn import functional as f
from evenstep.nn import gpu
from evenstep.nn.functional import Stats

__all__ = ["NormAlone"]


class NormAlone(torch.autograd.Function):
    """Keeps its inputs and vectors per channel: the output is computed again where backward asks for it.

    Inputs: x, weight, bias, residual, and then what is not a tensor: activation, eps and the running statistics.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str | None,
        eps: float,
        running: gpu.Running,
    ) -> Tensor:
        """See `functional.normalize`."""
        ctx.activation, ctx.eps = activation, eps
        dense = f.dense(x)
        if gpu.takes(x):
            added = None if residual is None else f.like(residual, dense)
            y, found = gpu.forward_alone(dense, weight, bias, added, activation, eps, running)
            kept: tuple[Tensor, ...] = found
        else:
            stats = f.statistics(dense)
            invstd = f.inverse_std(stats, eps)
            if any(t is not None for t in running[:3]):
                f.update_running(*running[:3], stats, running.momentum)
            y = f.normalize(dense, stats.mean, invstd, weight, bias, residual, activation)
            kept = (stats.mean, invstd, stats.count)
        needs_bias = activation is not None  # only then the output is computed again
        ctx.save_for_backward(x, weight, bias if needs_bias else None, residual if needs_bias else None, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of the four tensors."""
        (dy,) = gradients
        x, weight, bias, residual, *kept = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph=True
            return (*_differentiable(ctx, dy, x, weight, bias, residual), None, None, None)
        dense = f.dense(x)
        if gpu.takes(x):
            found = _by_kernels(ctx, f.like(dy, dense), dense, residual, kept)
        else:
            found = _by_passes(ctx, dy, dense, weight, bias, residual, Stats(kept[2], kept[0], kept[0]), kept[1])
        return (*(g if wanted else None for g, wanted in zip(found, needed, strict=True)), None, None, None)


def _by_kernels(
    ctx: Any, dy: Tensor, x: Tensor, residual: Tensor | None, kept: list[Tensor]
) -> tuple[Tensor | None, ...]:
    added = None if residual is None else f.like(residual, x)
    return gpu.backward_alone(dy, x, gpu.JointStatistics(*kept), added, ctx.activation, ctx.needs_input_grad)


def _by_passes(
    ctx: Any,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    stats: Stats,
    invstd: Tensor,
) -> tuple[Tensor | None, ...]:
    mean, count = stats.mean, stats.count
    dy = f.gate(dy, x, mean, invstd, weight, bias, residual, ctx.activation)
    sum_dy, sum_dy_xmu = f.backward_reduce(dy, x, mean)
    dx = None
    if ctx.needs_input_grad[0]:
        dx = f.backward_input(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
    return dx, sum_dy_xmu * invstd, sum_dy, dy


def _differentiable(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> list[Tensor | None]:
    """The gradients by torch's own operations, which can be differentiated again."""
    if ctx.activation is not None:
        plain = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
        before = plain if residual is None else plain + residual
        dy = torch.where(before.detach() <= 0, torch.zeros((), dtype=dy.dtype, device=dy.device), dy)
    # The bias and the residual have gradients that do not depend on their values.
    y = torch.nn.functional.batch_norm(x, None, None, weight, None, training=True, eps=ctx.eps)
    sources = [(n, t) for n, t in enumerate((x, weight)) if t is not None and ctx.needs_input_grad[n]]
    found: list[Tensor | None] = [None] * 4
    made = torch.autograd.grad(y, [t for _, t in sources], dy, create_graph=True) if sources else ()
    for (n, _), gradient in zip(sources, made, strict=True):
        found[n] = gradient
    if ctx.needs_input_grad[2]:
        found[2] = dy.sum([d for d in range(dy.dim()) if d != 1])
    if ctx.needs_input_grad[3]:
        found[3] = dy
    return found
