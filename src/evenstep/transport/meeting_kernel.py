"""The kernel by which GPUs of one machine meet: each writes into memory of the host that all can read, and waits there.

What is written before `_fence` is there, for all devices and the host, before what is written after it.
"""

import triton
import triton.language as tl


@triton.jit
def _fence():
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _words(address):
    return address.to(tl.pointer_type(tl.int64))


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
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Give rows to all, and take theirs.

    Args:
        rows: This worker's words.
        out: Everyone's, in order.
        state: How often we have met; what went wrong (1: a peer did not come, 2: it came to something else).
        own: The address of our window: how often we came, to what in even and odd rounds, then two slots.
        stop: The address of a word that is set when nobody is to wait any more.
        peers: For each of the others: the address of its window, how many words it gives, and their place.
        num_mine: How many words we give.
        place: Where they go.
        num_peers: How many others there are.
        tag: To what we come.
        limit: How often to look for a peer.
        SLOT: Words in a slot.
        BLOCK: Words at a time.
    """
    number = tl.load(state) + 1
    odd = number % 2
    window = _words(own)
    slot = window + 8 + odd * SLOT
    for start in range(0, num_mine, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < num_mine
        values = tl.load(rows + at, mask=here)
        tl.store(slot + at, values, mask=here)
        tl.store(out + place + at, values, mask=here)
    tl.store(window + 1 + odd, tag)
    _fence()
    tl.debug_barrier()
    tl.store(window, number)
    wrong = tl.load(state + 1)
    halt = _words(stop)
    for n in range(num_peers):
        theirs = _words(tl.load(peers + 3 * n))
        count = tl.load(peers + 3 * n + 1)
        there = tl.load(peers + 3 * n + 2)
        seen = tl.load(theirs, volatile=True)
        looked = number * 0
        while (seen < number) & (looked < limit):
            halted = tl.load(halt, volatile=True)
            seen = tl.load(theirs, volatile=True)
            looked = tl.where(halted != 0, limit, looked + 1)
        _fence()
        tl.debug_barrier()
        said = tl.load(theirs + 1 + odd, volatile=True)
        wrong = tl.maximum(wrong, tl.where(seen < number, 1, tl.where(said == tag, 0, 2)))
        for first in range(0, count, BLOCK):
            word = first + tl.arange(0, BLOCK)
            given = word < count
            found = tl.load(theirs + 8 + odd * SLOT + word, mask=given, volatile=True)
            tl.store(out + there + word, found, mask=given)
    tl.store(state + 1, wrong)
    tl.store(state, number)
