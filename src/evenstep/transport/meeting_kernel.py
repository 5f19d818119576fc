"""The kernel in which GPUs of one machine meet: each writes into memory that all can read, and waits for the others.

Several programs share the rows; each meets the same program of every peer. All devices and the host see what is written
before `_fence` before they see what is written after it.
"""

import triton
import triton.language as tl


@triton.jit
def _fence():
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _words(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _share(count, programs):
    """The words of this program: first and end."""
    size = tl.cdiv(count, programs)
    first = tl.minimum(tl.program_id(0) * size, count)
    return first, tl.minimum(first + size, count)


@triton.jit(do_not_specialize=["num_mine", "place", "num_peers", "tag", "limit"])
def meet(
    rows,
    out,
    state,
    own,
    stop,
    peers,
    num_mine,
    place,
    num_peers,
    tag,
    limit,
    HEAD: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give rows to all, and take theirs.

    Args:
        rows: This worker's words.
        out: Everyone's, in order.
        state: For each program: how often it has met; what went wrong (1: a peer did not come, 2: its tag differed).
        own: The address of our window: for each program, how often it came, and its tags in even and odd rounds; then
            two slots.
        stop: The address of a word that is set when nobody is to wait any longer.
        peers: For each of the others: the address of its window, how many words it gives, and their place.
        num_mine: How many words we give.
        place: Where they go.
        num_peers: How many others there are.
        tag: What we meet for.
        limit: How often to look for a peer.
        HEAD: Words before the slots.
        SLOT: Words in a slot.
        BLOCK: Words at a time.
    """
    me, programs = tl.program_id(0), tl.num_programs(0)
    number = tl.load(state + 2 * me) + 1
    odd = number % 2
    head = _words(own) + 8 * me
    slot = _words(own) + HEAD + odd * SLOT
    begin, end = _share(num_mine, programs)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < end
        values = tl.load(rows + at, mask=here)
        tl.store(slot + at, values, mask=here)
        tl.store(out + place + at, values, mask=here)
    tl.store(head + 1 + odd, tag)
    _fence()
    tl.debug_barrier()
    tl.store(head, number)
    wrong = tl.load(state + 2 * me + 1)
    halt = _words(stop)
    for n in range(num_peers):
        window = _words(tl.load(peers + 3 * n))
        count = tl.load(peers + 3 * n + 1)
        there = tl.load(peers + 3 * n + 2)
        theirs = window + 8 * me
        seen = tl.load(theirs, volatile=True)
        looked = number * 0
        while (seen < number) & (looked < limit):
            seen = tl.load(theirs, volatile=True)
            looked += 1
            if looked % 256 == 0:  # the host is far away
                looked = tl.where(tl.load(halt, volatile=True) != 0, number * 0 + limit, looked)
        _fence()
        tl.debug_barrier()
        said = tl.load(theirs + 1 + odd, volatile=True)
        wrong = tl.maximum(wrong, tl.where(seen < number, 1, tl.where(said == tag, 0, 2)))
        head_of, end_of = _share(count, programs)
        for first in range(head_of, end_of, BLOCK):
            word = first + tl.arange(0, BLOCK)
            given = word < end_of
            found = tl.load(window + HEAD + odd * SLOT + word, mask=given, volatile=True)
            tl.store(out + there + word, found, mask=given)
    tl.store(state + 2 * me + 1, wrong)
    tl.store(state + 2 * me, number)
