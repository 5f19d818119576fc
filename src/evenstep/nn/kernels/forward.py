"""The passes of forward: statistics, what follows from them, the outputs; see the package."""

import triton
import triton.language as tl

from evenstep.nn.kernels.walk import (
    add_pairs,
    double,
    load,
    part_counts,
    part_offsets,
    spread,
    there,
    tile,
)


@triton.jit
def sum_statistics(
    pid,
    x,
    partials,
    outer,
    splits,
    channels,
    units,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
    U: tl.constexpr,
):
    """Mean and M2 of the elements that a program walks over, to ``partials[part, 2, channels]``.

    Each position takes U elements at once: their deviations from its mean so far move that mean and add to M2. So one
    element costs three operations, and yet a wrong mean costs nothing later. The mean is that of deviations from an
    element of the data where float32 could not hold it otherwise. With FLAT every position is a part of its own:
    ``partials[split, 2, :]``.
    """
    WIDE: tl.constexpr = tl.float32 == TYPE
    split, part, c, exists, base, step, offsets, here = tile(
        pid, 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC, SPAN
    )
    tiles = outer
    full = outer
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        full = outer // BA
        channels = units * ALIGN
    if FLAT:  # the first element of each position
        shift = tl.load(x + base + split * step + offsets, mask=here, other=0.0).to(tl.float32)
    else:  # the first element of each channel
        first = x + base + split * step + tl.arange(0, BC)[None, :] * (1 if ROWS else units * ALIGN)
        shift = tl.load(first, mask=exists[None, :], other=0.0).to(tl.float32)
    mean = tl.zeros((BA, BC), tl.float32)
    if not WIDE:
        mean += shift
    m2 = tl.zeros((BA, BC), tl.float32)
    count = 0.0
    i = tl.cast(split, tl.int64)
    for _ in range((tl.maximum((full - split + splits - 1) // splits, 0) // U).to(tl.int32)):
        values = load(x, i, splits, base, step, offsets, outer, here, ROWS, BA, U, False, "")
        i += splits * U
        count += U
        moment = tl.zeros((BA, BC), tl.float32)
        squares = tl.zeros((BA, BC), tl.float32)
        for u in tl.static_range(U):
            value = values[u].to(tl.float32)
            if WIDE:
                value -= shift
            value -= mean
            moment += value
            squares = tl.fma(value, value, squares)
        toward = moment * (1.0 / count)
        mean += toward
        m2 += tl.fma(-moment, toward, squares)
    weight = tl.where(here, count, 0.0)
    if i < tiles:
        values = load(x, i, splits, base, step, offsets, outer, here, ROWS, BA, U, True, "")
        moment = tl.zeros((BA, BC), tl.float32)
        squares = tl.zeros((BA, BC), tl.float32)
        for u in tl.static_range(U):
            mask = there(i + u * splits, outer, here, ROWS, BA)
            value = values[u].to(tl.float32)
            if WIDE:
                value -= shift
            value = tl.where(mask, value - mean, 0.0)
            weight += mask.to(tl.float32)
            moment += value
            squares = tl.fma(value, value, squares)
        toward = moment / tl.maximum(weight, 1.0)
        mean += toward
        m2 += tl.fma(-moment, toward, squares)
    if not WIDE:
        mean -= shift
    if FLAT:
        width = units * ALIGN
        partials += split * tl.cast(2 * width, tl.int64) + base
        tl.store(partials + offsets, shift.to(tl.float64) + mean.to(tl.float64), mask=here)
        tl.store(partials + width + offsets, m2.to(tl.float64), mask=here)
    else:
        total = tl.cast(part_counts(part, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels), tl.float32)
        centre = tl.sum(weight * mean, 0) / total
        away = mean - centre[None, :]
        squares_c = tl.sum(tl.fma(weight * away, away, m2), 0)
        partials += tl.cast(part, tl.int64) * 2 * channels
        tl.store(partials + c, tl.reshape(shift, (BC,)).to(tl.float64) + centre.to(tl.float64), mask=exists)
        tl.store(partials + channels + c, squares_c.to(tl.float64), mask=exists)


@triton.jit
def merge_statistics(
    c,
    exists,
    partials,
    outer,
    splits,
    channels,
    units,
    max_parts,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
):
    """Count, mean and M2 of all parts."""
    size = tl.cast(outer, tl.float64)
    if FLAT:
        size *= units * ALIGN // channels
    elif not ROWS:
        size *= units * ALIGN
    # Around the mean of one part, so that subtracting squares costs nothing in float64.
    origin, _ = part_offsets(tl.zeros((1,), tl.int32), c, channels, units, FLAT, ALIGN)
    origin = tl.load(partials + origin, mask=exists[None, :], other=0.0)
    moment = tl.zeros((BF,), tl.float64)
    squares = tl.zeros((BF,), tl.float64)
    for p0 in range(0, max_parts, BP):
        p = p0 + tl.arange(0, BP)
        share = part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels).to(tl.float64)[:, None]
        known = (share > 0) & exists[None, :]
        offsets, second = part_offsets(p, c, channels, units, FLAT, ALIGN)
        means = tl.load(partials + offsets, mask=known, other=0.0)
        m2s = tl.load(partials + second + offsets, mask=known, other=0.0)
        away = tl.where(known, means - origin, 0.0)
        more = tl.reduce((share * away, m2s + share * away * away), 0, add_pairs)
        moment += more[0]
        squares += more[1]
    mean = tl.reshape(origin, (BF,)) + moment / size
    return size, mean, tl.maximum(squares - moment * (moment / size), 0.0)


@triton.jit
def read_known(
    c,
    exists,
    weight,
    bias,
    running_mean,
    running_var,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
):
    """What `finish` needs besides the statistics; asked for before these are there."""
    scale = tl.full(c.shape, 1.0, tl.float64)
    offset = tl.zeros(c.shape, tl.float64)
    mean = tl.zeros(c.shape, tl.float64)
    var = tl.zeros(c.shape, tl.float64)
    if WEIGHT:
        scale = tl.load(weight + c, mask=exists, other=0.0).to(tl.float64)
    if BIAS:
        offset = tl.load(bias + c, mask=exists, other=0.0).to(tl.float64)
    if MEAN:
        mean = tl.load(running_mean + c, mask=exists, other=0.0).to(tl.float64)
    if VAR:
        var = tl.load(running_var + c, mask=exists, other=0.0).to(tl.float64)
    return scale, offset, mean, var


@triton.jit
def finish(
    c,
    exists,
    count,
    mean,
    m2,
    known,
    vectors,
    coefs,
    running_mean,
    running_var,
    tracked,
    channels,
    eps,
    momentum,
    first,
    moves,
    CLAMP: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
    TRACKED: tl.constexpr,
):
    """What follows from the global statistics: vectors, coefs and, where this program moves them, the running ones.

    ``eps`` and ``momentum`` come as `double` wants them. A ``momentum`` below 0 averages over all batches, and
    ``tracked`` then counts this one already. ``first`` says whether these are the first channels.
    """
    eps = double(eps)
    momentum = double(momentum)
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
    store_coefs(c, exists, mean, invstd * known[0], known[1], coefs, channels)
    if first:
        tl.store(vectors + 3 * channels, count)
    if moves:
        factor = momentum
        if TRACKED:
            if momentum < 0:
                factor = 1.0 / tl.load(tracked).to(tl.float64)
            elif first:  # nobody else reads it
                tl.store(tracked, tl.load(tracked) + 1)
        if MEAN:
            tl.store(running_mean + c, known[2] + (mean - known[2]) * factor, mask=exists)
        if VAR:
            tl.store(running_var + c, known[3] + (m2 / (count - 1.0) - known[3]) * factor, mask=exists)


@triton.jit
def store_coefs(c, exists, mean, scale, offset, coefs, channels):
    """What the elements need of mean, scale and offset, in float32."""
    centre = mean.to(tl.float32)
    offset += (centre.to(tl.float64) - mean) * scale  # what float32 does not hold of the mean
    tl.store(coefs + c, centre, mask=exists)
    tl.store(coefs + channels + c, scale.to(tl.float32), mask=exists)
    tl.store(coefs + 2 * channels + c, offset.to(tl.float32), mask=exists)


@triton.jit
def map_outputs(
    pid,
    x,
    residual,
    y,
    coefs,
    outer,
    splits,
    channels,
    units,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
    U: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
):
    """The output of what a program walks over, backwards: normalized, with the residual added, and activated."""
    split, _part, c, exists, base, step, offsets, here = tile(
        pid, 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC, SPAN
    )
    tiles = outer
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        channels = units * ALIGN
    c, exists = spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
    centre = tl.load(coefs + c, mask=exists, other=0.0)
    scale = tl.load(coefs + channels + c, mask=exists, other=0.0)
    offset = tl.load(coefs + 2 * channels + c, mask=exists, other=0.0)
    steps = tl.cdiv(tl.maximum((tiles - split + splits - 1) // splits, 0), U).to(tl.int32)
    for back in range(steps):
        i = split + (steps - 1 - back) * tl.cast(splits * U, tl.int64)
        values = load(x, i, splits, base, step, offsets, outer, here, ROWS, BA, U, True, LOADS)
        if RESIDUAL:
            added = load(residual, i, splits, base, step, offsets, outer, here, ROWS, BA, U, True, LOADS)
        for u in tl.static_range(U):
            z = tl.fma(values[u].to(tl.float32) - centre, scale, offset)
            if RESIDUAL:
                z += added[u].to(tl.float32)
            if RELU:
                z = tl.where(z <= 0.0, 0.0, z)  # a NaN stays one
            mask = there(i + u * splits, outer, here, ROWS, BA)
            start = base + (i + u * splits) * step
            tl.store(y + start + offsets, z.to(TYPE), mask=mask, eviction_policy=STORES)
