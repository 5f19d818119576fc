"""How the passes over a shard are divided between the programs of a launch: pure functions of its shape.

The parts of a sum determine its bits, so nothing here may depend on anything else, such as the number of shards.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from torch import Tensor

__all__ = [
    "Geometry",
    "Tile",
    "Walk",
    "WholeLaunch",
    "geometry",
    "is_rows",
    "map_tile",
    "parts_of",
    "policies",
    "power",
    "sum_tile",
    "summing",
    "tile",
    "walk",
    "whole",
]


@dataclass(frozen=True)
class Tile:
    """How a pass walks over the data; see `kernels`.

    Attributes:
        positions: Positions in a tile.
        channels: Channels in a tile.
        num_warps: Warps of a program.
        unroll: Iterations whose loads are in flight at once.
        programs: How many programs a launch should have at most, as far as it can choose.
        together: How many programs a multiprocessor must hold at once, which limits their registers; 0 leaves it to
            the compiler.
    """

    positions: int
    channels: int
    num_warps: int
    unroll: int = 1
    programs: int = 1 << 31
    together: int = 0


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
        return not self.rows and self.channels > 1 and self.inner < 128 and self.channels * self.inner < 1 << 30

    @property
    def stride(self) -> int:
        """The distance between neighbouring planes, rows or flat samples."""
        if self.flat:
            return self.channels * self.inner
        return self.channels if self.rows else self.inner

    @property
    def align(self) -> int:
        """The power of two, as far as it matters, to which every plane or row is aligned."""
        return gcd(self.stride, 16)


def geometry(x: Tensor) -> Geometry:
    """The geometry of a dense tensor ``[N, C, ...]``."""
    channels = x.shape[1]
    inner = x.numel() // (x.shape[0] * channels)
    rows = is_rows(x)
    return Geometry(rows, channels, 1 if rows else inner, x.element_size())


def is_rows(x: Tensor) -> bool:
    """Whether a dense tensor is rows of channels."""
    return x.numel() == x.shape[0] * x.shape[1] or (x.shape[1] > 1 and not x.is_contiguous())


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def tile(shape: Geometry, size: int, channels: int, *rest: int) -> Tile:
    """A tile of `size` elements; of `channels` channels at most, for rows.

    Positions of planes are few enough that nearly all of them exist.
    """
    if shape.rows:
        channels = min(power(shape.channels), channels)
        return Tile(size // channels, channels, *rest)
    if shape.flat:
        return Tile(min(size, power(shape.stride)), 1, *rest)
    whole = gcd(shape.inner, min(size, 1024))
    if whole >= 64:
        return Tile(whole, min(size // whole, power(shape.channels)), *rest)
    lengths = [min(size >> n, power(shape.inner)) for n in range(4)]
    waste = [-(-shape.inner // length) * length / shape.inner for length in lengths]
    length = next(n for n, w in zip(lengths, waste, strict=True) if w <= max(1.07, min(waste)))
    return Tile(length, min(size // length, power(shape.channels)), *rest)


# The sizes that were fastest on an H200; elsewhere the orders of magnitude matter, not the last per cent.

_PROCESSORS = 132


def _vector(shape: Geometry) -> int:
    """Elements that a thread reads at once."""
    return 16 // shape.element_bytes


@lru_cache(maxsize=4096)
def sum_tile(shape: Geometry, inputs: int) -> Tile:
    """The tile of a pass in company that sums over one input (statistics) or two."""
    if shape.flat:
        return tile(shape, 512, 64, 2, 8, 6 * _PROCESSORS)
    together = 2 if shape.rows else 4
    unroll = 4 if shape.rows else 4 // inputs
    return tile(shape, 256 * _vector(shape), 64, 8, unroll, together * _PROCESSORS, together)


@lru_cache(maxsize=4096)
def map_tile(shape: Geometry) -> Tile:
    """The tile of a pass in company that maps element to element."""
    if shape.flat:
        return tile(shape, 1024, 64, 4, 1, 8 * _PROCESSORS)
    size = 256 * _vector(shape)
    if shape.rows:
        return tile(shape, size, 256, 4)
    # Not `tile`: long runs of one channel are best here, and positions that do not exist cost nothing.
    length = min(power(shape.inner), size)
    size *= 2 if 2 * shape.inner < size else 1
    return Tile(length, min(size // length, power(shape.channels)), 4)


def policies(read_bytes: int) -> tuple[str, str]:
    """How a pass that reads this many bytes for the second time treats the cache when it loads and stores.

    If the cache holds much of the data, what has been read again makes room for what has not, and so does what was
    written.
    """
    return ("evict_first", "evict_first") if read_bytes < 150_000_000 else ("", "")


class Walk(NamedTuple):
    """How one shard is divided between programs."""

    splits: int
    columns: int
    blocks: int

    @property
    def programs(self) -> int:
        """Programs of a launch."""
        return self.splits * self.columns * self.blocks


def _most_splits(shape: Geometry, tile: Tile) -> tuple[int, int, int]:
    columns = 1 if shape.rows else -(-shape.stride // tile.positions)
    blocks = 1 if shape.flat else -(-shape.channels // tile.channels)
    return max(1, tile.programs // (columns * blocks)), columns, blocks


@lru_cache(maxsize=65536)
def walk(shape: Geometry, outer: int, tile: Tile) -> Walk:
    """How a shard is divided: a function of its shape alone, since the parts of a sum determine its bits."""
    most, columns, blocks = _most_splits(shape, tile)
    iterations = -(-outer // tile.positions) if shape.rows else outer
    return Walk(min(iterations, most), columns, blocks)


def parts_of(shape: Geometry, walk: Walk) -> int:
    """Parts of a sum over one channel; those of flat samples are single positions."""
    return walk.splits * (shape.inner if shape.flat else walk.columns)


class WholeLaunch(NamedTuple):
    """How one launch goes through a whole direction of a layer that is alone; see `kernels.alone`.

    Attributes:
        tile: The tile of both passes.
        span: How many of its positions are used.
        walk: How the shard is divided.
        meetings: How often the programs meet.
        parts: Parts of a sum over one channel.
        merging: How many parts and channels a program merges at once.
        policies: How the second pass treats the cache when it loads and stores.
    """

    tile: Tile
    span: int
    walk: Walk
    meetings: int
    parts: int
    merging: tuple[int, int]
    policies: tuple[str, str] = ("", "")

    def often(self, channels: int) -> "WholeLaunch":
        """The same with two meetings, for a device without room for all programs at once."""
        return self._replace(meetings=2, merging=_merging(self.parts, channels))


def _merging(parts: int, channels: int) -> tuple[int, int]:
    parts = min(power(parts), 1024)
    return parts, max(1, min(power(channels) // 128, 2048 // parts))


@lru_cache(maxsize=4096)
def whole(shape: Geometry, outer: int, inputs: int) -> WholeLaunch:
    """How to go through a shard in one launch that sums over one input (forward) or two (backward)."""
    found = _own(shape, inputs) or (_rows(shape, outer, inputs) if shape.rows else _planes(shape, outer, inputs))
    num_bytes = shape.stride * (1 if shape.rows or shape.flat else shape.channels) * outer * shape.element_bytes
    return found._replace(policies=policies(inputs * num_bytes))


def _planes(shape: Geometry, outer: int, inputs: int) -> WholeLaunch:
    together = 4
    t = tile(shape, 256 * _vector(shape), 1, 8, 4 // inputs, together * _PROCESSORS, together)
    w = _rounds(walk(shape, outer, t), outer, t.programs)
    if shape.flat:  # parts must not become as large as the data
        w = w._replace(splits=max(1, min(w.splits, outer // 32)))
    parts = parts_of(shape, w)
    return WholeLaunch(t, t.positions, w, 2, parts, _merging(parts, shape.channels))


def _rows(shape: Geometry, outer: int, inputs: int) -> WholeLaunch:
    wide = shape.element_bytes == 4 and inputs == 2
    channels = 32 if wide and shape.channels >= 1024 else 64
    together, unroll = (1, 8) if wide or shape.channels >= 32 * channels else (2, 4)
    t = tile(shape, 256 * _vector(shape), channels, 8, unroll, together * _PROCESSORS, together)
    w = _rounds(walk(shape, outer, t), -(-outer // t.positions), t.programs)
    parts = parts_of(shape, w)
    if parts <= 4 and w.programs <= t.programs:
        return WholeLaunch(t, t.positions, w, 1, parts, (power(parts), t.channels))
    return WholeLaunch(t, t.positions, w, 2, parts, _merging(parts, shape.channels))


def _rounds(walk: Walk, iterations: int, programs: int) -> Walk:
    """Divide a walk of more programs than there is room for so that their last round is nearly full."""
    if walk.programs <= programs:
        return walk
    choices = [walk._replace(splits=n) for n in range(1, min(iterations, 4) + 1)]
    return max(choices, key=lambda w: w.programs / (-(-w.programs // programs) * programs))


def _own(shape: Geometry, inputs: int) -> WholeLaunch | None:
    """The same if a program can have some channels to itself; None if that would leave processors idle."""
    if shape.rows or shape.inner > 1024:
        return None
    channels = 1 << max(0, (shape.channels // _PROCESSORS).bit_length() - (1 if shape.flat else 0))
    blocks = -(-shape.channels // channels)
    if blocks < 0.9 * -(-blocks // _PROCESSORS) * _PROCESSORS:
        return None
    if shape.flat:
        span = channels * shape.inner
        t = Tile(power(span), 1, max(1, min(16, power(span) // 128)), 16 // inputs)
        return WholeLaunch(t, span, Walk(1, blocks, 1), 0, shape.inner, (power(shape.inner), channels))
    length = power(shape.inner)
    warps = max(1, min(16, length * channels // (32 * _vector(shape))))
    t = Tile(length, channels, warps, 8 if length * channels <= 32 * warps * _vector(shape) else 4 // inputs)
    return WholeLaunch(t, length, Walk(1, 1, blocks), 0, 1, (1, channels))


@lru_cache(maxsize=4096)
def summing(shape: Geometry, tile: Tile) -> tuple[int, int]:
    """How many parts and channels a program adds up at once in company: the same for shards of any size."""
    most, columns, _ = _most_splits(shape, tile)
    parts = min(power(most * (shape.inner if shape.flat else columns)), 1024)
    return parts, max(1, min(power(shape.channels), 1024 // parts))
