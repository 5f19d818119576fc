"""What the local part of a synchronized batch norm costs on a CPU, against ``nn.BatchNorm2d``.

Run it from the repository::

    PYTHONPATH=src python benchmarks/batchnorm.py [--rounds 31] [--threads 1 2] [--mean 20]

The local part is all of ``evenstep.nn.functional`` that a step of one shard needs (statistics, normalize, running
statistics, both halves of the backward), joined by a thin ``autograd.Function`` and without any exchange. Times are
medians in microseconds; ratios are medians of the ratios of neighbouring measurements, in changing order, so that a
machine which others use as well disturbs them little. The aim is a ratio of at most 1.15 for both together. A cell of
microseconds is ours / torch's.

The last column is the ratio of the whole module, ``SyncBatchNorm2d`` with one participant and all that it does around
the local part. The input has standard deviation 1 and, unless ``--mean`` says otherwise, mean 0.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from evenstep.nn import SyncBatchNorm2d, functional
from results import Record, add_option, shown

SHAPES = [(16, 64, 32, 32), (64, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (32, 512, 7, 7)]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


class LocalBatchNorm(torch.autograd.Function):
    """Batch norm over one shard, through the functions that a synchronized one uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.BatchNorm2d, weight: Tensor, bias: Tensor) -> Tensor:  # noqa: D102 - torch's own signature
        stats = functional.statistics(x)
        invstd = functional.inverse_std(stats, norm.eps, "plus")
        functional.update_running(norm.running_mean, norm.running_var, norm.num_batches_tracked, stats, norm.momentum)
        ctx.save_for_backward(x, weight, stats.mean, invstd, stats.count)
        return functional.normalize(x, stats.mean, invstd, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:  # noqa: D102 - torch's own signature
        x, weight, mean, invstd, count = ctx.saved_tensors
        sum_dy, sum_dy_xmu = functional.backward_reduce(dy, x, mean)
        dx = functional.backward_input(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
        return dx, None, sum_dy_xmu * invstd, sum_dy


def step_times(forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, parameters: Sequence[Tensor]) -> list[float]:
    """Seconds for the forward, the backward and both, of one step."""
    start = time.perf_counter()
    y = forward(x)
    middle = time.perf_counter()
    torch.autograd.grad(y, [x, *parameters], dy)
    end = time.perf_counter()
    return [middle - start, end - middle, end - start]


def measure(
    shape: Sequence[int], memory_format: torch.memory_format, rounds: int, mean: float = 0.0
) -> list[tuple[float, float, float]]:
    """(torch's seconds, ours, ratio), medians over ``rounds``, for the forward, the backward, both, and the module."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).contiguous(memory_format=memory_format) for _ in range(2))
    x.add_(mean).requires_grad_()
    norm = nn.BatchNorm2d(shape[1])
    parameters = [norm.weight, norm.bias]

    def ours(x: Tensor) -> Tensor:
        y: Tensor = LocalBatchNorm.apply(x, norm, norm.weight, norm.bias)  # type: ignore[no-untyped-call]  # torch's
        return y

    module = SyncBatchNorm2d(shape[1], eps_mode="clamp")  # in "plus" mode it would be torch's when alone
    forwards: list[Callable[[Tensor], Tensor]] = [norm, ours, module]
    leaves = [parameters, parameters, [module.weight, module.bias]]
    times: list[list[list[float]]] = [[], [], []]
    for number in range(-2, rounds):
        for which in (0, 1, 2) if number % 2 else (2, 1, 0):
            seconds = step_times(forwards[which], x, dy, leaves[which])
            if number >= 0:
                times[which].append(seconds)
    result = []
    for part, other in ((0, 1), (1, 1), (2, 1), (2, 2)):
        torch_s, ours_s = ([step[part] for step in times[which]] for which in (0, other))
        ratio = statistics.median(b / a for a, b in zip(torch_s, ours_s, strict=True))
        result.append((statistics.median(torch_s), statistics.median(ours_s), ratio))
    return result


def lines(threads: int, options: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of one number of threads: microseconds of ours and of torch's, and the ratio, of each part."""
    torch.set_num_threads(threads)
    for shape in SHAPES:
        for name, memory_format in LAYOUTS.items():
            cells = [", ".join(map(str, shape)), name, str(threads)]
            for torch_s, ours_s, ratio in measure(shape, memory_format, options.rounds, options.mean):
                cells += [f"{ours_s * 1e6:.0f} / {torch_s * 1e6:.0f}", f"{ratio:.2f}"]
            yield cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; the number of threads is put back afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_threads = torch.get_num_threads()
    parser.add_argument("--rounds", type=int, default=31, help="measurements of each shape (default: 31)")
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, default_threads}))
    parser.add_argument(
        "--mean", type=float, default=0.0, help="mean of the input, of standard deviation 1 (default: 0)"
    )
    add_option(parser)
    options = parser.parse_args(arguments)
    record = Record.begin()
    labels = ["N, C, H, W", "layout", "threads"]
    parts = [f"{part} {figure}" for part in ("forward", "backward", "both", "module") for figure in ("us", "ratio")]
    chart = {"means": "times as long as nn.BatchNorm2d: local part, module"}
    try:
        rows = shown(line for threads in options.threads for line in lines(threads, options))
        record.table([*labels, *parts], rows, values=["both ratio", "module ratio"], labels=labels, **chart)
    finally:
        torch.set_num_threads(default_threads)
    record.save(options.json)


if __name__ == "__main__":
    main()
