"""Which worker of which machine computes which shards: a machine has neighbouring ones, if possible one tree node.

Each machine adds up its own shards as far as the tree allows, and only the rest moves between machines. A span that is
one node leaves one partial sum; any other leaves several of the same size.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate

from evenstep.plan import tree
from evenstep.plan.placement import share

__all__ = ["machine_spans", "share_machines"]

Span = tuple[int, int]

_WORTH = 1.5  # spans that are not nodes must be this many times faster to be chosen
_MOST = 16  # up to this many machines, all ways to share out nodes are tried


def share_machines(size: int, weights: Sequence[float], machines: Sequence[int]) -> list[Span]:
    """Cut [0, size) into a span for each worker, none empty, in proportion to weights.

    Args:
        size: The number of shards.
        weights: How much each worker is to do.
        machines: The machine that each of them is on, counted from 0; those of one machine are neighbours.
    """
    free = share(size, weights)
    if machines[-1] == 0:
        return free
    of_machine = [
        [w for w, m in zip(weights, machines, strict=True) if m == machine] for machine in range(machines[-1] + 1)
    ]
    nodes = _nodes(size, tuple((sum(mine), len(mine)) for mine in of_machine))
    if nodes is None:
        return free
    spans = []
    for (first, end), mine in zip(nodes, of_machine, strict=True):
        spans += [(first + a, first + b) for a, b in share(end - first, mine)]
    slowest = [max((b - a) / w for (a, b), w in zip(each, weights, strict=True)) for each in (free, spans)]
    return free if slowest[1] > _WORTH * slowest[0] else spans


def machine_spans(spans: Sequence[Span], machines: Sequence[int]) -> list[Span]:
    """The shards of each machine, from those of its workers."""
    found: dict[int, Span] = {}
    for (first, end), machine in zip(spans, machines, strict=True):
        found[machine] = (found.get(machine, (first, end))[0], end)
    return [found[machine] for machine in sorted(found)]


def _nodes(size: int, machines: tuple[tuple[float, int], ...]) -> list[Span] | None:
    """A node of the tree over `size` shards for each machine, given as (weight, workers); None if there is no way."""
    children = _children(size)
    ends = [0, *accumulate(weight for weight, _ in machines)]

    @cache
    def best(node: Span, first: int, end: int) -> tuple[float, tuple[Span, ...]] | None:
        """How long the slowest of some machines takes for the shards of a node, at best, and their nodes."""
        width = node[1] - node[0]
        if end - first == 1:
            weight, workers = machines[first]
            return (width / weight, (node,)) if width >= workers else None
        if node not in children or end - first > width:
            return None
        left, right = children[node]
        splits = range(first + 1, end)
        if len(machines) > _MOST:  # the split that comes closest to the shares, and its neighbours
            aim = ends[first] + (ends[end] - ends[first]) * (left[1] - left[0]) / width
            closest = min(splits, key=lambda split: (abs(ends[split] - aim), split))
            splits = range(max(closest - 1, first + 1), min(closest + 2, end))
        found = None
        for split in splits:
            one, other = best(left, first, split), best(right, split, end)
            if one is not None and other is not None:
                time = max(one[0], other[0])
                if found is None or time < found[0]:
                    found = (time, one[1] + other[1])
        return found

    found = best((0, size), 0, len(machines))
    return None if found is None else list(found[1])


@lru_cache(maxsize=64)
def _children(size: int) -> dict[Span, tuple[Span, Span]]:
    """The two children of every node that has any."""
    nodes = tree.tree_nodes(size)
    found = {}
    for first, end in nodes:
        if end - first > 1:
            middle = max(stop for start, stop in nodes if start == first and stop < end)
            found[first, end] = ((first, middle), (middle, end))
    return found
