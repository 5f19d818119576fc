"""Laying out the boxes of a graph: layer by layer from top to bottom, with few crossings and straight edges.

The usual four steps: a layer for every node, stand-ins where an edge passes a layer, an order in every layer by the
mean place of the neighbours, and places as close to the neighbours as the boxes allow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Placed", "place"]

_SWEEPS = 12
_STAND_IN = 26.0  # the width that an edge takes where it passes a layer
Point = tuple[float, float]


@dataclass(frozen=True)
class Placed:
    """A layout: the middle of every box, the points of every edge, and the size of the whole."""

    boxes: dict[str, Point]
    edges: dict[tuple[str, str], list[Point]]
    width: float
    height: float


class _Grid:
    """Layers of numbers: real nodes and stand-ins, with their neighbours above and below."""

    def __init__(self, nodes: Sequence[str], edges: Sequence[tuple[str, str]]) -> None:
        number = {node: i for i, node in enumerate(nodes)}
        self.layer_of = _layers(len(nodes), [(number[a], number[b]) for a, b in edges])
        self.above: list[list[int]] = [[] for _ in nodes]
        self.below: list[list[int]] = [[] for _ in nodes]
        self.chains: dict[tuple[str, str], list[int]] = {}
        for a, b in edges:
            chain = [number[a]]
            for layer in range(self.layer_of[number[a]] + 1, self.layer_of[number[b]]):
                chain.append(len(self.layer_of))
                self.layer_of.append(layer)
                self.above.append([])
                self.below.append([])
            chain.append(number[b])
            self.chains[a, b] = chain
            for upper, lower in pairwise(chain):
                self.below[upper].append(lower)
                self.above[lower].append(upper)
        self.layers: list[list[int]] = [[] for _ in range(max(self.layer_of, default=0) + 1)]
        for item, layer in enumerate(self.layer_of):
            self.layers[layer].append(item)


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The layer below all inputs of a node; a node without inputs goes right above its first user."""
    layer = [0] * count
    for a, b in sorted(edges, key=lambda edge: edge[1]):  # nodes come in an order in which they can be computed
        layer[b] = max(layer[b], layer[a] + 1)
    fed = {b for _, b in edges}
    first_taker: dict[int, int] = {}
    for a, b in edges:
        first_taker[a] = min(first_taker.get(a, layer[b]), layer[b])
    for node, taker in first_taker.items():
        if node not in fed:
            layer[node] = taker - 1
    return layer


def place(
    nodes: Sequence[str], edges: Sequence[tuple[str, str]], sizes: Mapping[str, Point], gap: float, rise: float
) -> Placed:
    """Place boxes.

    Args:
        nodes: In an order in which every edge goes from an earlier to a later one.
        edges: (from, to), each once.
        sizes: Width and height of every box.
        gap: Between neighbours in a layer.
        rise: Between layers.
    """
    grid = _Grid(nodes, edges)
    widths = [sizes[node][0] for node in nodes]
    widths += [_STAND_IN] * (len(grid.layer_of) - len(nodes))
    _order(grid)
    xs = _straighten(grid, widths, gap)
    ys, heights, y = [], [], 0.0
    for layer in grid.layers:
        height = max((sizes[nodes[item]][1] for item in layer if item < len(nodes)), default=0.0)
        ys.append(y + height / 2)
        heights.append(height)
        y += height + rise
    left = min((x - width / 2 for x, width in zip(xs, widths, strict=True)), default=0.0)
    xs = [x - left for x in xs]
    boxes = {node: (xs[i], ys[grid.layer_of[i]]) for i, node in enumerate(nodes)}
    lines: dict[tuple[str, str], list[Point]] = {}
    for (a, b), chain in grid.chains.items():
        middle = [point for i in chain[1:-1] for point in _past(xs[i], ys[grid.layer_of[i]], heights[grid.layer_of[i]])]
        start = (xs[chain[0]], boxes[a][1] + sizes[a][1] / 2)
        lines[a, b] = [start, *middle, (xs[chain[-1]], boxes[b][1] - sizes[b][1] / 2)]
    right = max((x + width / 2 for x, width in zip(xs, widths, strict=True)), default=0.0)
    return Placed(boxes, lines, right, y - rise)


def _past(x: float, y: float, height: float) -> list[Point]:
    """Straight through a layer."""
    return [(x, y - height / 2), (x, y + height / 2)]


def _order(grid: _Grid) -> None:
    """Sort each layer by the mean place of its neighbours above, then below, and so on; keep the fewest crossings."""
    best, fewest = [list(layer) for layer in grid.layers], _crossings(grid)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = grid.above if down else grid.below
        places = _places(grid)
        for layer in grid.layers if down else reversed(grid.layers):
            mean = {i: sum(places[n] for n in near[i]) / len(near[i]) if near[i] else float(places[i]) for i in layer}
            layer.sort(key=mean.__getitem__)
            places.update({item: place for place, item in enumerate(layer)})
        found = _crossings(grid)
        if found < fewest:
            best, fewest = [list(layer) for layer in grid.layers], found
    grid.layers = best


def _places(grid: _Grid) -> dict[int, int]:
    return {item: place for layer in grid.layers for place, item in enumerate(layer)}


def _crossings(grid: _Grid) -> int:
    places = _places(grid)
    total = 0
    for layer in grid.layers:
        seen: list[int] = []
        for item in layer:
            lower = [places[n] for n in grid.below[item]]
            total += sum(1 for a in seen for b in lower if a > b)
            seen += lower
    return total


def _straighten(grid: _Grid, widths: Sequence[float], gap: float) -> list[float]:
    """Move every layer as close to its neighbours as the boxes allow, up and down in turn."""
    xs = [0.0] * len(widths)
    for layer in grid.layers:
        _settle(layer, [0.0] * len(layer), xs, widths, gap)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = grid.above if down else grid.below
        for layer in grid.layers if down else reversed(grid.layers):
            wanted = [sum(xs[n] for n in near[i]) / len(near[i]) if near[i] else xs[i] for i in layer]
            _settle(layer, wanted, xs, widths, gap)
    return xs


def _settle(
    layer: Sequence[int], wanted: Sequence[float], xs: list[float], widths: Sequence[float], gap: float
) -> None:
    """The places closest to the wanted ones (in least squares) that keep the order and the gaps.

    Neighbours that push each other share the mean of what they want.
    """
    offsets = [0.0]
    for a, b in pairwise(layer):
        offsets.append(offsets[-1] + (widths[a] + widths[b]) / 2 + gap)
    blocks: list[tuple[float, int]] = []  # (sum of what is wanted, how many)
    for want, offset in zip(wanted, offsets, strict=False):
        total, count = want - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    starts = [total / count for total, count in blocks for _ in range(count)]
    for item, start, offset in zip(layer, starts, offsets, strict=False):
        xs[item] = start + offset
