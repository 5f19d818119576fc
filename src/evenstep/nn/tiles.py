"""How the passes over a shard are divided between the programs of a launch: pure functions of its shape.

The parts of a sum decide about its bits, so nothing here may look at anything else, such as how many shards there are.
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
    "geometry",
    "is_rows",
    "map_tile",
    "power",
    "sum_tile",
    "summing",
    "tile",
    "walk",
]


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
        return not self.rows and self.channels > 1 and self.inner < 128 and self.channels * self.inner < 1 << 30

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
    rows = is_rows(x)
    return Geometry(rows, channels, 1 if rows else inner, x.element_size())


def is_rows(x: Tensor) -> bool:
    """Whether a dense tensor is rows of channels."""
    return x.numel() == x.shape[0] * x.shape[1] or (x.shape[1] > 1 and not x.is_contiguous())


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def tile(shape: Geometry, size: int, channels: int, *rest: int, snug: bool = False) -> Tile:
    """A tile of `size` elements; of `channels` channels at most, for rows.

    The positions of a `snug` one are few enough that nearly all of them exist: for passes that the arithmetic holds up.
    """
    if shape.rows:
        channels = min(power(shape.channels), channels)
        return Tile(size // channels, channels, *rest)
    if shape.flat:
        return Tile(min(size, power(shape.stride)), 1, *rest)
    lengths = [min(size >> n, power(shape.inner)) for n in range(4 if snug else 1)]
    waste = [-(-shape.inner // length) * length / shape.inner for length in lengths]
    length = next(n for n, w in zip(lengths, waste, strict=True) if w <= max(1.07, min(waste)))
    return Tile(length, min(size // length, power(shape.channels)), *rest)


# The sizes that were fastest on an H200; the orders of magnitude, and not the last per cent, matter elsewhere.


@lru_cache(maxsize=4096)
def sum_tile(shape: Geometry, inputs: int) -> Tile:
    """The tile of a pass that sums over one input (statistics) or two."""
    if shape.flat:
        return tile(shape, 512, 64, 2, 4, 1, 792)
    if inputs == 2:
        return tile(shape, 2048, 64, 4, 1, 4, 528, snug=True)
    if shape.element_bytes == 2:
        return tile(shape, 2048, 64, 4, 1, 4, 792, snug=True)
    if shape.rows:
        return tile(shape, 1024, 64, 4, 1, 4, 528)
    return tile(shape, 2048, 64, 4, 1, 4, 792) if shape.inner >= 1024 else tile(shape, 1024, 64, 4, 4, 1, 1056)


@lru_cache(maxsize=4096)
def map_tile(shape: Geometry) -> Tile:
    """The tile of a pass that maps element to element."""
    if shape.flat:
        return tile(shape, 1024, 256, 4, 1, 1, 1056)
    size = 4096 // shape.element_bytes  # 4 KiB
    small = not shape.rows and shape.inner < (1024 if shape.element_bytes == 2 else 512)
    return tile(shape, 2 * size if small else size, 256, 4)


class Walk(NamedTuple):
    """How one shard is divided between programs."""

    splits: int
    columns: int
    blocks: int

    @property
    def parts(self) -> int:
        """Parts of a sum over one channel."""
        return self.splits * self.columns

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
    """A function of the shard's shape alone: the parts of a sum decide about its bits."""
    most, columns, blocks = _most_splits(shape, tile)
    iterations = -(-outer // tile.positions) if shape.rows else outer
    return Walk(min(iterations, most), columns, blocks)


@lru_cache(maxsize=4096)
def summing(shape: Geometry, tile: Tile) -> tuple[int, int]:
    """How many parts and channels a program adds up at once: the same for shards of any size."""
    most, columns, _ = _most_splits(shape, tile)
    parts = min(power(most * (shape.inner if shape.flat else columns)), 1024)
    return parts, max(1, min(power(shape.channels), 1024 // parts))
