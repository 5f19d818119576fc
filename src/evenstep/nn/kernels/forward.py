"""The kernels of forward: statistics, what follows from them, and the outputs; see the package."""

import triton
import triton.language as tl

from evenstep.nn.kernels.walk import (
    FIELDS,
    add_pairs,
    address,
    double,
    follow,
    halves,
    kernel,
    part_counts,
    part_offsets,
    spread,
    tile,
)


@triton.jit
def _welford(x, shift, mean, m2, count):
    deviation = x - shift
    delta = deviation - mean
    mean = tl.fma(delta, 1.0 / count, mean)
    return mean, tl.fma(delta, deviation - mean, m2)


@kernel
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
    follow(EARLY)
    shard = tl.program_id(1)
    if JOINT:
        table += shard * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 1)
        x = address(table, 3, TYPE)
    split, part, c, exists, base, step, offsets, here = tile(
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
        moment, squares = tl.reduce((moment, m2.to(tl.float64) + moment * at), 0, add_pairs)
        total = tl.cast(part_counts(part, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels), tl.float64)
        mean_c = moment / total
        partials += (shard * tl.cast(max_parts, tl.int64) + part) * 2 * channels
        tl.store(partials + c, reference + mean_c, mask=exists)
        tl.store(partials + channels + c, tl.maximum(squares - moment * mean_c, 0.0), mask=exists)


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

    ``eps`` and ``momentum`` come as `double` wants them. A ``momentum`` below 0 averages over all batches, and
    ``tracked`` then counts this one already.
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


@kernel
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
    follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    m = tl.load(mean + c, mask=exists, other=0.0)
    s = tl.load(invstd + c, mask=exists, other=0.0)
    _store_coefs(c, exists, m, s, coefs, weight, bias, channels, WEIGHT, BIAS)


@kernel
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
    follow(EARLY)
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
        share = part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels).to(tl.float64)[:, None]
        there = (share > 0) & exists[None, :]
        offsets, _second = part_offsets(p, c, channels, units, FLAT, ALIGN)
        means = tl.load(partials + offsets, mask=there, other=0.0)
        mean += tl.sum(means * (share / size), axis=0)
    m2 = tl.zeros((BF,), tl.float64)
    for p0 in range(0, max_parts, BP):
        p = p0 + tl.arange(0, BP)
        share = part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels).to(tl.float64)[:, None]
        there = (share > 0) & exists[None, :]
        offsets, second = part_offsets(p, c, channels, units, FLAT, ALIGN)
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


@kernel
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
    follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    k = tl.arange(0, 1 << LEVELS)[:, None]
    there = (k < num_rows) & exists[None, :]
    at = rows + k * (1 + 2 * channels)
    count = tl.load(at + tl.zeros((1, BF), tl.int32), mask=(k < num_rows) & (c[None, :] >= 0), other=0.0)
    mean = tl.load(at + 1 + c[None, :], mask=there, other=0.0)
    m2 = tl.load(at + 1 + channels + c[None, :], mask=there, other=0.0)
    for level in tl.static_range(LEVELS):
        count_a, count_b = halves(count, 1 << (LEVELS - 1 - level), BF)
        mean_a, mean_b = halves(mean, 1 << (LEVELS - 1 - level), BF)
        m2_a, m2_b = halves(m2, 1 << (LEVELS - 1 - level), BF)
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


@kernel
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
    follow(EARLY)
    if JOINT:
        table += tl.program_id(1) * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 2)
        x = address(table, 3, TYPE)
        y = address(table, 4, TYPE)
        residual = address(table, 5, TYPE)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    split, _part, c, exists, base, step, offsets, here = tile(pid, 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC)
    tiles = outer
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        channels = units * ALIGN
    c, exists = spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
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
