"""The kernels of a layer that is alone: a whole direction is one launch; see the package.

All programs run at once. MEETINGS says how they get from the parts of a sum to what they need of the whole:

- 0: A program walks over everything of its channels and meets nobody.
- 1: The programs meet once, and then each merges the parts of its channels: for sums of few parts. They all find the
  same, and only the first of them moves the running statistics.
- 2: They meet, each merges the parts of some channels, and they meet again.
"""

import triton
import triton.language as tl

from evenstep.nn.kernels.backward import finish_sums, map_gradients, merge_sums, sum_gradients
from evenstep.nn.kernels.forward import finish, map_outputs, merge_statistics, read_known, sum_statistics
from evenstep.nn.kernels.walk import kernel, meet


@triton.jit
def _walks(total, columns, MEETINGS: tl.constexpr):
    """The walks of this program: first, number, distance."""
    me = tl.program_id(0)
    if MEETINGS == 0:
        return me * columns, columns, 1
    programs = tl.num_programs(0)
    return me, (total - me + programs - 1) // programs, programs


@triton.jit
def _blocks(columns, channels, BF: tl.constexpr, MEETINGS: tl.constexpr):
    """The blocks of channels whose parts this program merges: first, end, distance, and whether it does so first."""
    me = tl.program_id(0)
    if MEETINGS == 2:
        return me, tl.cdiv(channels, BF), tl.num_programs(0), me >= 0
    if MEETINGS == 1:
        block = (me // columns) % tl.cdiv(channels, BF)
        return block, block + 1, 1, me // columns == block
    return me, me + 1, 1, me >= 0


@kernel
def forward_kernel(
    x,
    residual,
    y,
    partials,
    counter,
    vectors,
    coefs,
    weight,
    bias,
    running_mean,
    running_var,
    tracked,
    outer,
    splits,
    total,
    columns,
    channels,
    units,
    max_parts,
    eps,
    momentum,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
    U: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    MEETINGS: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MEAN: tl.constexpr,
    VAR: tl.constexpr,
    TRACKED: tl.constexpr,
):
    """Statistics, what follows from them, and the output."""
    first, walks, distance = _walks(total, columns, MEETINGS)
    for walk in range(walks):
        sum_statistics(first + walk * distance, x, partials, outer, splits, channels, units, TYPE, ROWS, FLAT, ALIGN,
                       BA, BC, SPAN, U)  # fmt: skip
    if MEETINGS == 0:
        tl.debug_barrier()
    else:
        meet(counter, tl.num_programs(0))
    start, end, step, moves = _blocks(columns, channels, BF, MEETINGS)
    for block in range(start, end, step):
        c = block * BF + tl.arange(0, BF)
        exists = c < channels
        known = read_known(c, exists, weight, bias, running_mean, running_var, WEIGHT, BIAS, MEAN, VAR)
        size, mean, m2 = merge_statistics(c, exists, partials, outer, splits, channels, units, max_parts, ROWS, FLAT,
                                          ALIGN, BA, BP, BF)  # fmt: skip
        finish(c, exists, size, mean, m2, known, vectors, coefs, running_mean, running_var, tracked, channels, eps,
               momentum, block == 0, moves, False, MEAN, VAR, TRACKED)  # fmt: skip
    if MEETINGS == 2:
        meet(counter, tl.num_programs(0))
    else:
        tl.debug_barrier()
    for walk in range(walks):
        map_outputs(first + (walks - 1 - walk) * distance, x, residual, y, coefs, outer, splits, channels, units, TYPE,
                    ROWS, FLAT, ALIGN, BA, BC, SPAN, U, RESIDUAL, RELU, LOADS, STORES)  # fmt: skip


@kernel
def backward_kernel(
    dy,
    x,
    residual,
    gated,
    dx,
    partials,
    counter,
    vectors,
    coefs,
    slopes,
    dweight,
    dbias,
    outer,
    splits,
    total,
    columns,
    channels,
    units,
    max_parts,
    TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGN: tl.constexpr,
    BA: tl.constexpr,
    BC: tl.constexpr,
    SPAN: tl.constexpr,
    U: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    MEETINGS: tl.constexpr,
    LOADS: tl.constexpr,
    STORES: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    INPUT: tl.constexpr,
):
    """The two sums, what follows from them, and with INPUT the gradient of the input."""
    first, walks, distance = _walks(total, columns, MEETINGS)
    for walk in range(walks):
        sum_gradients(first + walk * distance, dy, x, residual, gated, partials, coefs, outer, splits, channels, units,
                      TYPE, ROWS, FLAT, ALIGN, BA, BC, SPAN, U, RESIDUAL, RELU, GATED)  # fmt: skip
    if MEETINGS == 0:
        tl.debug_barrier()
    else:
        meet(counter, tl.num_programs(0))
    start, end, step, _ = _blocks(columns, channels, BF, MEETINGS)
    for block in range(start, end, step):
        c = block * BF + tl.arange(0, BF)
        exists = c < channels
        plain, weighted = merge_sums(c, exists, partials, vectors, dweight, dbias, outer, splits, channels, units,
                                     max_parts, ROWS, FLAT, ALIGN, BA, BP, BF, WEIGHT, BIAS)  # fmt: skip
        finish_sums(c, exists, plain, weighted, vectors, coefs, slopes, channels, 0, False)
    if INPUT:
        if MEETINGS == 2:
            meet(counter, tl.num_programs(0))
        else:
            tl.debug_barrier()
        if GATED:
            dy = gated
        for walk in range(walks):
            map_gradients(first + (walks - 1 - walk) * distance, dy, x, residual, dx, coefs, slopes, outer, splits,
                          channels, units, TYPE, ROWS, FLAT, ALIGN, BA, BC, SPAN, U, RESIDUAL and not GATED,
                          RELU and not GATED, LOADS, STORES)  # fmt: skip
