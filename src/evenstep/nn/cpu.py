"""The passes of batch norm on the CPU: the C core (``native/norm.h``) on tensors.

Each is one call that does everything, including the work per channel, so that a small input has little overhead.
``functional`` says what they compute; they do not take inputs without elements or of another layout.

What the caller must keep: ``x`` is dense, as rows of channels or as contiguous planes, has elements, and ``dy`` lies in
memory as it does. Vectors per channel are float64, parameters of any floating dtype.
"""

import torch
from torch import Tensor

from evenstep.native import core

__all__ = ["backward_input", "backward_reduce", "normalize", "statistics", "update_running"]

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_PARALLEL_ELEMENTS = 1 << 15  # for each thread: below this, sharing work costs more than it saves


def statistics(x: Tensor) -> Tensor:
    """Count, mean and M2 as one row ``[1 + 2C]``."""
    x = _known(x)
    row = torch.empty(1 + 2 * x.shape[1], dtype=torch.float64)
    core.norm_statistics(*_shape(x), x.data_ptr(), row.data_ptr())
    return row


def normalize(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The output, laid out as ``x``."""
    dtype, x = x.dtype, _known(x)
    mean, invstd, weight, bias = mean.contiguous(), invstd.contiguous(), _parameter(weight), _parameter(bias)
    y = torch.empty_like(x)
    vectors = (mean.data_ptr(), invstd.data_ptr(), *_typed(weight), *_typed(bias))
    core.norm_apply(*_shape(x), x.data_ptr(), *vectors, y.data_ptr())
    return y.to(dtype)


def backward_reduce(dy: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    """``sum(dy)`` and ``sum(dy * (x - mean))`` as the rows of ``[2, C]``."""
    dy, x, mean = _known(dy), _known(x), mean.contiguous()
    sums = torch.empty(2, x.shape[1], dtype=torch.float64)
    core.norm_reduce(*_shape(x), dy.data_ptr(), x.data_ptr(), mean.data_ptr(), sums.data_ptr())
    return sums


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
    """The gradient of ``x``, laid out as it is."""
    dtype, dy, x, weight = x.dtype, _known(dy), _known(x), _parameter(weight)
    mean, invstd, sum_dy, sum_dy_xmu = (v.contiguous() for v in (mean, invstd, sum_dy, sum_dy_xmu))
    dx = torch.empty_like(x)
    vectors = (mean.data_ptr(), invstd.data_ptr(), *_typed(weight), sum_dy.data_ptr(), sum_dy_xmu.data_ptr())
    core.norm_backward(*_shape(x), dy.data_ptr(), x.data_ptr(), *vectors, float(count), dx.data_ptr())
    return dx.to(dtype)


def update_running(
    running_mean: Tensor | None, running_var: Tensor | None, count: Tensor, mean: Tensor, m2: Tensor, factor: float
) -> None:
    """Move the running statistics, each where there is one, by ``factor`` towards the batch's; in place."""
    mean, m2 = mean.contiguous(), m2.contiguous()
    runnings = (running_mean, running_var)
    moved = [_parameter(running) for running in runnings]
    core.norm_move(
        len(mean), mean.data_ptr(), m2.data_ptr(), float(count), factor, *_typed(moved[0]), *_typed(moved[1])
    )
    for running, result in zip(runnings, moved, strict=True):
        if running is not None and result is running:
            torch.autograd.graph.increment_version(running)
        elif running is not None and result is not None:
            running.copy_(result)


def _known(x: Tensor) -> Tensor:
    """``x`` in a type that the C core knows: no processor adds float16 fast, so it goes as float32."""
    return x if x.dtype in _TYPES else x.float()


def _shape(x: Tensor) -> tuple[int, int, int, int, int]:
    """Type, shape and number of threads, as every pass takes them."""
    channels, size = x.shape[1], x.numel()
    inner = 1 if x.stride(1) == 1 and channels > 1 else size // (x.shape[0] * channels)
    num_threads = max(1, min(torch.get_num_threads(), size // _PARALLEL_ELEMENTS))
    return _TYPES[x.dtype], size // (channels * inner), channels, inner, num_threads


def _parameter(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else _known(vector).contiguous()


def _typed(vector: Tensor | None) -> tuple[int, int]:
    return (0, 0) if vector is None else (_TYPES[vector.dtype], vector.data_ptr())
