"""The passes of one call over all local participants: those that can share a launch do, the others go one by one.

`batchnorm` says when to meet whom; here is what each side does between the meetings, for the CPU and the GPU alike::

    rows = statistics(parts)                             # then everyone's: meeting 1
    whole = conclude(rows of all, ...)
    ys = outputs(parts, whole)
    reduced = reduce(parts, dys, whole, needed)          # then everyone's reduced.rows: meeting 2
    dxs = input_gradients(parts, dys, whole, reduced, rows of all)

What a participant gets does not depend on which others are local.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from evenstep.exchange.group import tree_sum
from evenstep.nn import functional as f
from evenstep.nn import gpu
from evenstep.nn.functional import EpsMode, Stats
from evenstep.plan import tree

__all__ = ["Combined", "Part", "Reduced", "conclude", "input_gradients", "outputs", "reduce", "statistics"]


class Part(NamedTuple):
    """What one participant brings: its input, and what is done with it."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None = None
    activation: str | None = None


@dataclass(frozen=True)
class Combined:
    """The combined statistics of all participants, on the device of the first local one."""

    stats: Stats
    invstd: Tensor
    eps: float
    eps_mode: EpsMode
    found: gpu.JointStatistics | None  # where the kernels found it
    of: Part | None  # whose weight and bias are in the coefs of `found`

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, inverse standard deviation and count where a participant needs them."""
        return self.stats.mean.to(device), self.invstd.to(device), self.stats.count.to(device)

    def found_for(self, part: Part) -> gpu.JointStatistics | None:
        """What the kernels need for a participant; None where they cannot be used for it."""
        if self.found is None or self.of is None or not _fits(part):
            return None
        device = part.x.device
        vectors = self.found.vectors.to(device)
        if all(_same(ours, theirs) for ours, theirs in zip((part.weight, part.bias), self.of[1:3], strict=True)):
            return gpu.JointStatistics(vectors, self.found.coefs.to(device))
        mean, invstd, _ = self.on(device)
        return gpu.JointStatistics(vectors, gpu.coefs(mean, invstd, part.weight, part.bias))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype and a.device == b.device


def _fits(part: Part) -> bool:
    """Whether the kernels take a participant; they assume that everything is on the device of its input."""
    return gpu.takes(part.x) and all(t is None or t.device == part.x.device for t in part[1:4])


def _together(parts: Sequence[Part], chosen: Sequence[bool]) -> Iterator[list[int]]:
    """The numbers of chosen participants, grouped by those whose passes can share a launch."""
    groups: dict[object, list[int]] = {}
    for number, part in enumerate(parts):
        if chosen[number] and part.x.numel():
            dense = f.dense(part.x)
            vectors = tuple(None if t is None else (t.data_ptr(), t.dtype) for t in part[1:3])
            key = (dense.device, dense.dtype, gpu.geometry(dense), vectors, part.residual is None, part.activation)
            groups.setdefault(key, []).append(number)
    return iter(groups.values())


def _shards(parts: Sequence[Part], dys: Sequence[Tensor] | None = None, *, gate: bool = False) -> gpu.Shards:
    """The passes of some participants that `_together` has put together."""
    xs = [f.dense(part.x) for part in parts]
    residuals = [f.like(part.residual, x) for part, x in zip(parts, xs, strict=True) if part.residual is not None]
    gradients = None if dys is None else [f.like(dy, x) for dy, x in zip(dys, xs, strict=True)]
    return gpu.Shards(xs, gradients, residuals or None, parts[0].activation, gate=gate)


def statistics(parts: Sequence[Part]) -> Tensor:
    """Count, mean and M2 of each participant: a row ``[1 + 2C]`` in float64 for each, where the first one is."""
    fit = [_fits(part) for part in parts]
    device = parts[0].x.device
    groups = list(_together(parts, fit))
    if len(groups) == 1 and len(groups[0]) == len(parts):
        return _shards(parts).statistics()
    rows = [torch.empty(0)] * len(parts)
    for numbers in groups:
        found = _shards([parts[n] for n in numbers]).statistics()
        for n, row in zip(numbers, found, strict=True):
            rows[n] = row
    done = {n for numbers in groups for n in numbers}
    for n, part in enumerate(parts):
        if n not in done:
            rows[n] = f.statistics_row(part.x)
    return torch.stack([row.to(device) for row in rows])


def conclude(rows: Tensor, first: Part, eps: float, eps_mode: EpsMode, running: gpu.Running, kernels: bool) -> Combined:
    """Merge the rows of all participants in the fixed tree, and update the running statistics.

    Args:
        rows: ``[K, 1 + 2C]``, on the device of the first local participant. Overwritten.
        first: The first local participant.
        eps: Keeps the variance from zero.
        eps_mode: How.
        running: The running statistics to update.
        kernels: Whether there is any element, so that the kernels may divide by their number.
    """
    momentum_known = running.momentum is not None or running.num_batches_tracked is not None
    here = all(t is None or t.device == first.x.device for t in running[:3])
    if kernels and momentum_known and here and _fits(first):
        found = gpu.finish(rows, first.weight, first.bias, eps, eps_mode, running)
        channels = (rows.shape[1] - 1) // 2
        mean, m2, invstd = found.vectors[: 3 * channels].chunk(3)
        return Combined(Stats(found.vectors[3 * channels], mean, m2), invstd, eps, eps_mode, found, first)
    stats = f.merge_rows(rows)
    if kernels and any(t is not None for t in running[:3]):
        f.update_running(*running[:3], stats, running.momentum)
    return Combined(stats, f.inverse_std(stats, eps, eps_mode), eps, eps_mode, None, None)


def outputs(parts: Sequence[Part], whole: Combined) -> list[Tensor]:
    """The output of each participant."""
    found = [whole.found_for(part) for part in parts]
    ys: list[Tensor | None] = [None] * len(parts)
    for numbers in _together(parts, [one is not None for one in found]):
        coefs = found[numbers[0]]
        assert coefs is not None, "only participants that the kernels take are put together"
        for n, y in zip(numbers, _shards([parts[n] for n in numbers]).normalize(coefs.coefs), strict=True):
            ys[n] = y
    return [_output(part, whole) if y is None else y for part, y in zip(parts, ys, strict=True)]


def _output(part: Part, whole: Combined) -> Tensor:
    mean, invstd, _ = whole.on(part.x.device)
    return f.normalize(part.x, mean, invstd, part.weight, part.bias, part.residual, part.activation)


class Needed(NamedTuple):
    """Which gradients of a participant are asked for."""

    x: bool
    weight: bool
    bias: bool
    residual: bool


class Reduced(NamedTuple):
    """What `reduce` found; lists have an entry for each participant.

    Attributes:
        rows: ``[L, 1 + 2C]``: whether the output was used, sum of dy, sum of dy (x - mean).
        weights: Gradients of the weights.
        biases: Gradients of the biases.
        residuals: Gradients of the residuals.
        inputs: How to get the gradient of the input from the slopes, for those whose passes are the kernels'.
    """

    rows: Tensor
    weights: list[Tensor | None]
    biases: list[Tensor | None]
    residuals: list[Tensor | None]
    inputs: list[Callable[[Tensor], Tensor] | None]


def reduce(
    parts: Sequence[Part | None], dys: Sequence[Tensor | None], whole: Combined, needed: Sequence[Needed]
) -> Reduced:
    """The sums of each participant that backward needs; a participant without input or dy has zeros."""
    num, channels, device = len(parts), whole.stats.mean.numel(), whole.stats.mean.device
    lists: list[list[Tensor | None]] = [[None] * num for _ in range(3)]
    inputs: list[Callable[[Tensor], Tensor] | None] = [None] * num
    rows: list[Tensor | None] = [None] * num
    out = Reduced(whole.stats.mean, lists[0], lists[1], lists[2], inputs)
    present = [n for n in range(num) if parts[n] is not None and dys[n] is not None]
    here: list[Part] = [parts[n] for n in present]  # type: ignore[misc]  # none of these is None
    found = [whole.found_for(part) for part in here]
    whole_rows = None
    for numbers in _together(here, [one is not None for one in found]):
        whole_rows = _reduce_together(out, rows, here, [present[i] for i in numbers], numbers, dys, found, needed)
        if len(numbers) < num:
            whole_rows = None
    if whole_rows is not None:
        return out._replace(rows=whole_rows)
    for n, part in zip(present, here, strict=True):
        if rows[n] is None:
            rows[n] = _reduce_one(out, part, n, dys[n], whole, needed[n])  # type: ignore[arg-type]  # present
    nothing = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=device)
    return out._replace(rows=torch.stack([nothing if row is None else row.to(device) for row in rows]))


def _reduce_together(
    out: Reduced,
    rows: list[Tensor | None],
    here: Sequence[Part],
    places: Sequence[int],
    numbers: Sequence[int],
    dys: Sequence[Tensor | None],
    found: Sequence[gpu.JointStatistics | None],
    needed: Sequence[Needed],
) -> Tensor:
    """One launch for some participants: fills in `out` and `rows`."""
    chosen = [here[i] for i in numbers]
    gradients: list[Tensor] = [dys[n] for n in places]  # type: ignore[misc]  # present
    gate = any(needed[n].residual for n in places)
    shards, mine = _shards(chosen, gradients, gate=gate), found[numbers[0]]
    assert mine is not None, "only participants that the kernels take are put together"
    weight, bias = any(needed[n].weight for n in places), any(needed[n].bias for n in places)
    sums, dweight, dbias = shards.reduce(mine, weight=weight, bias=bias)
    made: list[Tensor] = []

    def gradient(number: int, slopes: Tensor) -> Tensor:
        if not made:  # one launch, when the first is asked for
            made.extend(shards.gradients(mine, slopes.to(shards.device)))
        return made[number]

    for i, n in enumerate(places):
        rows[n] = sums[i]
        out.weights[n] = None if dweight is None or not needed[n].weight else dweight[i]
        out.biases[n] = None if dbias is None or not needed[n].bias else dbias[i]
        if needed[n].residual:
            out.residuals[n] = gradients[i] if shards.gated is None else shards.gated[i]
        out.inputs[n] = partial(gradient, i)
    return sums


def _reduce_one(out: Reduced, part: Part, n: int, dy: Tensor, whole: Combined, needed: Needed) -> Tensor:
    mean, invstd, _ = whole.on(part.x.device)
    dy = f.gate(dy, part.x, mean, invstd, part.weight, part.bias, part.residual, part.activation)
    sum_dy, sum_dy_xmu = f.backward_reduce(dy, part.x, mean)
    if needed.weight:
        out.weights[n] = sum_dy_xmu * invstd
    if needed.bias:
        out.biases[n] = sum_dy
    if needed.residual:
        out.residuals[n] = dy
    return torch.cat([torch.ones(1, dtype=torch.float64, device=mean.device), sum_dy, sum_dy_xmu])


def input_gradients(
    parts: Sequence[Part | None],
    dys: Sequence[Tensor | None],
    whole: Combined,
    reduced: Reduced,
    rows: Tensor,
    needed: Sequence[Needed],
) -> list[Tensor | None]:
    """The gradients of the inputs, from the rows of all participants; a dy of None counts as zeros."""
    slopes = everyone = None
    dxs: list[Tensor | None] = [None] * len(parts)
    for n, part in enumerate(parts):
        if part is None or not needed[n].x:
            continue
        through, found = reduced.inputs[n], None
        if through is None and dys[n] is None and part.x.numel():
            found = whole.found_for(part)
        if through is not None or found is not None:
            if slopes is None:
                assert whole.found is not None, "kernels have found the statistics"
                slopes = gpu.finish_sums(rows, whole.found, whole.eps, whole.eps_mode)
            dxs[n] = through(slopes) if through is not None else _unused_gradient(part, found, slopes)
            continue
        if everyone is None:
            everyone = _sum_all(rows)
        dxs[n] = _input_gradient(part, dys[n], whole, everyone)
    return dxs


def _unused_gradient(part: Part, found: gpu.JointStatistics | None, slopes: Tensor) -> Tensor:
    """The gradient of an input whose output nothing uses: it flows through the statistics alone."""
    assert found is not None, "called only where kernels can be used"
    unused = _shards([part._replace(residual=None, activation=None)], [torch.zeros_like(part.x)])
    return unused.gradients(found, slopes.to(part.x.device))[0]


def _input_gradient(part: Part, dy: Tensor | None, whole: Combined, everyone: Tensor) -> Tensor:
    device = part.x.device
    mean, invstd, count = whole.on(device)
    sum_dy, sum_dy_xmu = everyone[1:].chunk(2)
    sum_dy_xmu = f.mask_clamped(sum_dy_xmu, whole.stats, whole.eps, whole.eps_mode)
    if dy is None:
        dy = torch.zeros_like(part.x)
    dy = f.gate(dy, part.x, mean, invstd, part.weight, part.bias, part.residual, part.activation)
    return f.backward_input(dy, part.x, mean, invstd, part.weight, sum_dy.to(device), sum_dy_xmu.to(device), count)


def _sum_all(rows: Tensor) -> Tensor:
    """Sum [K, n] rows, one per shard, in the fixed tree over shards."""
    host = rows.cpu()
    return tree_sum(host.unbind(0), tree.leaf_program(len(host)), torch.empty_like(host[0])).to(rows.device)
