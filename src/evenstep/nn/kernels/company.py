"""The kernels of layers in company, each for all shards of a device at once; see the package."""

import triton.language as tl

from evenstep.nn.kernels.backward import finish_sums, map_gradients, merge_sums, sum_gradients
from evenstep.nn.kernels.forward import finish, map_outputs, merge_statistics, read_known, store_coefs, sum_statistics
from evenstep.nn.kernels.walk import FIELDS, address, follow, halves, kernel, places


@kernel
def statistics_kernel(
    table,
    partials,
    channels,
    units,
    max_parts,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    U: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The parts of mean and M2, to ``partials[shard, part, 2, channels]``."""
    follow(EARLY)
    shard = tl.program_id(1)
    table += shard * FIELDS
    outer = tl.load(table)
    splits = tl.load(table + 1)
    x = address(table, 3, TYPE)
    partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels
    if tl.program_id(0) < splits * places(channels, units, ROWS, FLAT, ALIGN, BA, BC):
        sum_statistics(tl.program_id(0), x, partials, outer, splits, channels, units, TYPE, ROWS, FLAT, ALIGN, BA, BC,
                       BA, U)  # fmt: skip


@kernel
def merge_statistics_kernel(
    table,
    partials,
    rows,
    channels,
    units,
    max_parts,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the parts of each shard, to ``rows[shard, 1 + 2 channels]``."""
    follow(EARLY)
    shard = tl.program_id(1)
    table += shard * FIELDS
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels
    size, mean, m2 = merge_statistics(c, exists, partials, tl.load(table), tl.load(table + 1), channels, units,
                                      max_parts, ROWS, FLAT, ALIGN, BA, BP, BF)  # fmt: skip
    rows += shard * (1 + 2 * channels)
    if tl.program_id(0) == 0:
        tl.store(rows, size)
    tl.store(rows + 1 + c, mean, mask=exists)
    tl.store(rows + 1 + channels + c, m2, mask=exists)


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
    """Merge ``rows[num_rows, 1 + 2 channels]`` of all shards in the fixed tree, and `finish`."""
    follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    known = read_known(c, exists, weight, bias, running_mean, running_var, WEIGHT, BIAS, MEAN, VAR)
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
    finish(c, exists, total, tl.reshape(mean, (BF,)), tl.reshape(m2, (BF,)), known, vectors, coefs, running_mean,
           running_var, tracked, channels, eps, momentum, tl.program_id(0) == 0, True, CLAMP, MEAN, VAR,
           TRACKED)  # fmt: skip


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
    """Coefs from vectors that were made elsewhere."""
    follow(EARLY)
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    known = read_known(c, exists, weight, bias, mean, mean, WEIGHT, BIAS, False, False)
    scale = tl.load(invstd + c, mask=exists, other=0.0) * known[0]
    store_coefs(c, exists, tl.load(mean + c, mask=exists, other=0.0), scale, known[1], coefs, channels)


@kernel
def normalize_kernel(
    table,
    coefs,
    channels,
    units,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    U: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The outputs."""
    follow(EARLY)
    table += tl.program_id(1) * FIELDS
    x = address(table, 3, TYPE)
    y = address(table, 4, TYPE)
    residual = address(table, 5, TYPE)
    map_outputs(tl.num_programs(0) - 1 - tl.program_id(0), x, residual, y, coefs, tl.load(table), tl.load(table + 2),
                channels, units, TYPE, ROWS, FLAT, ALIGN, BA, BC, BA, U, RESIDUAL, RELU, LOADS,
                STORES)  # fmt: skip


@kernel
def reduce_kernel(
    table,
    partials,
    coefs,
    channels,
    units,
    max_parts,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    U: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The parts of the two sums, to ``partials[shard, part, 2, channels]``."""
    follow(EARLY)
    shard = tl.program_id(1)
    table += shard * FIELDS
    partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels
    if tl.program_id(0) < tl.load(table + 1) * places(channels, units, ROWS, FLAT, ALIGN, BA, BC):
        sum_gradients(tl.program_id(0), address(table, 4, TYPE), address(table, 3, TYPE), address(table, 5, TYPE),
                      address(table, 6, TYPE), partials, coefs, tl.load(table), tl.load(table + 1), channels, units,
                      TYPE, ROWS, FLAT, ALIGN, BA, BC, BA, U, RESIDUAL, RELU, GATED)  # fmt: skip


@kernel
def merge_sums_kernel(
    table,
    partials,
    rows,
    vectors,
    dweight,
    dbias,
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
    EARLY: tl.constexpr,
):
    """Add the parts of each shard, to ``rows[shard, 1 + 2 channels]``, and make the gradients of weight and bias."""
    follow(EARLY)
    shard = tl.program_id(1)
    table += shard * FIELDS
    c = tl.program_id(0) * BF + tl.arange(0, BF)
    exists = c < channels
    partials += shard * tl.cast(max_parts, tl.int64) * 2 * channels
    plain, weighted = merge_sums(c, exists, partials, vectors, dweight + shard * channels, dbias + shard * channels,
                                 tl.load(table), tl.load(table + 1), channels, units, max_parts, ROWS, FLAT, ALIGN, BA,
                                 BP, BF, WEIGHT, BIAS)  # fmt: skip
    rows += shard * (1 + 2 * channels)
    if tl.program_id(0) == 0:
        tl.store(rows, 1.0)
    tl.store(rows + 1 + c, plain, mask=exists)
    tl.store(rows + 1 + channels + c, weighted, mask=exists)


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
    """Add ``rows[num_rows, 1 + 2 channels]`` of all shards in the fixed tree, and `finish_sums`."""
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
    finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, eps, CLAMP)


@kernel
def input_kernel(
    table,
    coefs,
    slopes,
    channels,
    units,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    U: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The gradients of the inputs; with GATED, from the gradient that `reduce_kernel` wrote."""
    follow(EARLY)
    table += tl.program_id(1) * FIELDS
    map_gradients(tl.num_programs(0) - 1 - tl.program_id(0), address(table, 6 if GATED else 4, TYPE),
                  address(table, 3, TYPE), address(table, 5, TYPE), address(table, 7, TYPE), coefs, slopes,
                  tl.load(table), tl.load(table + 2), channels, units, TYPE, ROWS, FLAT, ALIGN, BA, BC, BA, U, RESIDUAL,
                  RELU, LOADS, STORES)  # fmt: skip
