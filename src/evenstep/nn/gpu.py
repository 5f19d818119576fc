"""Launches the Triton kernels of batch norm: geometry, buffers, and several shards in one launch.

A pass over several shards on one device is one launch. What it gives is a function of the values, shape and layout of
each shard alone, bit for bit: how many shards are given at once changes nothing. Nothing here waits for the device.

The caller asks `takes` first. In company it makes `Shards` of what it has in forward, and again in backward::

    rows = shards.statistics()                     # then those of all shards, wherever they are: meeting 1
    found = finish(rows, ...)                      # global statistics and coefs; moves the running ones
    ys = shards.normalize(found.coefs)
    rows, ... = shards.reduce(found)               # then those of all shards: meeting 2
    dxs = shards.gradients(found, finish_sums(rows, found, ...))

`forward_alone` and `backward_alone` are all of a layer that has nobody to meet: one launch each. Their last bits differ
from those of the same values in company.
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

from evenstep.nn.tiles import (
    Geometry,
    Tile,
    Walk,
    geometry,
    is_rows,
    map_tile,
    parts_of,
    policies,
    power,
    sum_tile,
    summing,
    walk,
    whole,
)
from evenstep.transport import pinned

__all__ = [
    "JointStatistics",
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
_REGISTERS = 65536  # of a multiprocessor
_NO_TILE = Tile(1, 1, 4)


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


class JointStatistics(NamedTuple):
    """The combined statistics of all shards.

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
    tile: Tile = _NO_TILE,
    foreign: tuple[Tensor, ...] = (),
    meetings: int | None = None,
) -> None:
    """Launch a kernel. What Triton compiled for it is kept, as finding it again takes Triton longest.

    Args:
        name: The kernel's name.
        grid: Programs in each direction.
        tensors: The kernel's tensors, in its order.
        rest: Its numbers and constants, in its order.
        tile: Says how large a program is.
        foreign: Those tensors whose dtype does not follow from the constants.
        meetings: For a kernel of a layer that is alone, how often its programs meet.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(name, grid, tensors, rest, tile, foreign, meetings)
        return
    if meetings is None:
        rest = (*rest, _begins_early(device))
    key = (name, device.index, grid, rest, tile, tuple([t.dtype for t in foreign]))
    launch = _launchers.get(key)
    if launch is not None:
        launch(*tensors, *rest)
        return
    options = _launch_options(device, tile, meetings, early=meetings is None and rest[-1])
    compiled = getattr(_kernels(), name)[grid](*tensors, *rest, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_launchers) >= _MOST_LAUNCHERS:  # some sizes may never come again
            _launchers.clear()
        _launchers[key] = compiled[grid]


def _launch_options(device: torch.device, tile: Tile, meetings: int | None, *, early: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"enable_fp_fusion": True, "num_warps": tile.num_warps}
    if early:
        options["launch_pdl"] = True
    if meetings and device.type == "cuda":
        options["launch_cooperative_grid"] = True
    if tile.together and device.type == "cuda" and torch.version.hip is None:
        registers = _REGISTERS // (32 * tile.num_warps * tile.together) // 8 * 8  # of a thread; given out by eight
        options["maxnreg"] = min(255, registers)
    return options


@lru_cache(maxsize=64)
def _nothing(device: torch.device) -> Tensor:
    """A placeholder for an argument that a kernel does not read."""
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
    """Everything about the passes over one shard that follows from its shape."""

    shape: Geometry
    outer: int
    sum_tile: Tile
    map_tile: Tile
    sums: Walk
    maps: Walk
    parts: int
    type: Any

    @property
    def sizes(self) -> tuple[int, int]:
        return self.shape.channels, self.shape.stride // self.shape.align

    def constants(self, tile: Tile) -> tuple[Any, ...]:
        shape = self.shape
        return (
            self.type,
            shape.rows,
            shape.flat,
            shape.align,
            tile.positions,
            tile.channels,
            tile.unroll,
        )

    @property
    def merging(self) -> tuple[Any, ...]:
        shape = self.shape
        return shape.rows, shape.flat, shape.align, self.sum_tile.positions, *summing(shape, self.sum_tile)


@lru_cache(maxsize=16384)
def _frame(size: tuple[int, ...], rows: bool, dtype: torch.dtype, inputs: int) -> _Frame:
    shape, outer = _shape(size, rows, dtype)
    first, second = sum_tile(shape, inputs), map_tile(shape)
    sums, maps = walk(shape, outer, first), walk(shape, outer, second)
    return _Frame(shape, outer, first, second, sums, maps, parts_of(shape, sums), _triton_type(dtype))


def _shape(size: tuple[int, ...], rows: bool, dtype: torch.dtype) -> tuple[Geometry, int]:
    """The geometry of a shard, and how often it has it."""
    inner = prod(size[2:])
    shape = Geometry(rows, size[1], 1 if rows else inner, dtype.itemsize)
    return shape, size[0] * inner // shape.inner


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to a device, without waiting. A CUDA graph reads it from the host at every replay."""
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            table = pinned.take(table)
        else:
            pinned.make_room()
    return table.to(device, non_blocking=True)


