"""The passes of batch norm as Triton kernels. `gpu` launches them; nobody else imports this module, which needs Triton.

All passes walk the data in the same way. A tile is ``[BA, BC]``: BA positions of BC channels.

- *Planes*, ``[N, C, inner]`` contiguous: a tile lies in one sample, its positions are a column of BA inner positions. A
  program walks over samples.
- *Rows*, ``[M, C]`` (channels-last): a tile is BA rows. A program walks over such blocks of rows.
- *Flat* planes, too small for that: a whole sample is one plane, and its positions know their channels.

So every program has *iterations* with one tile each; of a position's channels and of all but the last rows it is known
beforehand whether they exist. The ``splits`` programs of one place take iterations in turn, so that a launch goes
through memory from one end to the other; a pass that reads again what the pass before it read does so in reverse order,
because what was read last is still in the cache.

Sums are made without atomics: a program leaves its part of a sum in ``partials``, and a small kernel adds the parts in
a fixed order. What the bits depend on is the geometry (the shape and layout of a shard) and nothing else: in particular
not on how many shards one launch computes. With JOINT the second axis of the grid counts shards and everything that
differs between them is read from ``table``, one row of FIELDS integers for each: outer size, splits of a pass that sums
and of one that maps, and the addresses of up to five tensors: input, output or its gradient, residual, gated gradient,
gradient of the input.

Elements are float32 inside a position, vectors per channel are float64: ``vectors`` holds mean, M2 and inverse
standard deviation, ``[C]`` each, and the count. ``coefs`` are what the elements need of them, in float32: centre, scale
and offset, so that the output is fma(x - centre, scale, offset). What the forward computes and the backward computes
again is written with ``fma``, so that the two agree on every sign.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIELDS = tl.constexpr(8)
"""Integers in a row of a table."""

_SIZES = ["outer", "splits", "channels", "units", "max_parts", "num_rows", "width", "eps", "momentum"]
_FOREIGN = ["weight", "bias", "running_mean", "running_var", "tracked", "vectors"]


def _kernel(function):
    """A kernel whose code depends on the types of its arguments, and not on their values as well."""
    names = function.__code__.co_varnames
    return triton.jit(
        do_not_specialize=[name for name in _SIZES if name in names],
        do_not_specialize_on_alignment=[name for name in _FOREIGN if name in names],
    )(function)


@triton.jit
def _follow(EARLY: tl.constexpr):
    """Wait for the launch before this one, and let the next one come to this point while this one still runs.

    With EARLY a launch may begin before the one before it has ended, which hides what it costs to begin.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _address(table, field: tl.constexpr, TYPE: tl.constexpr):
    """A tensor of this program's shard; the launcher sees to it that it begins at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + field).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _tile(pid, channels, units, ROWS: tl.constexpr, ALIGN: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr):
    """Which tile a program walks with.

    ``units * ALIGN`` is the inner size of planes, the number of channels of rows, or the size of a flat sample: said
    so, the compiler knows how far it may read at once. Flat samples are planes of one channel here.

    Returns:
        The number of the part along the walk, of the part of the sum, the channels, whether each is one, the offset of
        the first tile, the step to the next, the offsets inside of a tile, and the positions that exist.
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
        base = first.to(tl.int64)
        step = tl.cast(width, tl.int64) * BA
        offsets = positions * width + tl.arange(0, BC)[None, :]
        here = exists[None, :] & (positions >= 0)
    else:
        inner = units * ALIGN
        columns = tl.cdiv(inner, BA)
        column = pid % columns
        blocks = tl.cdiv(channels, BC)
        split = pid // (columns * blocks)
        part = split * columns + column
        first = ((pid // columns) % blocks) * BC
        c = first + tl.arange(0, BC)
        exists = c < channels
        base = tl.cast(first, tl.int64) * inner + column * BA
        step = tl.cast(inner, tl.int64) * channels
        offsets = positions + tl.arange(0, BC)[None, :] * inner
        here = exists[None, :] & (positions < inner - column * BA)
    return split, part, c, exists, base, step, offsets, here


@triton.jit
def _spread(c, exists, base, here, channels, units, FLAT: tl.constexpr, ALIGN: tl.constexpr, BA: tl.constexpr):
    """The channels of the tile's positions, in a shape that fits the tile: one row, or for flat samples one column."""
    if FLAT:
        inner = units * ALIGN // channels
        return (base.to(tl.int32) + tl.arange(0, BA)[:, None]) // inner, here
    else:  # noqa: RET505  # Triton compiles what follows a return too
        return c[None, :], exists[None, :]


@triton.jit
def _welford(x, shift, mean, m2, count):
    deviation = x - shift
    delta = deviation - mean
    mean = tl.fma(delta, 1.0 / count, mean)
    return mean, tl.fma(delta, deviation - mean, m2)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@_kernel
def statistics_kernel(
    x,
    table,
    partials,
    outer,
    splits,
    channels,
    units,
    max_parts,
    TYPE: tl.constexpr,
    JOINT: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Mean and M2 of the elements that a program walks over, to ``partials[shard, part, 2, channels]``.

    A position counts its deviations from its first element, so a large mean costs nothing. With FLAT every position is
    a part of its own: ``partials[shard, split, 2, :]``.
    """
    _follow(EARLY)
    shard = tl.program_id(1)
    if JOINT:
        table += shard * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 1)
        x = _address(table, 3, TYPE)
    split, part, c, exists, base, step, offsets, here = _tile(
        tl.program_id(0), 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC
    )
    if split >= splits:
        return
    full = outer
    first = here
    if ROWS:
        full = outer // BA
        channels = units * ALIGN
        first = here & (split * BA + tl.arange(0, BA)[:, None] < outer)
    x += base + split * step
    stride = splits * step
    shift = tl.load(x + offsets, mask=first, other=0.0).to(tl.float32)
    if not FLAT:  # the first element of each channel
        if ROWS:
            reference = tl.load(x + tl.arange(0, BC), mask=exists, other=0.0).to(tl.float64)
        else:
            reference = tl.load(x + tl.arange(0, BC) * (units * ALIGN), mask=exists, other=0.0).to(tl.float64)
    mean = tl.zeros((BA, BC), tl.float32)
    m2 = tl.zeros((BA, BC), tl.float32)
    count = 1.0
    walked = tl.maximum((full - split + splits - 1) // splits, 1).to(tl.int32) - 1
    for _ in tl.range(0, walked // UNROLL, num_stages=STAGES):
        for _u in tl.static_range(UNROLL):
            x += stride
            count += 1.0
            value = tl.load(x + offsets, mask=here, other=0.0).to(tl.float32)
            mean, m2 = _welford(value, shift, mean, m2, count)
    for _ in range(walked % UNROLL):
        x += stride
        count += 1.0
        value = tl.load(x + offsets, mask=here, other=0.0).to(tl.float32)
        mean, m2 = _welford(value, shift, mean, m2, count)
    weight = tl.where(first, count, 0.0)
    if ROWS:  # the last rows may be fewer than a tile
        if (outer % BA > 0) & (full % splits == split) & (full > split):
            last = here & (full * BA + tl.arange(0, BA)[:, None] < outer)
            value = tl.load(x + stride + offsets, mask=last, other=0.0).to(tl.float32)
            new_mean, new_m2 = _welford(value, shift, mean, m2, count + 1.0)
            mean = tl.where(last, new_mean, mean)
            m2 = tl.where(last, new_m2, m2)
            weight = tl.where(last, count + 1.0, weight)
    at = shift.to(tl.float64) + mean.to(tl.float64)
    if FLAT:
        width = units * ALIGN
        partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels + split * tl.cast(2 * width, tl.int64) + base
        tl.store(partials + offsets, at, mask=here)
        tl.store(partials + width + offsets, m2.to(tl.float64), mask=here)
    else:
        # Around an element of the data, so that subtracting squares costs nothing in float64.
        at -= reference[None, :]
        moment = weight.to(tl.float64) * at
        moment, squares = tl.reduce((moment, m2.to(tl.float64) + moment * at), 0, _add_pairs)
        total = tl.cast(_part_counts(part, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels), tl.float64)
        mean_c = moment / total
        partials += (shard * tl.cast(max_parts, tl.int64) + part) * 2 * channels
        tl.store(partials + c, reference + mean_c, mask=exists)
        tl.store(partials + channels + c, tl.maximum(squares - moment * mean_c, 0.0), mask=exists)


@triton.jit
def _double(bits):
    """A float64 that came as the integer with its bits, because a number given to a kernel is cut to float32."""
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _finish(
    c,
    exists,
    count,
    mean,
    m2,
    vectors,
    coefs,
    weight,
    bias,
    running_mean,
    running_var,
    tracked,
    channels,
    eps,
    momentum,
    CLAMP: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
    TRACKED: tl.constexpr,
):
    """What follows from the global statistics: vectors, coefs and the running statistics.

    ``eps`` and ``momentum`` come as `_double` wants them. A ``momentum`` below 0 averages over all batches, and
    ``tracked`` then counts this one already.
    """
    eps = _double(eps)
    momentum = _double(momentum)
    count = tl.cast(count, tl.float64)
    variance = m2 / count
    if CLAMP:
        variance = tl.where(variance < eps, eps, variance)
    else:
        variance += eps
    invstd = 1.0 / tl.sqrt(variance)
    tl.store(vectors + c, mean, mask=exists)
    tl.store(vectors + channels + c, m2, mask=exists)
    tl.store(vectors + 2 * channels + c, invstd, mask=exists)
    _store_coefs(c, exists, mean, invstd, coefs, weight, bias, channels, WEIGHT, BIAS)
    factor = momentum
    if TRACKED:
        if momentum < 0:
            factor = 1.0 / tl.load(tracked).to(tl.float64)
        elif tl.program_id(0) == 0:  # nobody else reads it
            tl.store(tracked, tl.load(tracked) + 1)
    if tl.program_id(0) == 0:
        tl.store(vectors + 3 * channels, count)
    if MEAN:
        old = tl.load(running_mean + c, mask=exists, other=0.0).to(tl.float64)
        tl.store(running_mean + c, old + (mean - old) * factor, mask=exists)
    if VAR:
        old = tl.load(running_var + c, mask=exists, other=0.0).to(tl.float64)
        tl.store(running_var + c, old + (m2 / (count - 1.0) - old) * factor, mask=exists)


@triton.jit
def _store_coefs(c, exists, mean, invstd, coefs, weight, bias, channels, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    scale = invstd
    if WEIGHT:
        scale *= tl.load(weight + c, mask=exists, other=0.0).to(tl.float64)
    centre = mean.to(tl.float32)
    offset = (centre.to(tl.float64) - mean) * scale  # what float32 does not hold of the mean
    if BIAS:
        offset += tl.load(bias + c, mask=exists, other=0.0).to(tl.float64)
    tl.store(coefs + c, centre, mask=exists)
    tl.store(coefs + channels + c, scale.to(tl.float32), mask=exists)
    tl.store(coefs + 2 * channels + c, offset.to(tl.float32), mask=exists)


@_kernel
def coefs_kernel(
    mean,
    invstd,
    coefs,
    weight,
    bias,
    channels,
    BF: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Coefs from vectors that somebody else made."""
    _follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    m = tl.load(mean + c, mask=exists, other=0.0)
    s = tl.load(invstd + c, mask=exists, other=0.0)
    _store_coefs(c, exists, m, s, coefs, weight, bias, channels, WEIGHT, BIAS)


@triton.jit
def _part_counts(
    p, outer, splits, units, ROWS: tl.constexpr, FLAT: tl.constexpr, ALIGN: tl.constexpr, BA: tl.constexpr, channels
):
    """How many elements of a channel the parts of a sum have; 0 beyond the last."""
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
def _part_offsets(p, c, channels, units, FLAT: tl.constexpr, ALIGN: tl.constexpr):
    """Where the parts p of channels c are in the partials of a shard, and how far from there their second values."""
    if FLAT:
        width = units * ALIGN
        inner = width // channels
        offsets = (p // inner)[:, None] * tl.cast(2 * width, tl.int64) + (p % inner)[:, None] + c[None, :] * inner
        return offsets, width
    return p[:, None] * tl.cast(2 * channels, tl.int64) + c[None, :], channels


@_kernel
def merge_statistics_kernel(
    partials,
    table,
    rows,
    vectors,
    coefs,
    weight,
    bias,
    running_mean,
    running_var,
    tracked,
    outer,
    splits,
    channels,
    units,
    max_parts,
    eps,
    momentum,
    JOINT: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
    TRACKED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the parts of each shard: to ``rows[shard, 1 + 2 channels]``, or for a layer that is alone to `_finish`."""
    _follow(EARLY)
    shard = tl.program_id(1)
    if JOINT:
        table += shard * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 1)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels
    size = tl.cast(outer, tl.float64)
    if FLAT:
        size *= units * ALIGN // channels
    elif not ROWS:
        size *= units * ALIGN
    mean = tl.zeros((BF,), tl.float64)
    for p0 in range(0, max_parts, BP):
        p = p0 + tl.arange(0, BP)
        share = _part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels).to(tl.float64)[:, None]
        there = (share > 0) & exists[None, :]
        offsets, _second = _part_offsets(p, c, channels, units, FLAT, ALIGN)
        means = tl.load(partials + offsets, mask=there, other=0.0)
        mean += tl.sum(means * (share / size), axis=0)
    m2 = tl.zeros((BF,), tl.float64)
    for p0 in range(0, max_parts, BP):
        p = p0 + tl.arange(0, BP)
        share = _part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels).to(tl.float64)[:, None]
        there = (share > 0) & exists[None, :]
        offsets, second = _part_offsets(p, c, channels, units, FLAT, ALIGN)
        away = tl.load(partials + offsets, mask=there, other=0.0) - mean[None, :]
        squares = tl.load(partials + second + offsets, mask=there, other=0.0)
        m2 += tl.sum(tl.where(there, squares + share * away * away, 0.0), axis=0)
    if JOINT:
        rows += shard * (1 + 2 * channels)
        if tl.program_id(0) == 0:
            tl.store(rows, size)
        tl.store(rows + 1 + c, mean, mask=exists)
        tl.store(rows + 1 + channels + c, m2, mask=exists)
    else:
        _finish(c, exists, size, mean, m2, vectors, coefs, weight, bias, running_mean, running_var, tracked, channels,
                eps, momentum, False, WEIGHT, BIAS, MEAN, VAR, TRACKED)  # fmt: skip


@triton.jit
def _halves(t, HALF: tl.constexpr, BF: tl.constexpr):
    """Left and right neighbours of ``[2 HALF, BF]``: so a tree has the order of shards, and not the compiler's."""
    return tl.split(tl.permute(tl.reshape(t, (HALF, 2, BF)), (0, 2, 1)))


@_kernel
def finish_statistics_kernel(
    rows,
    vectors,
    coefs,
    weight,
    bias,
    running_mean,
    running_var,
    tracked,
    num_rows,
    channels,
    eps,
    momentum,
    LEVELS: tl.constexpr,
    BF: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
    TRACKED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge ``rows[num_rows, 1 + 2 channels]`` of all shards in the fixed tree, and `_finish`."""
    _follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    k = tl.arange(0, 1 << LEVELS)[:, None]
    there = (k < num_rows) & exists[None, :]
    at = rows + k * (1 + 2 * channels)
    count = tl.load(at + tl.zeros((1, BF), tl.int32), mask=(k < num_rows) & (c[None, :] >= 0), other=0.0)
    mean = tl.load(at + 1 + c[None, :], mask=there, other=0.0)
    m2 = tl.load(at + 1 + channels + c[None, :], mask=there, other=0.0)
    for level in tl.static_range(LEVELS):
        count_a, count_b = _halves(count, 1 << (LEVELS - 1 - level), BF)
        mean_a, mean_b = _halves(mean, 1 << (LEVELS - 1 - level), BF)
        m2_a, m2_b = _halves(m2, 1 << (LEVELS - 1 - level), BF)
        count = count_a + count_b
        share = count_b / tl.where(count == 0.0, 1.0, count)
        delta = mean_b - mean_a
        both = (count_a > 0.0) & (count_b > 0.0)
        one_mean = tl.where(count_a > 0.0, mean_a, mean_b)
        one_m2 = tl.where(count_a > 0.0, m2_a, m2_b)
        mean = tl.where(both, mean_a + delta * share, one_mean)
        m2 = tl.where(both, m2_a + (m2_b + delta * delta * (count_a * share)), one_m2)
    total = tl.max(tl.reshape(count, (BF,)), axis=0)  # all alike
    _finish(c, exists, total, tl.reshape(mean, (BF,)), tl.reshape(m2, (BF,)), vectors, coefs, weight, bias,
            running_mean, running_var, tracked, channels, eps, momentum, CLAMP, WEIGHT, BIAS, MEAN, VAR,
            TRACKED)  # fmt: skip


@_kernel
def normalize_kernel(
    x,
    residual,
    y,
    table,
    coefs,
    outer,
    splits,
    channels,
    units,
    TYPE: tl.constexpr,
    JOINT: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The output: normalized, with the residual added, and activated."""
    _follow(EARLY)
    if JOINT:
        table += tl.program_id(1) * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 2)
        x = _address(table, 3, TYPE)
        y = _address(table, 4, TYPE)
        residual = _address(table, 5, TYPE)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    split, _part, c, exists, base, step, offsets, here = _tile(pid, 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC)
    tiles = outer
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        channels = units * ALIGN
    c, exists = _spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
    centre = tl.load(coefs + c, mask=exists, other=0.0)
    scale = tl.load(coefs + channels + c, mask=exists, other=0.0)
    offset = tl.load(coefs + 2 * channels + c, mask=exists, other=0.0)
    walked = tl.where(split < splits, (tiles - split + splits - 1) // splits, 0).to(tl.int32)
    for back in range(walked):
        i = split + (walked - 1 - back) * tl.cast(splits, tl.int64)
        mask = here
        if ROWS:
            mask = here & (i * BA + tl.arange(0, BA)[:, None] < outer)
        start = base + i * step
        value = tl.load(x + start + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        z = tl.fma(value - centre, scale, offset)
        if RESIDUAL:
            z += tl.load(residual + start + offsets, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            z = tl.where(z <= 0.0, 0.0, z)  # a NaN stays one
        tl.store(y + start + offsets, z.to(TYPE), mask=mask)


@triton.jit
def _gradient_step(dy, x, residual, gated, start, offsets, mask, centre, scale, offset, sum_dy, sum_dy_x,
                   TYPE: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """One iteration of `reduce_kernel`."""
    value = tl.load(x + start + offsets, mask=mask, other=0.0).to(tl.float32) - centre
    gradient = tl.load(dy + start + offsets, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        z = tl.fma(value, scale, offset)
        if RESIDUAL:
            z += tl.load(residual + start + offsets, mask=mask, other=0.0).to(tl.float32)
        gradient = tl.where(z <= 0.0, 0.0, gradient)
        if GATED:
            tl.store(gated + start + offsets, gradient.to(TYPE), mask=mask)
    return sum_dy + gradient, tl.fma(gradient, value, sum_dy_x)


@_kernel
def reduce_kernel(
    dy,
    x,
    residual,
    gated,
    table,
    partials,
    coefs,
    outer,
    splits,
    channels,
    units,
    max_parts,
    TYPE: tl.constexpr,
    JOINT: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Parts of sum(dy) and sum(dy (x - centre)), to ``partials[shard, part, 2, channels]``.

    With RELU, dy counts only where the output was not 0, which is found out again from x (and the residual). With
    GATED that dy is also written: it is the gradient of the residual, and what `input_kernel` wants to read.
    """
    _follow(EARLY)
    shard = tl.program_id(1)
    if JOINT:
        table += shard * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 1)
        x = _address(table, 3, TYPE)
        dy = _address(table, 4, TYPE)
        residual = _address(table, 5, TYPE)
        gated = _address(table, 6, TYPE)
    split, part, c, exists, base, step, offsets, here = _tile(
        tl.program_id(0), 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC
    )
    if split >= splits:
        return
    full = outer
    if ROWS:
        full = outer // BA
        channels = units * ALIGN
    c, exists = _spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
    centre = tl.load(coefs + c, mask=exists, other=0.0)
    scale = tl.load(coefs + channels + c, mask=exists, other=0.0)
    offset = tl.load(coefs + 2 * channels + c, mask=exists, other=0.0)
    sum_dy = tl.zeros((BA, BC), tl.float32)
    sum_dy_x = tl.zeros((BA, BC), tl.float32)
    start = base + split * step
    stride = splits * step
    walked = tl.maximum((full - split + splits - 1) // splits, 0).to(tl.int32)
    for _ in tl.range(0, walked // UNROLL, num_stages=STAGES):
        for _u in tl.static_range(UNROLL):
            sum_dy, sum_dy_x = _gradient_step(dy, x, residual, gated, start, offsets, here, centre, scale, offset,
                                              sum_dy, sum_dy_x, TYPE, RESIDUAL, RELU, GATED)  # fmt: skip
            start += stride
    for _ in range(walked % UNROLL):
        sum_dy, sum_dy_x = _gradient_step(dy, x, residual, gated, start, offsets, here, centre, scale, offset,
                                          sum_dy, sum_dy_x, TYPE, RESIDUAL, RELU, GATED)  # fmt: skip
        start += stride
    if ROWS:  # the last rows may be fewer than a tile
        if (outer % BA > 0) & (full % splits == split):
            last = here & (full * BA + tl.arange(0, BA)[:, None] < outer)
            sum_dy, sum_dy_x = _gradient_step(dy, x, residual, gated, start, offsets, last, centre, scale, offset,
                                              sum_dy, sum_dy_x, TYPE, RESIDUAL, RELU, GATED)  # fmt: skip
    if FLAT:
        width = units * ALIGN
        partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels + split * tl.cast(2 * width, tl.int64) + base
        tl.store(partials + offsets, sum_dy.to(tl.float64), mask=here)
        tl.store(partials + width + offsets, sum_dy_x.to(tl.float64), mask=here)
    else:
        plain, weighted = tl.reduce((sum_dy.to(tl.float64), sum_dy_x.to(tl.float64)), 0, _add_pairs)
        partials += (shard * tl.cast(max_parts, tl.int64) + part) * 2 * channels
        c = tl.reshape(c, (BC,))
        exists = tl.reshape(exists, (BC,))
        tl.store(partials + c, plain, mask=exists)
        tl.store(partials + channels + c, weighted, mask=exists)


@triton.jit
def _finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, eps, CLAMP: tl.constexpr):
    """What the elements need of the sums over all shards: ``slopes``, in float32, factor of x - centre and constant.

    The gradient of the input is (dy - mean of dy - (x - mean) invstd^2 mean of dy (x - mean)) invstd weight.
    """
    count = tl.load(vectors + 3 * channels)
    mean = tl.load(vectors + c, mask=exists, other=0.0)
    invstd = tl.load(vectors + 2 * channels + c, mask=exists, other=0.0)
    centre = tl.load(coefs + c, mask=exists, other=0.0).to(tl.float64)
    scale = tl.load(coefs + channels + c, mask=exists, other=0.0).to(tl.float64)
    if CLAMP:  # no gradient flows through a variance that was raised
        m2 = tl.load(vectors + channels + c, mask=exists, other=0.0)
        weighted = tl.where(m2 / count < _double(eps), 0.0, weighted)
    slope = invstd * invstd * weighted / count
    constant = ((mean - centre) * slope - plain / count) * scale
    tl.store(slopes + c, (-slope * scale).to(tl.float32), mask=exists)
    tl.store(slopes + channels + c, constant.to(tl.float32), mask=exists)


@_kernel
def merge_sums_kernel(
    partials,
    table,
    rows,
    vectors,
    coefs,
    slopes,
    dweight,
    dbias,
    outer,
    splits,
    channels,
    units,
    max_parts,
    eps,
    JOINT: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add the parts of each shard: to ``rows[shard, 1 + 2 channels]``, or for a layer that is alone to `_finish_sums`.

    Also makes the gradients of weight and bias of them, ``[shard, channels]``.
    """
    _follow(EARLY)
    shard = tl.program_id(1)
    if JOINT:
        table += shard * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 1)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels
    plain = tl.zeros((BF,), tl.float64)
    weighted = tl.zeros((BF,), tl.float64)
    for p0 in range(0, max_parts, BP):
        p = p0 + tl.arange(0, BP)
        there = _part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels)[:, None] > 0
        there = there & exists[None, :]
        offsets, second = _part_offsets(p, c, channels, units, FLAT, ALIGN)
        plain += tl.sum(tl.load(partials + offsets, mask=there, other=0.0), axis=0)
        weighted += tl.sum(tl.load(partials + second + offsets, mask=there, other=0.0), axis=0)
    mean = tl.load(vectors + c, mask=exists, other=0.0)
    weighted += (mean.to(tl.float32).to(tl.float64) - mean) * plain  # the parts have deviations from the centre
    if BIAS:
        tl.store(dbias + shard * channels + c, plain, mask=exists)
    if WEIGHT:
        invstd = tl.load(vectors + 2 * channels + c, mask=exists, other=0.0)
        tl.store(dweight + shard * channels + c, weighted * invstd, mask=exists)
    if JOINT:
        rows += shard * (1 + 2 * channels)
        if tl.program_id(0) == 0:
            tl.store(rows, 1.0)
        tl.store(rows + 1 + c, plain, mask=exists)
        tl.store(rows + 1 + channels + c, weighted, mask=exists)
    else:
        _finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, eps, False)


@_kernel
def finish_sums_kernel(
    rows,
    vectors,
    coefs,
    slopes,
    num_rows,
    channels,
    eps,
    LEVELS: tl.constexpr,
    BF: tl.constexpr,
    CLAMP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add ``rows[num_rows, 1 + 2 channels]`` of all shards in the fixed tree, and `_finish_sums`."""
    _follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    k = tl.arange(0, 1 << LEVELS)[:, None]
    there = (k < num_rows) & exists[None, :]
    at = rows + k * (1 + 2 * channels) + 1 + c[None, :]
    plain = tl.load(at, mask=there, other=0.0)
    weighted = tl.load(at + channels, mask=there, other=0.0)
    for level in tl.static_range(LEVELS):
        plain_a, plain_b = _halves(plain, 1 << (LEVELS - 1 - level), BF)
        weighted_a, weighted_b = _halves(weighted, 1 << (LEVELS - 1 - level), BF)
        plain = plain_a + plain_b
        weighted = weighted_a + weighted_b
    plain = tl.reshape(plain, (BF,))
    weighted = tl.reshape(weighted, (BF,))
    _finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, eps, CLAMP)


@_kernel
def input_kernel(
    dy,
    x,
    residual,
    dx,
    table,
    coefs,
    slopes,
    outer,
    splits,
    channels,
    units,
    TYPE: tl.constexpr,
    JOINT: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The gradient of the input, from the sums over all shards.

    With GATED it reads the gradient that `reduce_kernel` wrote.
    """
    _follow(EARLY)
    if JOINT:
        table += tl.program_id(1) * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 2)
        x = _address(table, 3, TYPE)
        if GATED:
            dy = _address(table, 6, TYPE)
        else:
            dy = _address(table, 4, TYPE)
        residual = _address(table, 5, TYPE)
        dx = _address(table, 7, TYPE)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    split, _part, c, exists, base, step, offsets, here = _tile(pid, 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC)
    tiles = outer
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        channels = units * ALIGN
    c, exists = _spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
    centre = tl.load(coefs + c, mask=exists, other=0.0)
    scale = tl.load(coefs + channels + c, mask=exists, other=0.0)
    offset = tl.load(coefs + 2 * channels + c, mask=exists, other=0.0)
    slope = tl.load(slopes + c, mask=exists, other=0.0)
    constant = tl.load(slopes + channels + c, mask=exists, other=0.0)
    walked = tl.where(split < splits, (tiles - split + splits - 1) // splits, 0).to(tl.int32)
    for back in range(walked):
        i = split + (walked - 1 - back) * tl.cast(splits, tl.int64)
        mask = here
        if ROWS:
            mask = here & (i * BA + tl.arange(0, BA)[:, None] < outer)
        start = base + i * step
        value = (
            tl.load(x + start + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) - centre
        )
        gradient = tl.load(dy + start + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if RELU:
            z = tl.fma(value, scale, offset)
            if RESIDUAL:
                z += tl.load(residual + start + offsets, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.where(z <= 0.0, 0.0, gradient)
        tl.store(dx + start + offsets, tl.fma(gradient, scale, tl.fma(value, slope, constant)).to(TYPE), mask=mask)
