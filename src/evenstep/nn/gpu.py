"""Launches the Triton kernels of batch norm: geometry, buffers, and several shards in one launch.

A pass over several shards on one device is one launch. What it gives is a function of the values, shape and layout of
each shard alone, bit for bit: how many shards are given at once changes nothing. Nothing here waits for the device.

The caller asks `takes` first. In company it makes `Shards` of what it has in forward, and again in backward::

    rows = shards.statistics()                     # then those of all shards, wherever they are: meeting 1
    found = finish(rows, ...)                      # global statistics and coefs; moves the running ones
    ys = shards.normalize(found.coefs)
    rows, ... = shards.reduce(found)               # then those of all shards: meeting 2
    dxs = shards.gradients(found, finish_sums(rows, found, ...))

`forward_alone` and `backward_alone` are the whole of a layer that has nobody to meet: fewer launches, and other last
bits than the same values in company.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.nn.tiles import Geometry, Tile, Walk, geometry, is_rows, map_tile, power, sum_tile, summing, walk

__all__ = [
    "Found",
    "Running",
    "Shards",
    "backward_alone",
    "coefs",
    "finish",
    "finish_sums",
    "forward_alone",
    "geometry",
    "takes",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FIELDS = 8  # kernels.FIELDS, known without Triton
_MOST_LAUNCHERS = 16384


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    """The kernels, or None where there is no Triton."""
    try:
        from evenstep.nn import kernels
    except ImportError:
        return None
    return kernels


def takes(x: Tensor) -> bool:
    """Whether the kernels take this input; decided by its device and dtype and by whether Triton is installed."""
    return x.device.type == "cuda" and x.dtype in _DTYPES and _kernels() is not None


class Running(NamedTuple):
    """The running statistics of a layer, to be moved with the batch's; `momentum` None averages over all batches."""

    mean: Tensor | None = None
    var: Tensor | None = None
    num_batches_tracked: Tensor | None = None
    momentum: float | None = 0.0


_STAY = Running()  # nothing to move


class Found(NamedTuple):
    """What the statistics of all shards come to.

    Attributes:
        vectors: Mean, M2 and inverse standard deviation, ``[C]`` each, and the count: ``[3C + 1]`` in float64.
        coefs: Centre, scale and offset, ``[C]`` each: ``[3C]`` in float32.
    """

    vectors: Tensor
    coefs: Tensor


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _triton_type(dtype: torch.dtype) -> Any:
    language = getattr(_kernels(), "tl")  # noqa: B009  # nobody imports Triton but the kernels
    return {torch.float32: language.float32, torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]


@lru_cache(maxsize=64)
def _begins_early(device: torch.device) -> bool:
    """Whether a launch on this device may begin before the one before it has ended."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


_launchers: dict[Any, Any] = {}


def _run(
    name: str,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    rest: tuple[Any, ...],
    warps: int = 4,
    foreign: tuple[Tensor, ...] = (),
) -> None:
    """Launch a kernel. What Triton compiled for it is kept, as finding it again takes Triton longest.

    Args:
        name: The kernel's name.
        grid: Programs in each direction.
        tensors: The kernel's tensors, in its order.
        rest: Its numbers and constants, in its order.
        warps: Warps of a program.
        foreign: Those tensors whose dtype does not follow from the constants.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(name, grid, tensors, rest, warps, foreign)
        return
    key = (name, device.index, grid, rest, warps, tuple([t.dtype for t in foreign]))
    launch = _launchers.get(key)
    if launch is not None:
        launch(*tensors, *rest, _begins_early(device))
        return
    early = _begins_early(device)
    options = {"enable_fp_fusion": True} | ({"launch_pdl": True} if early else {})
    compiled = getattr(_kernels(), name)[grid](*tensors, *rest, early, num_warps=warps, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_launchers) >= _MOST_LAUNCHERS:  # sizes that never come again
            _launchers.clear()
        _launchers[key] = compiled[grid]


