"""The kernels of backward: sums, what follows from them, and the gradients of inputs; see the package."""

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


@kernel
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
    follow(EARLY)
    shard = tl.program_id(1)
    if JOINT:
        table += shard * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 1)
        x = address(table, 3, TYPE)
        dy = address(table, 4, TYPE)
        residual = address(table, 5, TYPE)
        gated = address(table, 6, TYPE)
    split, part, c, exists, base, step, offsets, here = tile(
        tl.program_id(0), 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC
    )
    if split >= splits:
        return
    full = outer
    if ROWS:
        full = outer // BA
        channels = units * ALIGN
    c, exists = spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
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
        plain, weighted = tl.reduce((sum_dy.to(tl.float64), sum_dy_x.to(tl.float64)), 0, add_pairs)
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
        weighted = tl.where(m2 / count < double(eps), 0.0, weighted)
    slope = invstd * invstd * weighted / count
    constant = ((mean - centre) * slope - plain / count) * scale
    tl.store(slopes + c, (-slope * scale).to(tl.float32), mask=exists)
    tl.store(slopes + channels + c, constant.to(tl.float32), mask=exists)


@kernel
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
    follow(EARLY)
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
        there = part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels)[:, None] > 0
        there = there & exists[None, :]
        offsets, second = part_offsets(p, c, channels, units, FLAT, ALIGN)
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


@kernel
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
    follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    k = tl.arange(0, 1 << LEVELS)[:, None]
    there = (k < num_rows) & exists[None, :]
    at = rows + k * (1 + 2 * channels) + 1 + c[None, :]
    plain = tl.load(at, mask=there, other=0.0)
    weighted = tl.load(at + channels, mask=there, other=0.0)
    for level in tl.static_range(LEVELS):
        plain_a, plain_b = halves(plain, 1 << (LEVELS - 1 - level), BF)
        weighted_a, weighted_b = halves(weighted, 1 << (LEVELS - 1 - level), BF)
        plain = plain_a + plain_b
        weighted = weighted_a + weighted_b
    plain = tl.reshape(plain, (BF,))
    weighted = tl.reshape(weighted, (BF,))
    _finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, eps, CLAMP)


@kernel
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
    follow(EARLY)
    if JOINT:
        table += tl.program_id(1) * FIELDS
        outer = tl.load(table)
        splits = tl.load(table + 2)
        x = address(table, 3, TYPE)
        if GATED:
            dy = address(table, 6, TYPE)
        else:
            dy = address(table, 4, TYPE)
        residual = address(table, 5, TYPE)
        dx = address(table, 7, TYPE)
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
