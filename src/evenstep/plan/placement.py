"""Who computes what: shards to workers, samples to shards, parameters to owners. Pure arithmetic."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace, nlargest
from itertools import accumulate

__all__ = ["balance", "cut", "share"]

Span = tuple[int, int]


def cut(size: int, num_parts: int) -> list[Span]:
    """Cut [0, size) into neighbouring spans whose sizes differ by at most one, the larger ones first."""
    small, extra = divmod(size, num_parts)
    ends = [small * (i + 1) + min(i + 1, extra) for i in range(num_parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def share(size: int, weights: Sequence[float]) -> list[Span]:
    """Cut [0, size) into neighbouring spans in proportion to weights, none empty, by largest remainders.

    Equal weights give what `cut` gives.
    """
    total = sum(weights)
    wanted = [size * weight / total for weight in weights]
    sizes = [max(int(amount), 1) for amount in wanted]
    # spans raised to 1 take from the one that is most above its share, one at a time
    above = [(wanted[i] - n, -i) for i, n in enumerate(sizes) if n > 1]
    heapify(above)
    for _ in range(sum(sizes) - size):
        _, i = above[0]
        sizes[-i] -= 1
        if sizes[-i] > 1:
            heapreplace(above, (wanted[-i] - sizes[-i], i))
        else:
            heappop(above)
    # the rest goes to the largest remainders; none of them is 2 or more
    for i in nlargest(size - sum(sizes), range(len(sizes)), key=lambda i: (wanted[i] - sizes[i], -i)):
        sizes[i] += 1
    ends = list(accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def balance(sizes: Sequence[int], num_owners: int) -> list[int]:
    """The owner of each item, so that the sums of sizes are close: the largest first, each to the lightest owner."""
    loads = [0] * num_owners
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(num_owners), key=lambda w: (loads[w], w))
        owners[item] = owner
        loads[owner] += sizes[item]
    return owners
