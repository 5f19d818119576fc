"""Who computes what: shards to workers, samples to shards, parameters to owners. Pure arithmetic."""

from collections.abc import Sequence

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
    wanted = [size * weight / sum(weights) for weight in weights]
    sizes = [max(int(amount), 1) for amount in wanted]
    while sum(sizes) > size:  # those that were raised to 1 take from whoever has most above what it wanted
        sizes[max((i for i, n in enumerate(sizes) if n > 1), key=lambda i: (sizes[i] - wanted[i], i))] -= 1
    while sum(sizes) < size:
        sizes[max(range(len(sizes)), key=lambda i: (wanted[i] - sizes[i], -i))] += 1
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
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
