"""The passes of backward: sums, what follows from them, the gradients of inputs; see the package."""

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
def _add(
    i,
    dy,
    x,
    residual,
    gated,
    splits,
    base,
    step,
    offsets,
    outer,
    here,
    coefs,
    sums,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BA: tl.constexpr,
    U: tl.constexpr,
    LAST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
):
    """U iterations of `sum_gradients`; where an element is missing its gradient reads as 0."""
    values = load(x, i, splits, base, step, offsets, outer, here, ROWS, BA, U, LAST, "")
    gradients = load(dy, i, splits, base, step, offsets, outer, here, ROWS, BA, U, LAST, "")
    if RESIDUAL:
        added = load(residual, i, splits, base, step, offsets, outer, here, ROWS, BA, U, LAST, "")
    plain = sums[0]
    weighted = sums[1]
    for u in tl.static_range(U):
        value = values[u].to(tl.float32) - coefs[0]
        gradient = gradients[u].to(tl.float32)
        if RELU:
            z = tl.fma(value, coefs[1], coefs[2])
            if RESIDUAL:
                z += added[u].to(tl.float32)
            gradient = tl.where(z <= 0.0, 0.0, gradient)
            if GATED:
                mask = there(i + u * splits, outer, here, ROWS, BA)
                tl.store(gated + base + (i + u * splits) * step + offsets, gradient.to(TYPE), mask=mask)
        plain += gradient
        weighted = tl.fma(gradient, value, weighted)
    return plain, weighted


@triton.jit
def sum_gradients(
    pid,
    dy,
    x,
    residual,
    gated,
    partials,
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
    GATED: tl.constexpr,
):
    """Parts of sum(dy) and sum(dy (x - centre)), to ``partials[part, 2, channels]``.

    With RELU, dy counts only where the output was not 0, which is found out again from x (and the residual). With
    GATED that dy is also written: it is the gradient of the residual, and what `map_gradients` reads.
    """
    split, part, c, exists, base, step, offsets, here = tile(
        pid, 1 if FLAT else channels, units, ROWS, ALIGN, BA, BC, SPAN
    )
    tiles = outer
    full = outer
    if ROWS:
        tiles = tl.cdiv(outer, BA)
        full = outer // BA
        channels = units * ALIGN
    c, exists = spread(c, exists, base, here, channels, units, FLAT, ALIGN, BA)
    known = (
        tl.load(coefs + c, mask=exists, other=0.0),
        tl.load(coefs + channels + c, mask=exists, other=0.0),
        tl.load(coefs + 2 * channels + c, mask=exists, other=0.0),
    )
    plain = tl.zeros((BA, BC), tl.float32)
    weighted = tl.zeros((BA, BC), tl.float32)
    i = tl.cast(split, tl.int64)
    for _ in range((tl.maximum((full - split + splits - 1) // splits, 0) // U).to(tl.int32)):
        plain, weighted = _add(i, dy, x, residual, gated, splits, base, step, offsets, outer, here, known,
                               (plain, weighted), TYPE, ROWS, BA, U, False, RESIDUAL, RELU, GATED)  # fmt: skip
        i += splits * U
    if i < tiles:
        plain, weighted = _add(i, dy, x, residual, gated, splits, base, step, offsets, outer, here, known,
                               (plain, weighted), TYPE, ROWS, BA, U, True, RESIDUAL, RELU, GATED)  # fmt: skip
    if FLAT:
        width = units * ALIGN
        partials += split * tl.cast(2 * width, tl.int64) + base
        tl.store(partials + offsets, plain.to(tl.float64), mask=here)
        tl.store(partials + width + offsets, weighted.to(tl.float64), mask=here)
    else:
        sums = tl.reduce((plain.to(tl.float64), weighted.to(tl.float64)), 0, add_pairs)
        partials += tl.cast(part, tl.int64) * 2 * channels
        c = tl.reshape(c, (BC,))
        exists = tl.reshape(exists, (BC,))
        tl.store(partials + c, sums[0], mask=exists)
        tl.store(partials + channels + c, sums[1], mask=exists)


@triton.jit
def merge_sums(
    c,
    exists,
    partials,
    vectors,
    dweight,
    dbias,
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
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """sum(dy) and sum(dy (x - mean)) of all parts; with them the gradients of weight and bias, ``[channels]``."""
    mean = tl.load(vectors + c, mask=exists, other=0.0)
    if WEIGHT:
        invstd = tl.load(vectors + 2 * channels + c, mask=exists, other=0.0)
    plain = tl.zeros((BF,), tl.float64)
    weighted = tl.zeros((BF,), tl.float64)
    for p0 in range(0, max_parts, BP):
        p = p0 + tl.arange(0, BP)
        known = part_counts(p, outer, splits, units, ROWS, FLAT, ALIGN, BA, channels)[:, None] > 0
        known = known & exists[None, :]
        offsets, second = part_offsets(p, c, channels, units, FLAT, ALIGN)
        plains = tl.load(partials + offsets, mask=known, other=0.0)
        weighteds = tl.load(partials + second + offsets, mask=known, other=0.0)
        more = tl.reduce((plains, weighteds), 0, add_pairs)
        plain += more[0]
        weighted += more[1]
    weighted += (mean.to(tl.float32).to(tl.float64) - mean) * plain  # the parts have deviations from the centre
    if BIAS:
        tl.store(dbias + c, plain, mask=exists)
    if WEIGHT:
        tl.store(dweight + c, weighted * invstd, mask=exists)
    return plain, weighted


@triton.jit
def finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, eps, CLAMP: tl.constexpr):
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


@triton.jit
def map_gradients(
    pid,
    dy,
    x,
    residual,
    dx,
    coefs,
    slopes,
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
    """The gradient of the input of what a program walks over, backwards, from the sums over all shards."""
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
    slope = tl.load(slopes + c, mask=exists, other=0.0)
    constant = tl.load(slopes + channels + c, mask=exists, other=0.0)
    steps = tl.cdiv(tl.maximum((tiles - split + splits - 1) // splits, 0), U).to(tl.int32)
    for back in range(steps):
        i = split + (steps - 1 - back) * tl.cast(splits * U, tl.int64)
        values = load(x, i, splits, base, step, offsets, outer, here, ROWS, BA, U, True, LOADS)
        gradients = load(dy, i, splits, base, step, offsets, outer, here, ROWS, BA, U, True, LOADS)
        if RESIDUAL:
            added = load(residual, i, splits, base, step, offsets, outer, here, ROWS, BA, U, True, LOADS)
        for u in tl.static_range(U):
            value = values[u].to(tl.float32) - centre
            gradient = gradients[u].to(tl.float32)
            if RELU:
                z = tl.fma(value, scale, offset)
                if RESIDUAL:
                    z += added[u].to(tl.float32)
                gradient = tl.where(z <= 0.0, 0.0, gradient)
            found = tl.fma(gradient, scale, tl.fma(value, slope, constant)).to(TYPE)
            mask = there(i + u * splits, outer, here, ROWS, BA)
            tl.store(dx + base + (i + u * splits) * step + offsets, found, mask=mask, eviction_policy=STORES)
