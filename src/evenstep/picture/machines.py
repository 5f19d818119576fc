"""Machines as SVG: the tree above, the devices with their shards below it, and the matrix of links."""

from collections.abc import Callable, Iterator
from itertools import groupby

from evenstep.core.errors import ConfigError
from evenstep.picture.svg import INK, MUTED, PAPER, Canvas, colour
from evenstep.picture.text import quantity, shard_words
from evenstep.plan.layout import Layout
from evenstep.plan.topology import Link, LinkKind, Topology

__all__ = ["draw_topology"]

_MOST = 256
_COLOURS = {
    LinkKind.NVLINK: "#2f9e44",
    LinkKind.MEMORY: "#38a3a5",
    LinkKind.BOARD: "#74b816",
    LinkKind.SWITCH: "#1c7ed6",
    LinkKind.BRIDGE: "#7048e8",
    LinkKind.SOCKET: "#f08c00",
    LinkKind.NETWORK: "#e8590c",
    LinkKind.SPINE: "#c92a2a",
}
_PITCH, _BOX, _MARGIN = 92.0, 76.0, 36.0
_LEVEL, _CELL = 54.0, 26.0


def draw_topology(topology: Topology, layout: Layout) -> str:
    """The picture, as SVG.

    Raises:
        ConfigError: There are more than 256 devices.
    """
    count = len(layout.order)
    if count > _MOST:
        raise ConfigError(f"{count} devices are too many for a picture of at most {_MOST}; write JSON instead")
    canvas = Canvas(f"{layout.num_shards} shards on {count} devices")
    xs = {device: _MARGIN + 40 + _PITCH * (place + 0.5) for place, device in enumerate(layout.order)}
    canvas.text(_MARGIN, 28, f"{layout.num_shards} shards on {count} devices", size=18, bold=True)
    canvas.text(_MARGIN, 50, "sums move up the tree; a line has the colour of the link it crosses", fill=MUTED)
    depth = sum(1 for moves in layout.rounds() if moves)
    devices_y = 90 + _LEVEL * depth
    _draw_frames(canvas, topology, layout, xs, devices_y)
    _draw_tree(canvas, topology, layout, xs, devices_y)
    _draw_devices(canvas, topology, layout, xs, devices_y)
    bottom = devices_y + 128
    width = max(xs.values()) + _PITCH / 2 + _MARGIN
    if count <= 32:
        bottom = _draw_matrix(canvas, topology, layout, bottom)
        width = max(width, _MARGIN + 110 + _CELL * count + _MARGIN)
    right, bottom = _draw_legend(canvas, topology, layout, bottom + 10)
    return canvas.render(max(width, right, 520), bottom + 24)


def _draw_frames(canvas: Canvas, topology: Topology, layout: Layout, xs: dict[int, float], y: float) -> None:
    """Draw frames around neighbours of one machine, and inside it of one NUMA node."""
    for members in _runs(layout, lambda device: topology.places[device][0]):
        left, right = xs[members[0]] - _PITCH / 2 + 1, xs[members[-1]] + _PITCH / 2 - 1
        machine = topology.machine_of(members[0])
        rack = f", rack {machine.rack}" if machine.rack is not None else ""
        canvas.rect(left, y - 14, right - left, 122, fill="#f5f7fa", stroke="#cbd2d9", radius=10)
        canvas.text((left + right) / 2, y + 96, machine.name + rack, fill=MUTED, anchor="middle", room=right - left - 8)
        for inner in groupby(members, lambda device: topology.device(device).numa):
            near = list(inner[1])
            if len({d.numa for d in machine.devices}) > 1:
                begin, end = xs[near[0]] - _PITCH / 2 + 5, xs[near[-1]] + _PITCH / 2 - 5
                canvas.rect(begin, y - 8, end - begin, 94, fill="#e9eef5", radius=8, tip=f"NUMA node {inner[0]}")


def _runs(layout: Layout, key: Callable[[int], int]) -> Iterator[list[int]]:
    for _, members in groupby(layout.order, key):
        yield list(members)


