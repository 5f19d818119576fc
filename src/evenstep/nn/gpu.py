"""Launches the Triton kernels of batch norm: geometry, buffers, and several shards in one launch.

A pass over several shards on one device is one launch. What it gives is a function of the values, shape and layout of
each shard alone, bit for bit: how many shards are given at once changes nothing. Nothing here waits for the device.

The caller asks `takes` first. In company it makes `Shards` of what it has in forward, and again in backward::

    rows = shards.statistics()                     # then those of all shards, wherever they are: meeting 1
    found = finish(rows, ...)                      # global statistics and coefs; moves the running ones
    ys = shards.normalize(found.coefs)
    rows, ... = shards.reduce(found)               # then those of all shards: meeting 2
    dxs = shards.gradients(found, finish_sums(rows, found, ...))

`forward_alone` and `backward_alone` are the whole of a layer that has nobody to meet: fewer launches, and other last bits
than the same values in company.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Found", "Running", "Shards", "backward_alone", "coefs", "finish", "finish_sums", "forward_alone", "takes"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CACHED_BYTES = 24 << 20  # of what one pass reads, the next one finds about as much again
_FIELDS = 8  # kernels.FIELDS, known without Triton


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


class Found(NamedTuple):
    """What the statistics of all shards come to.

    Attributes:
        vectors: Mean, M2 and inverse standard deviation, ``[C]`` each, and the count: ``[3C + 1]`` in float64.
        coefs: Centre, scale and offset, ``[C]`` each: ``[3C]`` in float32.
    """

    vectors: Tensor
    coefs: Tensor


@dataclass(frozen=True)
class Tile:
    """How a pass walks over the data; see `kernels`.

    Attributes:
        positions: Positions in a tile.
        channels: Channels in a tile.
        num_warps: Warps of a program.
        unroll: Iterations between two jumps.
        stages: Iterations whose loads are in flight at once, through shared memory; 1 leaves it to the compiler.
        programs: How many programs a launch should have at most, as far as it can choose.
    """

    positions: int
    channels: int
    num_warps: int
    unroll: int = 1
    stages: int = 1
    programs: int = 1 << 31


@dataclass(frozen=True)
class Geometry:
    """The shape of a shard as the kernels see it: planes ``[outer, channels, inner]`` or rows ``[outer, channels]``."""

    rows: bool
    channels: int
    inner: int
    element_bytes: int

    @property
    def flat(self) -> bool:
        """Whether planes are so small that a whole sample is walked over as if it were one."""
        return not self.rows and 1 < self.channels and self.inner < 128 and self.channels * self.inner < 1 << 30

    @property
    def stride(self) -> int:
        """What neighbouring planes, rows or flat samples are apart."""
        if self.flat:
            return self.channels * self.inner
        return self.channels if self.rows else self.inner

    @property
    def align(self) -> int:
        """By which power of two, as far as it matters, every plane or row begins."""
        return gcd(self.stride, 16)


def geometry(x: Tensor) -> Geometry:
    """The geometry of a dense tensor ``[N, C, ...]``."""
    channels = x.shape[1]
    inner = x.numel() // (x.shape[0] * channels)
    rows = inner == 1 or (channels > 1 and not x.is_contiguous())
    return Geometry(rows, channels, 1 if rows else inner, x.element_size())


def _power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _tile(shape: Geometry, size: int, channels: int, *rest: int) -> Tile:
    """A tile of `size` elements; of `channels` channels at most, for rows."""
    if shape.rows:
        channels = min(_power(shape.channels), channels)
        return Tile(size // channels, channels, *rest)
    if shape.flat:
        return Tile(min(size, _power(shape.stride)), 1, *rest)
    # The fewest positions that do not exist; of nearly equal ones the longest.
    lengths = [min(size >> n, _power(shape.inner)) for n in range(4)]
    waste = [-(-shape.inner // length) * length / shape.inner for length in lengths]
    length = next(n for n, w in zip(lengths, waste, strict=True) if w <= max(1.07, min(waste)))
    return Tile(length, min(size // length, _power(shape.channels)), *rest)


@lru_cache(maxsize=4096)
def sum_tile(shape: Geometry, inputs: int) -> Tile:
    """The tile of a pass that sums over one input (statistics) or two."""
    if shape.flat:
        return _tile(shape, 512, 64, 2, 4, 1, 792)
    if inputs == 2:
        return _tile(shape, 2048, 64, 4, 1, 4, 528)
    if shape.element_bytes == 2:
        return _tile(shape, 2048, 64, 4, 1, 4, 792)
    return _tile(shape, 1024 if shape.rows else 2048, 64, 4, 4, 1, 528)


@lru_cache(maxsize=4096)
def map_tile(shape: Geometry) -> Tile:
    """The tile of a pass that maps element to element."""
    if shape.flat:
        return _tile(shape, 1024, 256, 4, 1, 1, 1056)
    if shape.element_bytes == 2:
        return _tile(shape, 2048 if shape.rows or shape.inner >= 1024 else 4096, 256, 4)
    return _tile(shape, 1024, 256, 4)


class _Walk(NamedTuple):
    """How one shard is divided between programs."""

    splits: int
    columns: int
    blocks: int

    @property
    def parts(self) -> int:
        return self.splits * self.columns

    @property
    def programs(self) -> int:
        return self.splits * self.columns * self.blocks


def _most_splits(shape: Geometry, tile: Tile) -> tuple[int, int, int]:
    columns = 1 if shape.rows else -(-shape.stride // tile.positions)
    blocks = 1 if shape.flat else -(-shape.channels // tile.channels)
    return max(1, tile.programs // (columns * blocks)), columns, blocks


@lru_cache(maxsize=65536)
def _walk(shape: Geometry, outer: int, tile: Tile) -> _Walk:
    """A function of the shard's shape alone: the parts of a sum decide about its bits."""
    most, columns, blocks = _most_splits(shape, tile)
    iterations = -(-outer // tile.positions) if shape.rows else outer
    return _Walk(min(iterations, most), columns, blocks)


@lru_cache(maxsize=4096)
def _summing(shape: Geometry, tile: Tile) -> tuple[int, int]:
    """How many parts and channels a program adds up at once: the same for shards of any size."""
    most, columns, _ = _most_splits(shape, tile)
    parts = min(_power(most * (shape.inner if shape.flat else columns)), 1024)
    return parts, max(1, min(_power(shape.channels), 1024 // parts))


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


_compiled: dict[Any, Any] = {}


@lru_cache(maxsize=64)
def _begins_early(device: torch.device) -> bool:
    """Whether a launch on this device may begin before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _run(
    name: str, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: tuple[Any, ...], warps: int = 4
) -> None:
    """Launch a kernel. What Triton compiled for such arguments is kept, as finding it again takes Triton longest.

    Args:
        name: The kernel's name.
        grid: Programs in each direction.
        arguments: Tensors and integers.
        options: The kernel's constants, in its order.
        warps: Warps of a program.
    """
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run(name, grid, arguments, options, warps)
        return
    types = tuple([a >> 31 in (0, -1) if type(a) is int else a.dtype for a in arguments])
    key = (name, device.index, warps, options, types)
    kernel = _compiled.get(key)
    if kernel is None:
        early = _begins_early(device)
        extra = {"launch_pdl": True} if early else {}
        compiled = getattr(_kernels(), name)[grid](*arguments, *options, early, num_warps=warps, **extra)
        if compiled is not None:  # the interpreter compiles nothing
            _compiled[key] = (compiled, early)
        return
    kernel[0][grid](*arguments, *options, kernel[1])


@lru_cache(maxsize=64)
def _nothing(device: torch.device) -> Tensor:
    """Stands where a kernel has an argument that it does not read."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _or(t: Tensor | None, nothing: Tensor) -> Tensor:
    return nothing if t is None else t


def _running_arguments(running: Running, nothing: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    mean, var, tracked, momentum = running
    for t in (mean, var, tracked):
        if t is not None:
            torch.autograd.graph.increment_version(t)  # the kernel changes it behind autograd's back
    if momentum is None and tracked is not None:
        tracked.add_(1)
    tensors = (_or(mean, nothing), _or(var, nothing), _or(tracked, nothing))
    return tensors, _bits(-1.0 if momentum is None else momentum)


def _running_options(running: Running) -> tuple[bool, bool, bool]:
    return running.mean is not None, running.var is not None, running.num_batches_tracked is not None


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
        first = xs[0]
        self.shape, self.device, self._joint = geometry(first), first.device, not alone
        self.xs, self.dys, self.residuals = xs, dys, residuals
        self._relu = activation == "relu"
        self.gated = self.outputs = None
        self._map_tile, self._sum_tile = map_tile(self.shape), sum_tile(self.shape, 1 if dys is None else 2)
        outers = [x.numel() // (self.shape.channels * self.shape.inner) for x in xs]
        self._sums = [_walk(self.shape, outer, self._sum_tile) for outer in outers]
        self._maps = [_walk(self.shape, outer, self._map_tile) for outer in outers]
        self._outer, self._type = outers[0], _triton_type(first.dtype)
        self.outputs = [torch.empty_like(x) for x in xs]
        if gate and self._relu and residuals is not None:
            self.gated = [torch.empty_like(x) for x in xs]
        self._none = _nothing(self.device)
        self._table = self._none if alone else self._make_table(outers)

    def _make_table(self, outers: Sequence[int]) -> Tensor:
        """What the kernels of a joint launch read instead of arguments, a row for each shard."""
        columns = [self.xs, self.outputs, self.residuals]
        if self.dys is not None:
            columns = [self.xs, self.dys, self.residuals, self.gated, self.outputs]
        rows = []
        for number, outer in enumerate(outers):
            row = [outer, self._sums[number].splits, self._maps[number].splits]
            row += [0 if column is None else column[number].data_ptr() for column in columns]
            rows.append(row + [0] * (_FIELDS - len(row)))
        return torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)

    def _first(self, tensors: Sequence[Tensor] | None) -> Tensor:
        return self._none if tensors is None else tensors[0]

    def _sizes(self, walks: Sequence[_Walk]) -> tuple[int, int, int, int]:
        shape = self.shape
        return self._outer, walks[0].splits, shape.channels, shape.stride // shape.align

    def _walking(self, tile: Tile) -> tuple[Any, ...]:
        return (
            self._type,
            self._joint,
            self.shape.rows,
            self.shape.flat,
            self.shape.align,
            tile.positions,
            tile.channels,
        )

    def _grid(self, walks: Sequence[_Walk]) -> tuple[int, int, int]:
        return max([walk.programs for walk in walks]), len(self.xs), 1

    def _parts(self) -> tuple[int, Tensor]:
        most = max([walk.splits * self.shape.inner if self.shape.flat else walk.parts for walk in self._sums])
        size = len(self.xs) * most * 2 * self.shape.channels
        return most, torch.empty(size, dtype=torch.float64, device=self.device)

    def _keep(self) -> int:
        """How many of the last iterations read what may stay in the cache for the pass that follows."""
        shape, splits = self.shape, self._sums[0].splits
        samples = splits * self._sum_tile.positions if shape.rows else splits
        iteration = samples * shape.channels * shape.inner * shape.element_bytes
        return _CACHED_BYTES // (iteration * len(self.xs) * (1 if self.dys is None else 2))

    def _merging(self) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
        parts, channels = _summing(self.shape, self._sum_tile)
        grid = (-(-self.shape.channels // channels), len(self.xs), 1)
        return grid, (
            self._joint,
            self.shape.rows,
            self.shape.flat,
            self.shape.align,
            self._sum_tile.positions,
            parts,
            channels,
        )

    def _rows(self) -> Tensor:
        if not self._joint:
            return self._none
        return torch.empty((len(self.xs), 1 + 2 * self.shape.channels), dtype=torch.float64, device=self.device)

    def statistics(self) -> Tensor:
        """Count, mean and M2 of each shard: a row ``[1 + 2C]`` in float64 for each."""
        return self._statistics(Found(self._none, self._none), None, None, 0.0, Running())

    def _statistics(
        self, found: Found, weight: Tensor | None, bias: Tensor | None, eps: float, running: Running
    ) -> Tensor:
        none, tile, rows = self._none, self._sum_tile, self._rows()
        sizes = self._sizes(self._sums)
        most, partials = self._parts()
        _run("statistics_kernel", self._grid(self._sums), (self.xs[0], self._table, partials, *sizes, most, self._keep()),
             (*self._walking(tile), tile.unroll, tile.stages), tile.num_warps)  # fmt: skip
        tensors, momentum = _running_arguments(running, none)
        grid, options = self._merging()
        _run("merge_statistics_kernel", grid,
             (partials, self._table, rows, *sizes, most, *found, _or(weight, none), _or(bias, none), *tensors,
              _bits(eps), momentum),
             (*options, weight is not None, bias is not None, *_running_options(running)))  # fmt: skip
        return rows

    def normalize(self, coefs: Tensor) -> list[Tensor]:
        """The outputs, from the coefs of the global statistics."""
        tile = self._map_tile
        _run("normalize_kernel", self._grid(self._maps),
             (self.xs[0], self._first(self.residuals), self._first(self.outputs), self._table, coefs,
              *self._sizes(self._maps)),
             (*self._walking(tile), self.residuals is not None, self._relu), tile.num_warps)  # fmt: skip
        return self.outputs

    def reduce(
        self, found: Found, weight: Tensor | None = None, bias: Tensor | None = None, slopes: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The two sums of each shard that backward needs.

        Args:
            found: From the forward.
            weight: The layer's weight, if its gradient is wanted.
            bias: The layer's bias, if its gradient is wanted.
            slopes: For a layer that is alone: where to put what `finish_sums` returns otherwise.

        Returns:
            A row ``[1 + 2C]`` for each shard (1, sum of dy, sum of dy (x - mean)) in float64, and the gradients of weight
            and bias, ``[shards, C]`` in their dtypes.
        """
        none, tile, channels, rows = self._none, self._sum_tile, self.shape.channels, self._rows()
        sizes = self._sizes(self._sums)
        most, partials = self._parts()
        residual = self.residuals if self._relu else None
        _run("reduce_kernel", self._grid(self._sums),
             (self._first(self.dys), self.xs[0], self._first(residual), self._first(self.gated), self._table, partials,
              found.coefs, *sizes, most, self._keep()),
             (*self._walking(tile), tile.unroll, tile.stages, residual is not None, self._relu, self.gated is not None),
             tile.num_warps)  # fmt: skip
        dweight, dbias = (
            None if t is None else torch.empty((len(self.xs), channels), dtype=t.dtype, device=self.device)
            for t in (weight, bias)
        )
        grid, options = self._merging()
        _run("merge_sums_kernel", grid,
             (partials, self._table, rows, *found, _or(slopes, none), _or(dweight, none), _or(dbias, none), *sizes, most,
              0),
             (*options, dweight is not None, dbias is not None))  # fmt: skip
        return rows, dweight, dbias

    def gradients(self, found: Found, slopes: Tensor) -> list[Tensor]:
        """The gradients of the inputs, from the slopes of the sums over all shards; after `reduce`."""
        tile, gated = self._map_tile, self.gated is not None
        relu = self._relu and not gated
        residual = self.residuals if relu else None
        _run("input_kernel", self._grid(self._maps),
             (self._first(self.gated if gated else self.dys), self.xs[0], self._first(residual),
              self._first(self.outputs), self._table, found.coefs, slopes, *self._sizes(self._maps)),
             (*self._walking(tile), residual is not None, relu, gated), tile.num_warps)  # fmt: skip
        return self.outputs


def _tree(rows: Tensor) -> tuple[int, int, tuple[int, int, int]]:
    """Levels of the tree over the rows ``[K, 1 + 2C]``, channels of a program, and the grid."""
    channels, levels = (rows.shape[1] - 1) // 2, (len(rows) - 1).bit_length()
    block = max(1, min(_power(channels), 512 >> levels))
    return levels, block, (-(-channels // block), 1, 1)


def finish(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, eps_mode: str, running: Running = Running()
) -> Found:
    """Merge the rows ``[K, 1 + 2C]`` of all shards in the fixed tree and move the running statistics.

    The count is at least 1, and at least 2 where there are running statistics.
    """
    none, channels = _nothing(rows.device), (rows.shape[1] - 1) // 2
    found = _empty(channels, rows.device)
    levels, block, grid = _tree(rows)
    tensors, momentum = _running_arguments(running, none)
    _run("finish_statistics_kernel", grid,
         (rows.contiguous(), len(rows), *found, _or(weight, none), _or(bias, none), *tensors, channels, _bits(eps),
          momentum),
         (levels, block, eps_mode == "clamp", weight is not None, bias is not None, *_running_options(running)))  # fmt: skip
    return found


def finish_sums(rows: Tensor, found: Found, eps: float, eps_mode: str) -> Tensor:
    """Add the rows ``[K, 1 + 2C]`` of all shards in the fixed tree; return the slopes for `Shards.gradients`."""
    channels = (rows.shape[1] - 1) // 2
    slopes = torch.empty(2 * channels, dtype=torch.float32, device=rows.device)
    levels, block, grid = _tree(rows)
    _run("finish_sums_kernel", grid, (rows.contiguous(), len(rows), *found, slopes, channels, _bits(eps)),
         (levels, block, eps_mode == "clamp"))  # fmt: skip
    return slopes


def coefs(mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The coefs ``[3C]`` of statistics that were found elsewhere."""
    none, channels = _nothing(mean.device), mean.numel()
    made = torch.empty(3 * channels, dtype=torch.float32, device=mean.device)
    _run("coefs_kernel", (-(-channels // 256), 1, 1),
         (mean.contiguous(), invstd.contiguous(), made, _or(weight, none), _or(bias, none), channels),
         (256, weight is not None, bias is not None))  # fmt: skip
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
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    gate: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """The gradients of input, weight, bias and residual (where `gate` asks for it).

    Weight and bias are only given where their gradients are wanted.
    """
    shards = Shards([x], [dy], None if residual is None else [residual], activation, gate=gate, alone=True)
    slopes = torch.empty(2 * x.shape[1], dtype=torch.float32, device=x.device)
    _, dweight, dbias = shards.reduce(found, weight, bias, slopes)
    dx = shards.gradients(found, slopes)[0]
    gated = dy if shards.gated is None else shards.gated[0]
    return dx, None if dweight is None else dweight[0], None if dbias is None else dbias[0], gated
