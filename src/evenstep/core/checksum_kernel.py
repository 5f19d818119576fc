"""The kernel that adds up the checksums of tensors on a GPU; `native/checksum.c` says what they are."""

import triton
import triton.language as tl

ODD = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
ALSO_ODD = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))


@triton.jit
def add_up(tensors, programs, totals, PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """Add this program's part of a tensor to that tensor's total.

    Args:
        tensors: For each tensor: the address of its first word, aligned to 8 bytes, and its number of words.
        programs: For each program: which tensor, and its first word there.
        totals: One for each tensor; initially 0.
        PROGRAM: Words per program.
        BLOCK: Words at a time.
    """
    program = tl.program_id(0)
    tensor, first = tl.load(programs + 2 * program), tl.load(programs + 2 * program + 1)
    words = tl.load(tensors + 2 * tensor).to(tl.pointer_type(tl.int64))
    count = tl.load(tensors + 2 * tensor + 1)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, PROGRAM, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        here = place < count
        mixed = tl.load(words + place, mask=here, other=0) ^ (place + 1) * ODD
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * ODD  # an unsigned shift
        mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * ALSO_ODD
        total += tl.where(here, mixed ^ ((mixed >> 32) & 0xFFFFFFFF), 0)
    tl.atomic_add(totals + tensor, tl.sum(total, 0))