class Shards:
    """Some shards of one device, dtype and geometry, none of them empty, and the passes over them.

    Args:
        xs: The inputs, dense: contiguous or channels-last. All tensors begin at a multiple of 16 bytes.
        dys: In backward, the gradients of the outputs, shaped and laid out as the inputs.
        residuals: What was or is added to the outputs, laid out as the inputs; None where nothing is.
        activation: None or "relu".
        gate: In backward, whether the gradients of the residuals are asked for.
    """

    def __init__(
        self,
        xs: Sequence[Tensor],
        dys: Sequence[Tensor] | None = None,
        residuals: Sequence[Tensor] | None = None,
        activation: str | None = None,
        *,
        gate: bool = False,
    ) -> None:
        self.xs, self.dys, self.residuals = xs, dys, residuals
        self.device, self._relu = xs[0].device, activation == "relu"
        frames = [_frame(tuple(x.shape), is_rows(x), x.dtype, 1 if dys is None else 2) for x in xs]
        self.outputs = [torch.empty_like(x) for x in xs]
        self.gated: list[Tensor] | None = None
        if gate and self._relu and residuals is not None:
            self.gated = [torch.empty_like(x) for x in xs]
        self._frame, num = frames[0], len(xs)
        self._table, self._most = self._make_table(frames), max([frame.parts for frame in frames])
        self._sum = max([frame.sums.programs for frame in frames]), num, 1
        self._map = max([frame.maps.programs for frame in frames]), num, 1
        read_bytes = sum([x.nbytes for x in xs]) * (1 if dys is None else 2)
        self._policies = policies(read_bytes)
        self._merge = -(-self._frame.shape.channels // self._frame.merging[-1]), num, 1

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
        return _on_device(torch.tensor(rows, dtype=torch.int64), self.device)

    def _partials(self) -> Tensor:
        size = len(self.xs) * self._most * 2 * self._frame.shape.channels
        return torch.empty(size, dtype=torch.float64, device=self.device)

    def _rows(self) -> Tensor:
        width = 1 + 2 * self._frame.shape.channels
        return torch.empty((len(self.xs), width), dtype=torch.float64, device=self.device)

    def statistics(self) -> Tensor:
        """Count, mean and M2 of each shard: a row ``[1 + 2C]`` in float64 for each."""
        frame, rows, partials = self._frame, self._rows(), self._partials()
        sizes, tensors = (*frame.sizes, self._most), (self._table, partials)
        constants = frame.constants(frame.sum_tile)
        _run("statistics_kernel", self._sum, tensors, (*sizes, *constants), frame.sum_tile)
        _run("merge_statistics_kernel", self._merge, (*tensors, rows), (*sizes, *frame.merging))
        return rows

    def normalize(self, coefs: Tensor) -> list[Tensor]:
        """The outputs, from the coefs of the global statistics."""
        frame = self._frame
        constants = (*frame.constants(frame.map_tile), self.residuals is not None, self._relu, *self._policies)
        tensors = (self._table, coefs)
        _run("normalize_kernel", self._map, tensors, (*frame.sizes, *constants), frame.map_tile)
        return self.outputs

    def reduce(
        self, found: JointStatistics, *, weight: bool = False, bias: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The two sums of each shard that backward needs.

        Args:
            found: From the forward.
            weight: Whether the gradient of the weight is wanted.
            bias: Whether the gradient of the bias is wanted.

        Returns:
            A row ``[1 + 2C]`` for each shard (1, sum of dy, sum of dy (x - mean)) in float64, and the gradients of
            weight and bias, ``[shards, C]`` in float32.
        """
        frame, rows, partials, none = self._frame, self._rows(), self._partials(), _nothing(self.device)
        sizes, tensors = (*frame.sizes, self._most), (self._table, partials)
        flags = (self._relu and self.residuals is not None, self._relu, self.gated is not None)
        constants = (*sizes, *frame.constants(frame.sum_tile), *flags)
        _run("reduce_kernel", self._sum, (*tensors, found.coefs), constants, frame.sum_tile)
        made = [
            torch.empty((len(self.xs), frame.shape.channels), dtype=torch.float32, device=self.device)
            if wanted
            else None
            for wanted in (weight, bias)
        ]
        merged = (*tensors, rows, found.vectors, *(_or(t, none) for t in made))
        _run("merge_sums_kernel", self._merge, merged, (*sizes, *frame.merging, weight, bias))
        return rows, made[0], made[1]

    def gradients(self, found: JointStatistics, slopes: Tensor) -> list[Tensor]:
        """The gradients of the inputs, from the slopes of the sums over all shards; after `reduce`."""
        frame, relu = self._frame, self._relu and self.gated is None
        flags = (relu and self.residuals is not None, relu, self.gated is not None)
        constants = (*frame.sizes, *frame.constants(frame.map_tile), *flags, *self._policies)
        _run("input_kernel", self._map, (self._table, found.coefs, slopes), constants, frame.map_tile)
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
) -> JointStatistics:
    """Merge the rows ``[K, 1 + 2C]`` of all shards in the fixed tree and update the running statistics.

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


def finish_sums(rows: Tensor, found: JointStatistics, eps: float, eps_mode: str) -> Tensor:
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


def _empty(channels: int, device: torch.device) -> JointStatistics:
    return JointStatistics(
        torch.empty(3 * channels + 1, dtype=torch.float64, device=device),
        torch.empty(3 * channels, dtype=torch.float32, device=device),
    )


class _Alone(NamedTuple):
    """How one launch goes through a whole direction of a layer that is alone."""

    grid: tuple[int, int, int]
    tile: Tile
    meetings: int
    partials: int
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]


@lru_cache(maxsize=16384)
def _alone(size: tuple[int, ...], rows: bool, dtype: torch.dtype, inputs: int, device: torch.device) -> _Alone | None:
    """None where programs cannot meet."""
    if not _can_meet():
        return None
    shape, outer = _shape(size, rows, dtype)
    way = whole(shape, outer, inputs)
    total, room = way.walk.programs, _room(device, way.tile.together)
    if way.meetings == 1 and total > room:
        way = way.often(shape.channels)
    grid = min(total, room) if way.meetings else total // way.walk.columns
    if shape.flat and not way.meetings:
        grid = total
    columns = 1 if shape.flat and not way.meetings else way.walk.columns
    sizes = (outer, way.walk.splits, total, columns, shape.channels, shape.stride // shape.align, way.parts)
    tile = way.tile
    constants = (_triton_type(dtype), shape.rows, shape.flat, shape.align, tile.positions, tile.channels, way.span,
                 tile.unroll, *way.merging, way.meetings, *way.policies)  # fmt: skip
    return _Alone((grid, 1, 1), tile, way.meetings, way.parts * 2 * shape.channels, sizes, constants)


def _can_meet() -> bool:
    """Whether launches whose programs all run at once are known to work."""
    return torch.version.hip is None


@lru_cache(maxsize=64)
def _room(device: torch.device, together: int) -> int:
    """How many programs run at once if a multiprocessor holds `together` of them."""
    if device.type != "cuda":
        return 1  # the interpreter runs one after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * together


_counters: dict[tuple[int, int, int], Tensor] = {}


def _counter(alone: _Alone, device: torch.device) -> Tensor:
    """Where the programs of a launch meet: one for each stream, whose launches follow one another."""
    if not alone.meetings:
        return _nothing(device)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
        return torch.zeros(1, dtype=torch.int64, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream, alone.grid[0])
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int64, device=device)
    return counter


def forward_alone(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    eps: float,
    running: Running,
) -> tuple[Tensor, JointStatistics]:
    """The output of a layer that has nobody to meet, and what `backward_alone` needs from it."""
    device = x.device
    alone = _alone(tuple(x.shape), is_rows(x), x.dtype, 1, device)
    if alone is None:
        shards = Shards([x], None, None if residual is None else [residual], activation)
        found = finish(shards.statistics(), weight, bias, eps, "plus", running)
        return shards.normalize(found.coefs)[0], found
    none, found, y = _nothing(device), _empty(x.shape[1], device), torch.empty_like(x)
    partials = torch.empty(alone.partials, dtype=torch.float64, device=device)
    foreign = (_or(weight, none), _or(bias, none), *_running_arguments(running, none))
    flags = (residual is not None, activation == "relu", weight is not None, bias is not None)
    numbers = (*alone.sizes, *_numbers(eps, running.momentum))
    tensors = (x, _or(residual, none), y, partials, _counter(alone, device), *found, *foreign)
    constants = (*alone.constants, *flags, *_running_options(running))
    _run("forward_kernel", alone.grid, tensors, (*numbers, *constants), alone.tile, foreign, alone.meetings)
    return y, found


def backward_alone(
    dy: Tensor,
    x: Tensor,
    found: JointStatistics,
    residual: Tensor | None,
    activation: str | None,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of input, weight, bias and residual, as far as they are needed."""
    device, channels, relu = x.device, x.shape[1], activation == "relu"
    alone = _alone(tuple(x.shape), is_rows(x), x.dtype, 2, device)
    if alone is None:
        shards = Shards([x], [dy], None if residual is None else [residual], activation, gate=needed[3])
        rows, *made = shards.reduce(found, weight=needed[1], bias=needed[2])
        dx = shards.gradients(found, finish_sums(rows, found, 0.0, "plus"))[0] if needed[0] else None
        gated = dy if shards.gated is None else shards.gated[0]
        return dx, *(None if t is None else t[0] for t in made), gated
    none, has_residual = _nothing(device), relu and residual is not None
    gate = has_residual and needed[3]
    gated = torch.empty_like(x) if gate else dy
    dx = torch.empty_like(x) if needed[0] else None
    made = [torch.empty(channels, dtype=torch.float32, device=device) if n else None for n in needed[1:3]]
    partials = torch.empty(alone.partials, dtype=torch.float64, device=device)
    slopes = torch.empty(2 * channels, dtype=torch.float32, device=device)
    tensors = (dy, x, residual if has_residual and residual is not None else none, gated, _or(dx, none), partials,
               _counter(alone, device), *found, slopes, *(_or(t, none) for t in made))  # fmt: skip
    constants = (*alone.constants, has_residual, relu, gate, needed[1], needed[2], needed[0])
    _run("backward_kernel", alone.grid, tensors, (*alone.sizes, *constants), alone.tile, (), alone.meetings)
    return dx, made[0], made[1], gated
