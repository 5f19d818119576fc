"""The passes of batch norm as Triton kernels. Only `gpu` imports this module, which needs Triton, and launches them.

All passes walk the data in the same way. A tile is ``[BA, BC]``: BA positions of BC channels.

- *Planes*, ``[N, C, inner]`` contiguous: a tile lies in one sample, its positions are a column of BA inner positions. A
  program walks over samples.
- *Rows*, ``[M, C]`` (channels-last): a tile is BA rows. A program walks over such blocks of rows.
- *Flat* planes, too small for that: a whole sample is one plane, and its positions know their channels.

So every program has *iterations* with one tile each; whether a position's channels and all but the last rows exist is
known beforehand. The ``splits`` programs of one place take iterations in turn, so that a launch goes
through memory from one end to the other; a pass that reads again what the pass before it read does so in reverse order,
because what was read last is still in the cache. Several iterations are asked for before the first is used.

Sums are made without atomics: a program leaves its part of a sum in ``partials``, and the parts are added in a fixed
order. What the bits depend on is the geometry (the shape and layout of a shard) and nothing else: in particular not on
how many shards one launch computes.

The passes are in `forward` and `backward`. `alone` makes one launch of a direction for a layer that has nobody to meet.
`company` has a launch for each pass; the second axis of its grids counts shards, and everything that differs between
them is read from ``table``, one row of FIELDS integers for each: outer size, splits of a pass that sums and of one that
maps, and the addresses of up to five tensors: input, output or its gradient, residual, gated gradient, gradient of the
input.

Elements are float32 inside a position, vectors per channel are float64: ``vectors`` holds mean, M2 and inverse
standard deviation, ``[C]`` each, and the count. ``coefs`` are what the elements need of them, in float32: centre, scale
and offset, so that the output is fma(x - centre, scale, offset). What the forward computes and the backward computes
again is written with ``fma``, so that the two agree on every sign.
"""

import triton.language as tl

from evenstep.nn.kernels.alone import backward_kernel, forward_kernel
from evenstep.nn.kernels.company import (
    coefs_kernel,
    finish_statistics_kernel,
    finish_sums_kernel,
    input_kernel,
    merge_statistics_kernel,
    merge_sums_kernel,
    normalize_kernel,
    reduce_kernel,
    statistics_kernel,
)

__all__ = [
    "backward_kernel",
    "coefs_kernel",
    "finish_statistics_kernel",
    "finish_sums_kernel",
    "forward_kernel",
    "input_kernel",
    "merge_statistics_kernel",
    "merge_sums_kernel",
    "normalize_kernel",
    "reduce_kernel",
    "statistics_kernel",
    "tl",
]
