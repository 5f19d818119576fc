"""Batch norm on a GPU against the memory's speed, torch.nn.SyncBatchNorm's kernels and ``nn.BatchNorm2d``.

Run it on a machine with a GPU and Triton::

    PYTHONPATH=src python benchmarks/batchnorm_gpu.py [--rounds 25] [--parts layers shards resnet]

*Floor* is the time in which the GPU copies as many bytes as the fewest passes move: 3 forward (read; read and write), 5
backward (read two; read two and write), at the speed of a large copy that is measured in the same run. *Share* is floor
over time. Times are medians between events on the GPU; the host runs ahead, and the cache is filled with other data
before each. ``x sync`` and ``x bn`` say how many times as fast ours is as torch.nn.SyncBatchNorm's kernels (without any
exchange) and as ``nn.BatchNorm2d``, ``x relu`` as ``nn.BatchNorm2d`` and ``torch.relu`` after it, forward and backward
together. ``company`` is the share of the passes that a layer runs which meets others, one shard of them being here.

The second table has 8 shards on one GPU, in joint launches and one by one. The last one has whole training steps of a
ResNet-50 (bfloat16 autocast, channels-last).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.nn import SyncBatchNorm2d, convert_sync_batchnorm, gpu
from models import resnet50
from results import Record, add_option, shown

SHAPES = [
    (64, 64, 112, 112),
    (64, 256, 56, 56),
    (64, 512, 28, 28),
    (64, 1024, 14, 14),
    (64, 2048, 7, 7),
    (256, 256, 56, 56),
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
AHEAD_CYCLES = 1_500_000  # how long the GPU waits for the host to queue everything


class Clock:
    """Times what is queued on the GPU, with a cache that holds nothing of it."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._other = torch.zeros(96 << 20, dtype=torch.int32, device="cuda")

    def microseconds(self, function: Callable[[], object], rounds: int | None = None) -> float:
        """The median time of a call."""
        function()
        times = []
        for _ in range(rounds or self.rounds):
            self._other.amax()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD_CYCLES)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def copy_bytes_per_us(self) -> float:
        """Bytes read and written by a large copy, for each microsecond."""
        source = torch.empty(1 << 29, dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        return 2 * source.numel() * source.element_size() / self.microseconds(lambda: target.copy_(source))


class Layer:
    """Forward and backward of a module on one input."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor, dy: Tensor
    ) -> None:
        self._function, self._x, self._dy = function, x.detach().requires_grad_(), dy
        self._leaves = [self._x, *parameters]

    def forward(self) -> Tensor:
        """The output, with its graph."""
        return self._function(self._x)

    def times(self, clock: Clock) -> tuple[float, float]:
        """Microseconds of forward and of backward."""
        y = self.forward()
        backward = clock.microseconds(lambda: torch.autograd.grad(y, self._leaves, self._dy, retain_graph=True))
        return clock.microseconds(self.forward), backward


def sync_times(clock: Clock, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """Microseconds of the kernels behind torch.nn.SyncBatchNorm, forward and backward, without an exchange."""
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([x.numel() // x.shape[1]], dtype=torch.int32, device=x.device)

    def forward() -> Tensor:
        found = torch.batch_norm_stats(x, 1e-5)
        return torch.batch_norm_elemt(x, weight, bias, *found, 1e-5)

    def backward() -> Tensor:
        sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sums[0], sums[1], count)

    return clock.microseconds(forward), clock.microseconds(backward)


def company_times(
    clock: Clock, xs: Sequence[Tensor], dys: Sequence[Tensor], weight: Tensor, bias: Tensor, *, joint: bool = True
) -> tuple[float, float]:
    """Microseconds of the passes of a layer in company, these shards being local, forward and backward."""
    groups = [(xs, dys)] if joint else [([x], [dy]) for x, dy in zip(xs, dys, strict=True)]

    def meet(rows: list[Tensor]) -> Tensor:
        return rows[0] if joint else torch.cat(rows)

    def forward() -> gpu.JointStatistics:
        shards = [gpu.Shards(group) for group, _ in groups]
        found = gpu.finish(meet([s.statistics() for s in shards]), weight, bias, 1e-5, "plus")
        for s in shards:
            s.normalize(found.coefs)
        return found

    found = forward()

    def backward() -> None:
        shards = [gpu.Shards(*group) for group in groups]
        rows = meet([s.reduce(found, weight=True, bias=True)[0] for s in shards])
        slopes = gpu.finish_sums(rows, found, 1e-5, "plus")
        for s in shards:
            s.gradients(found, slopes)

    return clock.microseconds(forward), clock.microseconds(backward)


def draw(shape: Sequence[int], dtype: torch.dtype, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """A random input and a random gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator, device="cuda").to(dtype, memory_format=layout) for _ in range(2))
    return x, dy


def layers(record: Record, clock: Clock) -> None:
    """The table of single layers."""
    speed = clock.copy_bytes_per_us()
    columns = ["N, C, H, W", "dtype, layout", "MB", "ours us", "share", "company", "x sync", "x bn", "x relu"]

    def rows() -> Iterator[list[str]]:
        for shape, (dtype_name, dtype), (layout_name, layout) in product(SHAPES, DTYPES.items(), LAYOUTS.items()):
            x, dy = draw(shape, dtype, layout)
            yield [", ".join(map(str, shape)), f"{dtype_name} {layout_name}", *layer_cells(clock, speed, x, dy)]

    title = f"Copy: {speed / 1e6:.2f} TB/s; forward / backward"
    chart = {"means": "times as fast as torch's synchronized kernels: forward, backward"}
    record.table(columns, shown(rows()), title, values=["x sync"], labels=columns[:2], **chart)