@lru_cache(maxsize=64)
def _nothing(device: torch.device) -> Tensor:
    """Stands where a kernel has an argument that it does not read."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _or(t: Tensor | None, nothing: Tensor) -> Tensor:
    return nothing if t is None else t


def _running_arguments(running: Running, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, var, tracked, momentum = running
    if mean is None and var is None and tracked is None:
        return nothing, nothing, nothing
    # The kernel changes them behind autograd's back.
    torch.autograd.graph.increment_version([t for t in (mean, var, tracked) if t is not None])
    if momentum is None and tracked is not None:
        tracked.add_(1)
    return _or(mean, nothing), _or(var, nothing), _or(tracked, nothing)


@lru_cache(maxsize=4096)
def _numbers(eps: float, momentum: float | None) -> tuple[int, int]:
    return _bits(eps), _bits(-1.0 if momentum is None else momentum)


def _running_options(running: Running) -> tuple[bool, bool, bool]:
    return running.mean is not None, running.var is not None, running.num_batches_tracked is not None


@dataclass(frozen=True)
class _Frame:
    """All about the passes over one shard that its shape decides."""

    shape: Geometry
    outer: int
    sum_tile: Tile
    map_tile: Tile
    sums: Walk
    maps: Walk
    parts: int
    type: Any

    def sizes(self, walk: Walk) -> tuple[int, int, int, int]:
        return self.outer, walk.splits, self.shape.channels, self.shape.stride // self.shape.align

    def constants(self, tile: Tile, *, joint: bool) -> tuple[Any, ...]:
        shape = self.shape
        return self.type, joint, shape.rows, shape.flat, shape.align, tile.positions, tile.channels

    def merging(self, *, joint: bool) -> tuple[Any, ...]:
        shape = self.shape
        parts, channels = summing(shape, self.sum_tile)
        return joint, shape.rows, shape.flat, shape.align, self.sum_tile.positions, parts, channels

    def merge_blocks(self) -> int:
        return -(-self.shape.channels // summing(self.shape, self.sum_tile)[1])


@lru_cache(maxsize=16384)
def _frame(size: tuple[int, ...], rows: bool, dtype: torch.dtype, inputs: int) -> _Frame:
    channels = size[1]
    inner = prod(size[2:])
    shape = Geometry(rows, channels, 1 if rows else inner, dtype.itemsize)
    outer = size[0] * inner // shape.inner
    first, second = sum_tile(shape, inputs), map_tile(shape)
    sums = walk(shape, outer, first)
    parts = sums.splits * shape.inner if shape.flat else sums.parts
    maps = walk(shape, outer, second)
    return _Frame(shape, outer, first, second, sums, maps, parts, _triton_type(dtype))


@lru_cache(maxsize=16384)
def _alone(frame: _Frame) -> dict[str, Any]:
    """What the launches over one shard of a layer that is alone always have."""
    return {
        "sum": ((frame.sums.programs, 1, 1), frame.sizes(frame.sums), frame.constants(frame.sum_tile, joint=False)),
        "map": ((frame.maps.programs, 1, 1), frame.sizes(frame.maps), frame.constants(frame.map_tile, joint=False)),
        "merge": ((frame.merge_blocks(), 1, 1), frame.merging(joint=False)),
    }


class Shards:
    """Some shards of one device, dtype and geometry, none of them empty, and the passes over them.

    Args:
        xs: The inputs, dense: contiguous or channels-last. All tensors begin at a multiple of 16 bytes.
        dys: In backward, the gradients of the outputs, shaped and laid out as the inputs.
        residuals: What was or is added to the outputs, laid out as the inputs; None where nothing is.
        activation: None or "relu".
        gate: In backward, whether the gradients of the residuals are asked for.
        alone: Whether there is nobody to meet. Only for the two functions at the end of this module.
    """

    def __init__(
        self,
        xs: Sequence[Tensor],
        dys: Sequence[Tensor] | None = None,
        residuals: Sequence[Tensor] | None = None,
        activation: str | None = None,
        *,
        gate: bool = False,
        alone: bool = False,
    ) -> None:
        self.xs, self.dys, self.residuals = xs, dys, residuals
        self.device, self._joint, self._relu = xs[0].device, not alone, activation == "relu"
        frames = [_frame(tuple(x.shape), is_rows(x), x.dtype, 1 if dys is None else 2) for x in xs]
        self.outputs = [torch.empty_like(x) for x in xs]
        self.gated: list[Tensor] | None = None
        if gate and self._relu and residuals is not None:
            self.gated = [torch.empty_like(x) for x in xs]
        self._none, self._frame = _nothing(self.device), frames[0]
        self._table, self._most = self._none, max([frame.parts for frame in frames])
        if alone:
            static = _alone(frames[0])
            self._sum, self._map, self._merge = static["sum"], static["map"], static["merge"]
            return
        self._table = self._make_table(frames)
        first, num = frames[0], len(xs)
        sizes = (1, 1, first.shape.channels, first.shape.stride // first.shape.align)  # the others are in the table
        programs = max([frame.sums.programs for frame in frames]), max([frame.maps.programs for frame in frames])
        self._sum = ((programs[0], num, 1), sizes, first.constants(first.sum_tile, joint=True))
        self._map = ((programs[1], num, 1), sizes, first.constants(first.map_tile, joint=True))
        self._merge = ((first.merge_blocks(), num, 1), first.merging(joint=True))

    def _make_table(self, frames: Sequence[_Frame]) -> Tensor:
        """What the kernels of a joint launch read instead of arguments, a row for each shard."""
        columns: list[Sequence[Tensor] | None] = [self.xs, self.outputs, self.residuals]
        if self.dys is not None:
            columns = [self.xs, self.dys, self.residuals, self.gated, self.outputs]
        rows = []
        for number, frame in enumerate(frames):
            row = [frame.outer, frame.sums.splits, frame.maps.splits]
            row += [0 if column is None else column[number].data_ptr() for column in columns]
            rows.append(row + [0] * (_FIELDS - len(row)))
        return torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)

    def _first(self, tensors: Sequence[Tensor] | None) -> Tensor:
        return self._none if tensors is None else tensors[0]

    def _partials(self) -> Tensor:
        size = len(self.xs) * self._most * 2 * self._frame.shape.channels
        return torch.empty(size, dtype=torch.float64, device=self.device)

    def _rows(self) -> Tensor:
        if not self._joint:
            return self._none
        width = 1 + 2 * self._frame.shape.channels
        return torch.empty((len(self.xs), width), dtype=torch.float64, device=self.device)

    def statistics(self) -> Tensor:
        """Count, mean and M2 of each shard: a row ``[1 + 2C]`` in float64 for each."""
        return self._statistics(Found(self._none, self._none), None, None, 0.0, Running())

    def _statistics(
        self, found: Found, weight: Tensor | None, bias: Tensor | None, eps: float, running: Running
    ) -> Tensor:
        none, tile, rows, partials = self._none, self._frame.sum_tile, self._rows(), self._partials()
        grid, sizes, constants = self._sum
        _run(
            "statistics_kernel",
            grid,
            (self.xs[0], self._table, partials),
            (*sizes, self._most, *constants, tile.unroll, tile.stages),
            tile.num_warps,
        )
        foreign = (_or(weight, none), _or(bias, none), *_running_arguments(running, none))
        grid, constants = self._merge
        constants = (*constants, weight is not None, bias is not None, *_running_options(running))
        numbers = (*sizes, self._most, *_numbers(eps, running.momentum))
        tensors = (partials, self._table, rows, *found, *foreign)
        _run("merge_statistics_kernel", grid, tensors, (*numbers, *constants), foreign=foreign)
        return rows

    def normalize(self, coefs: Tensor) -> list[Tensor]:
        """The outputs, from the coefs of the global statistics."""
        grid, sizes, constants = self._map
        tensors = (self.xs[0], self._first(self.residuals), self.outputs[0], self._table, coefs)
        constants = (*constants, self.residuals is not None, self._relu)
        _run("normalize_kernel", grid, tensors, (*sizes, *constants), self._frame.map_tile.num_warps)
        return self.outputs

    def reduce(
        self, found: Found, *, weight: bool = False, bias: bool = False, slopes: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The two sums of each shard that backward needs.

        Args:
            found: From the forward.
            weight: Whether the gradient of the weight is wanted.
            bias: Whether the gradient of the bias is wanted.
            slopes: For a layer that is alone: where to put what `finish_sums` returns otherwise.

        Returns:
            A row ``[1 + 2C]`` for each shard (1, sum of dy, sum of dy (x - mean)) in float64, and the gradients of
            weight and bias, ``[shards, C]`` in float32.
        """
        none, tile, rows, partials = self._none, self._frame.sum_tile, self._rows(), self._partials()
        residual = self.residuals if self._relu else None
        grid, sizes, constants = self._sum
        flags = (residual is not None, self._relu, self.gated is not None)
        _run(
            "reduce_kernel",
            grid,
            (self._first(self.dys), self.xs[0], self._first(residual), self._first(self.gated), self._table, partials,
             found.coefs),
            (*sizes, self._most, *constants, tile.unroll, tile.stages, *flags),
            tile.num_warps,
        )  # fmt: skip
        made = [
            torch.empty((len(self.xs), self._frame.shape.channels), dtype=torch.float32, device=self.device)
            if wanted
            else None
            for wanted in (weight, bias)
        ]
        grid, constants = self._merge
        tensors = (partials, self._table, rows, *found, _or(slopes, none), *(_or(t, none) for t in made))
        _run("merge_sums_kernel", grid, tensors, (*sizes, self._most, 0, *constants, weight, bias))
        return rows, made[0], made[1]

    def gradients(self, found: Found, slopes: Tensor) -> list[Tensor]:
        """The gradients of the inputs, from the slopes of the sums over all shards; after `reduce`."""
        relu = self._relu and self.gated is None
        residual = self.residuals if relu else None
        grid, sizes, constants = self._map
        dy = self.dys if self.gated is None else self.gated
        _run(
            "input_kernel",
            grid,
            (self._first(dy), self.xs[0], self._first(residual), self.outputs[0], self._table, found.coefs, slopes),
            (*sizes, *constants, residual is not None, relu, self.gated is not None),
            self._frame.map_tile.num_warps,
        )
        return self.outputs


