"""Who computes what: shards to workers, samples to shards, parameters to owners. Pure arithmetic."""

from collections.abc import Sequence

__all__ = ["balance", "cut"]

Span = tuple[int, int]


def cut(size: int, num_parts: int) -> list[Span]:
    """Cut [0, size) into neighbouring spans whose sizes differ by at most one, the larger ones first."""
    small, extra = divmod(size, num_parts)
    ends = [small * (i + 1) + min(i + 1, extra) for i in range(num_parts)]
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