def layer_cells(clock: Clock, speed: float, x: Tensor, dy: Tensor) -> list[str]:
    """The figures of one input."""
    channels, num_bytes = x.shape[1], x.numel() * x.element_size()
    plain, ours = nn.BatchNorm2d(channels).cuda(), SyncBatchNorm2d(channels).cuda()
    fused = SyncBatchNorm2d(channels, activation="relu").cuda()
    weight, bias = plain.weight, plain.bias
    mine = Layer(ours, [ours.weight, ours.bias], x, dy).times(clock)
    theirs = Layer(plain, [weight, bias], x, dy).times(clock)
    sync = sync_times(clock, x, dy, weight.detach(), bias.detach())
    company = company_times(clock, [x], [dy], weight.detach(), bias.detach())
    fused_us = sum(Layer(fused, [fused.weight, fused.bias], x, dy).times(clock))
    separate_us = sum(Layer(lambda t: torch.relu(plain(t)), [weight, bias], x, dy).times(clock))
    floors = 3 * num_bytes / speed, 5 * num_bytes / speed

    def pair(first: Sequence[float], second: Sequence[float], digits: int = 2) -> str:
        return " / ".join(f"{a / b:.{digits}f}" for a, b in zip(first, second, strict=True))

    cells = [f"{num_bytes / 1e6:.0f}", pair(mine, (1, 1), 1), pair(floors, mine), pair(floors, company)]
    cells += [pair(sync, mine), pair(theirs, mine), f"{separate_us / fused_us:.2f}"]
    return cells


def several_shards(record: Record, clock: Clock, num_shards: int = 8) -> None:
    """The table of several shards on one GPU."""
    columns = ["N, C, H, W of a shard", "layout", "joint", "one by one", "host, joint", "host, one by one"]
    title = f"{num_shards} shards, bf16; microseconds, forward / backward"
    chart = {"values": ["joint", "one by one"], "means": "microseconds: joint, one by one", "base": None}
    record.table(columns, shown(shard_rows(clock, num_shards)), title, labels=columns[:2], **chart)


def shard_rows(clock: Clock, num_shards: int) -> Iterator[list[str]]:
    """Figures of every shape and layout."""
    for n, c, h, w in SHAPES[:5]:
        for layout_name, layout in LAYOUTS.items():
            drawn = [draw((n // num_shards, c, h, w), torch.bfloat16, layout) for _ in range(num_shards)]
            xs, dys = zip(*drawn, strict=True)
            weight, bias = torch.ones(c, device="cuda"), torch.zeros(c, device="cuda")
            cells, host = [], []
            for joint in (True, False):
                forward, backward = company_times(clock, xs, dys, weight, bias, joint=joint)
                cells.append(f"{forward:.1f} / {backward:.1f}")
                host.append(f"{host_microseconds(xs, joint):.0f}")
            yield [f"{n // num_shards}, {c}, {h}, {w}", layout_name, *cells, *host]


def host_microseconds(xs: Sequence[Tensor], joint: bool) -> float:
    """What queueing the statistics of all shards takes the host."""
    groups = [xs] if joint else [[x] for x in xs]
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for group in groups:
            gpu.Shards(group).statistics()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def whole_steps(record: Record, batch_size: int, steps: int) -> None:
    """Whole training steps of a ResNet-50."""
    columns = ["batch norm", "ms a step", "times as fast", "GB at most", "loss after the steps"]
    chart = {"means": "times as fast as with nn.BatchNorm2d"}
    title = f"ResNet-50, bf16 autocast, channels-last, batch {batch_size}"
    record.table(
        columns, shown(resnet_rows(batch_size, steps)), title, values=columns[2:3], labels=columns[:1], **chart
    )


def resnet_rows(batch_size: int, steps: int) -> Iterator[list[str]]:
    """Figures of each batch norm."""
    kinds: dict[str, Callable[[nn.Module], nn.Module]] = {
        "nn.BatchNorm2d": lambda model: model,
        "ours": convert_sync_batchnorm,
        "ours, fused": lambda model: convert_sync_batchnorm(model, fuse=True),
    }
    torch.backends.cudnn.benchmark = True
    base = 0.0
    for name, convert in kinds.items():
        model = convert(resnet50()).cuda().to(memory_format=torch.channels_last)
        ms, memory, loss = train(model, batch_size, steps)
        base = base or ms
        yield [name, f"{ms:.1f}", f"{base / ms:.3f}", f"{memory:.1f}", f"{loss:.4f}"]


def train(model: nn.Module, batch_size: int, steps: int) -> tuple[float, float, float]:
    """Milliseconds of a step (median), the most memory in GB, and the last loss."""
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randn(batch_size, 3, 224, 224, generator=generator, device="cuda")
    images = images.to(memory_format=torch.channels_last)
    classes = torch.randint(1000, (batch_size,), generator=generator, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(steps + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        if number >= 5:
            times.append(begin.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() / 1e9, loss.item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="measurements of each time (default: 25)")
    parser.add_argument("--batch-size", type=int, default=256, help="of the ResNet-50 (default: 256)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of the ResNet-50 (default: 15)")
    parser.add_argument("--parts", nargs="*", default=["layers", "shards", "resnet"], help="which tables to print")
    add_option(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU, and torch sees none here", file=sys.stderr)
        return 1
    if not gpu.takes(torch.empty(1, device="cuda")):
        print("this benchmark needs Triton: pip install evenstep[triton]", file=sys.stderr)
        return 1
    record, clock = Record.begin(), Clock(options.rounds)
    if "layers" in options.parts:
        layers(record, clock)
    if "shards" in options.parts:
        several_shards(record, clock)
    if "resnet" in options.parts:
        whole_steps(record, options.batch_size, options.steps)
    record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