def _tree(rows: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """Levels of the tree over the rows ``[K, 1 + 2C]``, channels of a program, and the grid."""
    channels, levels = (rows.shape[1] - 1) // 2, (len(rows) - 1).bit_length()
    block = max(1, min(power(channels), 512 >> levels))
    return levels, block, (-(-channels // block), 1, 1)


def finish(
    rows: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    eps_mode: str,
    running: Running = _STAY,
) -> Found:
    """Merge the rows ``[K, 1 + 2C]`` of all shards in the fixed tree and move the running statistics.

    The count is at least 1, and at least 2 where there are running statistics.
    """
    none, channels = _nothing(rows.device), (rows.shape[1] - 1) // 2
    found = _empty(channels, rows.device)
    levels, block, grid = _tree(rows)
    foreign = (_or(weight, none), _or(bias, none), *_running_arguments(running, none))
    flags = (eps_mode == "clamp", weight is not None, bias is not None, *_running_options(running))
    numbers = (len(rows), channels, *_numbers(eps, running.momentum))
    tensors = (rows.contiguous(), *found, *foreign)
    _run("finish_statistics_kernel", grid, tensors, (*numbers, levels, block, *flags), foreign=foreign)
    return found


def finish_sums(rows: Tensor, found: Found, eps: float, eps_mode: str) -> Tensor:
    """Add the rows ``[K, 1 + 2C]`` of all shards in the fixed tree; return the slopes for `Shards.gradients`."""
    channels = (rows.shape[1] - 1) // 2
    slopes = torch.empty(2 * channels, dtype=torch.float32, device=rows.device)
    levels, block, grid = _tree(rows)
    numbers = (len(rows), channels, _numbers(eps, None)[0])
    tensors = (rows.contiguous(), *found, slopes)
    _run("finish_sums_kernel", grid, tensors, (*numbers, levels, block, eps_mode == "clamp"))
    return slopes


def coefs(mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The coefs ``[3C]`` of statistics that were found elsewhere."""
    none, channels = _nothing(mean.device), mean.numel()
    made = torch.empty(3 * channels, dtype=torch.float32, device=mean.device)
    foreign = (_or(weight, none), _or(bias, none))
    tensors = (mean.contiguous(), invstd.contiguous(), made, *foreign)
    flags = (weight is not None, bias is not None)
    _run("coefs_kernel", (-(-channels // 256), 1, 1), tensors, (channels, 256, *flags), foreign=foreign)
    return made


def _empty(channels: int, device: torch.device) -> Found:
    return Found(
        torch.empty(3 * channels + 1, dtype=torch.float64, device=device),
        torch.empty(3 * channels, dtype=torch.float32, device=device),
    )


def forward_alone(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    eps: float,
    running: Running,
) -> tuple[Tensor, Found]:
    """The output of a layer that has nobody to meet, and what `backward_alone` wants of it."""
    shards = Shards([x], None, None if residual is None else [residual], activation, alone=True)
    found = _empty(x.shape[1], x.device)
    shards._statistics(found, weight, bias, eps, running)
    return shards.normalize(found.coefs)[0], found


def backward_alone(
    dy: Tensor,
    x: Tensor,
    found: Found,
    residual: Tensor | None,
    activation: str | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight, bias and residual, as far as they are needed."""
    added = None if residual is None else [residual]
    shards = Shards([x], [dy], added, activation, gate=needed[3], alone=True)
    slopes = torch.empty(2 * x.shape[1], dtype=torch.float32, device=x.device)
    _, dweight, dbias = shards.reduce(found, weight=needed[1], bias=needed[2], slopes=slopes)
    dx = shards.gradients(found, slopes)[0] if needed[0] else None
    gated = dy if shards.gated is None else shards.gated[0]
    return dx, None if dweight is None else dweight[0], None if dbias is None else dbias[0], gated