def _draw_tree(canvas: Canvas, topology: Topology, layout: Layout, xs: dict[int, float], bottom: float) -> None:
    """Draw the tree: each sum that moves joins its left neighbour, one level higher."""
    tops = {device: (xs[device], bottom) for device in layout.order}
    level = 0
    dots: list[tuple[float, float, int, str]] = []
    for moves in layout.rounds():
        level += bool(moves)
        y = bottom - _LEVEL * level
        for move in moves:
            left, right = tops[move.target], tops[move.source]
            link = topology.link(move.source, move.target)
            x = (left[0] + right[0]) / 2
            canvas.curve([left, (x, y)], stroke="#9aa5b1", width=2)
            canvas.curve([right, (x, y)], stroke=_COLOURS[link.kind], width=3)
            words = f"the sum of {shard_words(*move.node)} moves to {topology.names[move.target]} over {link.kind}"
            dots.append((x, y, move.target, words))
            tops[move.target] = (x, y)
    for x, y, device, words in dots:
        canvas.circle(x, y, 6, fill=colour(device), stroke=PAPER, tip=words)


def _draw_devices(canvas: Canvas, topology: Topology, layout: Layout, xs: dict[int, float], y: float) -> None:
    for device, (first, end) in zip(layout.order, layout.spans, strict=True):
        x, about = xs[device], topology.device(device)
        canvas.rect(x - _BOX / 2, y, _BOX, 44, fill=colour(device), radius=8, tip=f"{about}")
        canvas.text(x, y + 16, about.name, fill=PAPER, anchor="middle", bold=True, room=_BOX - 6)
        speed = "" if about.speed == 1.0 else f"speed {about.speed:g}"
        canvas.text(x, y + 32, speed or f"NUMA {about.numa}", size=10, fill=PAPER, anchor="middle")
        count = end - first
        words = shard_words(first, end)
        step = min(11.0, _BOX / count)
        for k in range(min(count, 64)):
            at = x + (k - (min(count, 64) - 1) / 2) * step
            canvas.rect(at - step * 0.42, y + 50, step * 0.84, 10, fill=colour(device), radius=2, opacity=0.55)
        canvas.text(x, y + 72, words, size=10, fill=INK, anchor="middle", room=_PITCH - 6)


def _draw_matrix(canvas: Canvas, topology: Topology, layout: Layout, top: float) -> float:
    left = _MARGIN + 110
    canvas.text(_MARGIN, top + 14, "what lies between two devices", bold=True)
    top += 34
    for row, a in enumerate(layout.order):
        y = top + _CELL * row
        canvas.text(left - 10, y + _CELL / 2, topology.names[a], size=11, anchor="end", room=100)
        for column, b in enumerate(layout.order):
            x = left + _CELL * column
            if a == b:
                canvas.rect(x + 1, y + 1, _CELL - 2, _CELL - 2, fill="#e4e7eb", radius=4)
                continue
            link = topology.link(a, b)
            tip = f"{topology.names[a]} and {topology.names[b]}: {link.kind}, {_figures(link)}"
            canvas.rect(x + 1, y + 1, _CELL - 2, _CELL - 2, fill=_COLOURS[link.kind], radius=4, tip=tip)
    return top + _CELL * len(layout.order) + 10


def _figures(link: Link) -> str:
    return f"{quantity(link.bandwidth_bytes_per_s, 'B/s')}, {quantity(link.latency_s, 's')}"


def _draw_legend(canvas: Canvas, topology: Topology, layout: Layout, y: float) -> tuple[float, float]:
    order = layout.order
    near = {topology.link(a, b).kind for a in order[:64] for b in order[:64] if a != b}
    kinds = near | {topology.link(m.source, m.target).kind for moves in layout.rounds() for m in moves}
    x = _MARGIN
    for kind in [kind for kind in LinkKind if kind in kinds]:
        canvas.rect(x, y, 14, 14, fill=_COLOURS[kind], radius=3)
        canvas.text(x + 20, y + 7, str(kind), size=12)
        x += 96
    return x + _MARGIN, y + 14
