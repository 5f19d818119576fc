"""How many workers go where: decided from numbers alone."""

from collections.abc import Sequence

from evenstep.core.errors import ConfigError

__all__ = ["limits", "share_out"]


def limits(workers: int | tuple[int, int]) -> tuple[int, int]:
    """The least and the most of the workers that were asked for.

    Raises:
        ConfigError: They are no such numbers.
    """
    least, most = workers if isinstance(workers, tuple) and len(workers) == 2 else (workers, workers)
    if not (type(least) is int and type(most) is int and 1 <= least <= most):
        raise ConfigError(f"workers={workers!r}, expected a whole number above 0, or the least and the most of them")
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
