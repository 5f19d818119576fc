"""How many workers each node gets: pure arithmetic."""

from collections.abc import Sequence

from evenstep.core.errors import ConfigError

__all__ = ["limits", "share_out"]


def limits(workers: int | tuple[int, int]) -> tuple[int, int]:
    """The smallest and the largest number of workers that the caller wants.

    Raises:
        ConfigError: `workers` is neither a positive number nor such a pair.
    """
    least, most = workers if isinstance(workers, tuple) and len(workers) == 2 else (workers, workers)
    if not (type(least) is int and type(most) is int and 1 <= least <= most):
        raise ConfigError(f"workers={workers!r}, expected a whole number above 0, or a pair (at least, at most)")
    return least, most


def share_out(capacities: Sequence[int], least: int, most: int) -> list[int]:
    """How many workers each node gets: as many as there is room for, up to `most`, on as few nodes as possible.

    Raises:
        ConfigError: There is not even room for `least`.
    """
    if sum(capacities) < least:
        raise ConfigError(f"there is room for {sum(capacities)} workers, expected at least {least}")
    left, shares = most, [0] * len(capacities)
    for node in sorted(range(len(capacities)), key=lambda node: (-capacities[node], node)):
        shares[node] = min(capacities[node], left)
        left -= shares[node]
    return shares
