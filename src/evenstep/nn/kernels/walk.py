"""How kernels walk over the data of a shard, where they leave parts of a sum, and how they meet; see the package."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIELDS = tl.constexpr(8)
"""Integers in a row of a table."""

_SIZES = ["outer", "splits", "total", "columns", "channels", "units", "max_parts", "num_rows", "eps", "momentum"]
_FOREIGN = ["weight", "bias", "running_mean", "running_var", "tracked", "vectors"]


def kernel(function):
    """A kernel whose code depends on the types of its arguments, and not on their values as well."""
    names = function.__code__.co_varnames
    return triton.jit(
        do_not_specialize=[name for name in _SIZES if name in names],
        do_not_specialize_on_alignment=[name for name in _FOREIGN if name in names],
    )(function)


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for the launch before this one, and let the next one come to this point while this one still runs.

    With EARLY a launch may begin before the one before it has ended, which hides what it costs to begin.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def address(table, field: tl.constexpr, TYPE: tl.constexpr):
    """A tensor of this program's shard; the launcher makes sure that it begins at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + field).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def meet(counter, programs):
    """Wait for all programs of a launch, all of which run at once; what each wrote before, all read afterwards.

    ``counter`` counts arrivals forever, so nobody has to reset it; it belongs to consecutive launches with the same
    number of programs. The order of arrival changes no result.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    everyone = (ticket // programs + 1) * programs
    while tl.atomic_add(counter, 0, sem="acquire") < everyone:
        pass
    tl.debug_barrier()


@triton.jit
def tile(
    pid,
    channels,
    units,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Which tile a program walks with.

    ``units * ALIGN`` is the inner size of planes, the number of channels of rows, or the size of a flat sample: said
    so, the compiler knows how far it may read at once. Flat samples are planes of one channel here. Of the BA positions
    of a column, SPAN are used.

    Returns:
        The number of the part along the walk, of the part of the sum, the channels, whether each is one, the offset of
        the first tile, the step to the next, the offsets inside a tile, and the positions that exist.
    """
    positions = tl.arange(0, BA)[:, None]
    if ROWS:
        width = units * ALIGN
        blocks = tl.cdiv(width, BC)
        split = pid // blocks
        part = split
        first = (pid % blocks) * BC
        c = first + tl.arange(0, BC)
        exists = c < width
        base = tl.cast(first, tl.int64)
        step = tl.cast(width, tl.int64) * BA
        offsets = positions * width + tl.arange(0, BC)[None, :]
        here = exists[None, :] & (positions >= 0)
    else:
        inner = units * ALIGN
        columns = tl.cdiv(inner, SPAN)
        column = pid % columns
        blocks = tl.cdiv(channels, BC)
        split = pid // (columns * blocks)
        part = split * columns + column
        first = ((pid // columns) % blocks) * BC
        c = first + tl.arange(0, BC)
        exists = c < channels
        base = tl.cast(first, tl.int64) * inner + column * SPAN
        step = tl.cast(inner, tl.int64) * channels
        offsets = positions + tl.arange(0, BC)[None, :] * inner
        here = exists[None, :] & (positions < tl.minimum(inner - column * SPAN, SPAN))
    return split, part, c, exists, base, step, offsets, here


@triton.jit
def there(i, outer, here, ROWS: tl.constexpr, BA: tl.constexpr):
    """Which positions of iteration i exist."""
    if ROWS:
        return here & (tl.arange(0, BA)[:, None] < outer - i * BA)
    else:  # noqa: RET505  # Triton compiles what follows a return too
        return here & (tl.zeros((1, 1), tl.int64) + i < outer)


@triton.jit
def load(
    x,
    i,
    splits,
    base,
    step,
    offsets,
    outer,
    here,
    ROWS: tl.constexpr,
    BA: tl.constexpr,
    U: tl.constexpr,
    LAST: tl.constexpr,
    POLICY: tl.constexpr,
):
    """The tiles of U iterations from i on; all are asked for before the first is used. Not all of the LAST exist."""
    tiles = ()
    for u in tl.static_range(U):
        mask = here
        if LAST:
            mask = there(i + u * splits, outer, here, ROWS, BA)
        start = base + (i + u * splits) * step
        tiles = tiles + (tl.load(x + start + offsets, mask=mask, other=0.0, eviction_policy=POLICY),)  # noqa: RUF005
    return tiles


@triton.jit
def places(
    channels, units, ROWS: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr
):
    """How many places a walk over a shard has, columns times blocks of channels."""
    if FLAT:
        return tl.cdiv(units * ALIGN, BA)
    blocks = tl.cdiv(channels, BC)
    if ROWS:
        return blocks
    return blocks * tl.cdiv(units * ALIGN, BA)


@triton.jit
def spread(c, exists, base, here, channels, units, FLAT: tl.constexpr, ALIGN: tl.constexpr, BA: tl.constexpr):
    """The channels of the tile's positions, in a shape that fits the tile: one row, or for flat samples one column."""
    if FLAT:
        inner = units * ALIGN // channels
        return (base.to(tl.int32) + tl.arange(0, BA)[:, None]) // inner, here
    else:  # noqa: RET505  # Triton compiles what follows a return too
        return c[None, :], exists[None, :]


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def double(bits):
    """A float64 that came as the integer with its bits, because a number given to a kernel is cut to float32."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def part_counts(
    p, outer, splits, units, ROWS: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, BA: tl.constexpr, channels
):
    """How many elements of a channel each part of a sum has; 0 beyond the last."""
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        walked = tl.where(p < splits, (tiles - p + splits - 1) // splits, 0)
        missing = tl.where(p == (tiles - 1) % splits, tl.cast(tiles, tl.int64) * BA - outer, 0)
        return walked.to(tl.int64) * BA - missing
    inner = units * ALIGN
    if FLAT:
        split = p // (inner // channels)
        return tl.where(split < splits, (outer - split + splits - 1) // splits, 0).to(tl.int64)
    columns = tl.cdiv(inner, BA)
    split = p // columns
    walked = tl.where(split < splits, (outer - split + splits - 1) // splits, 0)
    return walked.to(tl.int64) * tl.minimum(inner - (p % columns) * BA, BA)


@triton.jit
def part_offsets(p, c, channels, units, FLAT: tl.constexpr, ALIGN: tl.constexpr):
    """Where the parts p of channels c are in the partials of a shard, and how far from there their second values."""
    if FLAT:
        width = units * ALIGN
        inner = width // channels
        offsets = (p // inner)[:, None] * tl.cast(2 * width, tl.int64) + (p % inner)[:, None] + c[None, :] * inner
        return offsets, width
    return p[:, None] * tl.cast(2 * channels, tl.int64) + c[None, :], channels


@triton.jit
def halves(t, HALF: tl.constexpr, BF: tl.constexpr):
    """Left and right neighbours of ``[2 HALF, BF]``: so a tree has the order of shards, and not the compiler's."""
    return tl.split(tl.permute(tl.reshape(t, (HALF, 2, BF)), (0, 2, 1)))
