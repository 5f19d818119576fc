"""A network as SVG and HTML: the flow of data, the shards of each worker, and the colour of each parameter's owner."""

from html import escape
from textwrap import wrap

from evenstep.picture.layered import place
from evenstep.picture.network import Network, Node, Parameter
from evenstep.picture.svg import INK, MUTED, PAPER, Canvas, colour, num_letters
from evenstep.picture.text import quantity, shard_words

__all__ = ["draw", "page"]

_MARGIN = 32.0
_NOTE = 590.0  # the width of a line of the note: no picture is narrower
_ROW, _CHIPS = 17.0, 6  # of a parameter; how many are shown in a box
_FILLS = {"input": "#e4e7eb", "output": "#e4e7eb", "function": "#f5f7fa", "connector": "#fff7e0"}
_SMALL = ("function", "connector")
_MEETS = "#f0a202"


def draw(network: Network) -> str:
    """The picture, as SVG that needs nothing from elsewhere."""
    canvas = Canvas(f"{network.name}: {_summary(network)}")
    canvas.text(_MARGIN, 34, network.name, size=20, bold=True)
    canvas.text(_MARGIN, 58, _summary(network), fill=MUTED)
    note = wrap(network.note, num_letters(_NOTE, 11))
    for number, line in enumerate(note):
        canvas.text(_MARGIN, 78 + 15 * number, line, size=11, fill="#c05621")
    shards_right, top = _draw_shards(canvas, network, 110 + 15 * max(len(note) - 1, 0))
    workers_right, top = _draw_workers(canvas, network, top + 18)
    top += 26
    sizes = {node.id: _size(node) for node in network.nodes}
    placed = place([node.id for node in network.nodes], network.edges, sizes, gap=28, rise=34)
    width = max(placed.width + 2 * _MARGIN, shards_right + _MARGIN, workers_right + _MARGIN, 560)
    left = (width - placed.width) / 2
    for points in placed.edges.values():
        canvas.curve([(x + left, y + top) for x, y in points], stroke="#9aa5b1", arrow=True)
    known = {parameter.name: parameter for parameter in network.partition.parameters}
    for node in network.nodes:
        x, y = placed.boxes[node.id]
        _draw_node(canvas, node, known, (x + left, y + top), sizes[node.id])
    return canvas.render(width, top + placed.height + _MARGIN)


def _summary(network: Network) -> str:
    parameters = network.partition.parameters
    size = quantity(sum(p.num_bytes for p in parameters), "B")
    workers = len(network.partition.spans)
    return (
        f"{len(parameters)} parameters, {size}; {network.partition.num_shards} shards on {workers} "
        f"worker{'s'[: workers > 1]}; traced by {network.source}"
    )


def _draw_shards(canvas: Canvas, network: Network, top: float) -> tuple[float, float]:
    """The shards of a batch in the colours of their workers, under the tree that adds them up."""
    count = network.partition.num_shards
    step = 30.0 if count <= 32 else max(960.0 / count, 4.0)
    x0 = _MARGIN
    depth = (count - 1).bit_length() if count <= 32 else 0
    y = top + 20.0 * depth
    middles = [x0 + (k + 0.5) * step for k in range(count)]
    tops = [(x, y) for x in middles]
    for level in range(1, depth + 1):
        above = []
        for left, right in zip(tops[::2], tops[1::2], strict=False):
            joint = ((left[0] + right[0]) / 2, y - 20.0 * level)
            canvas.curve([left, joint], stroke="#cbd2d9")
            canvas.curve([right, joint], stroke="#cbd2d9")
            above.append(joint)
        tops = above + tops[2 * len(above) :]
    for worker, (first, end) in enumerate(network.partition.spans):
        for k in range(first, end):
            tip = f"shard {k} on worker {worker}"
            canvas.rect(middles[k] - step * 0.45, y, step * 0.9, 24, fill=colour(worker), radius=4, tip=tip)
            if step >= 20:
                canvas.text(middles[k], y + 12, str(k), size=11, fill=PAPER, anchor="middle", bold=True)
    canvas.text(x0 + count * step + 10, y + 12, "one batch, in shards; the tree adds what crosses them", fill=MUTED)
    return x0 + count * step + 310, y + 24


def _draw_workers(canvas: Canvas, network: Network, top: float) -> tuple[float, float]:
    """What each worker has: its shards, and how much it owns."""
    owned = [sum(p.num_bytes for p in network.partition.owned(w)) for w in range(len(network.partition.spans))]
    most = max(owned) or 1
    for worker, (first, end) in enumerate(network.partition.spans):
        y = top + 22 * worker
        canvas.circle(_MARGIN + 7, y + 8, 6, fill=colour(worker))
        words = f"worker {worker}: {shard_words(first, end)}, owns {len(network.partition.owned(worker))} parameters"
        canvas.text(_MARGIN + 22, y + 8, words)
        canvas.rect(_MARGIN + 330, y + 2, 160 * owned[worker] / most, 12, fill=colour(worker), radius=3, opacity=0.6)
        canvas.text(
            _MARGIN + 338 + 160 * owned[worker] / most, y + 8, quantity(owned[worker], "B"), size=11, fill=MUTED
        )
    return _MARGIN + 600, top + 22 * len(owned)


def _size(node: Node) -> tuple[float, float]:
    rows = min(len(node.parameters), _CHIPS) + (len(node.parameters) > _CHIPS)
    parts = [node.label, _kind_line(node)]
    letters = len("".join(parts)) if node.kind in _SMALL else max(map(len, parts))
    width = min(max(7.2 * letters + 26, 110.0), 260.0)
    return max(width, 200.0 if rows else 0.0), (28 if node.kind in _SMALL else 42) + rows * _ROW + (6 if rows else 0)


def _kind_line(node: Node) -> str:
    shape = "" if node.shape is None else "  \u2192 " + _shape(node.shape)
    if node.kind in _FILLS:
        return (node.kind if node.kind not in _SMALL else "") + shape
    return node.kind + shape


def _shape(shape: tuple[int, ...]) -> str:
    return "\u00d7".join(map(str, shape)) or "scalar"


def _draw_node(
    canvas: Canvas, node: Node, known: dict[str, Parameter], middle: tuple[float, float], size: tuple[float, float]
) -> None:
    (x, y), (width, height) = middle, size
    left, top = x - width / 2, y - height / 2
    fill = _FILLS.get(node.kind, "#fff7e0" if node.meets else "#eaf2fb" if node.parameters else "#f5f7fa")
    stroke = _MEETS if node.meets else "#cbd2d9"
    tip = f"{node.label}: {node.kind}({node.detail})" + ("; all shards meet here" if node.meets else "")
    tip += "" if node.worker is None else f"; computed by worker {node.worker} for all shards"
    canvas.rect(left, top, width, height, fill=fill, stroke=stroke, radius=14 if node.kind in _FILLS else 8, tip=tip)
    if node.worker is not None:
        canvas.rect(left, top + 6, 4, height - 12, fill=colour(node.worker), radius=2)
    if node.meets and node.kind not in _SMALL:
        canvas.text(left + width - 10, top + 14, "shards meet", size=9, fill="#8d5f00", anchor="end")
    if node.kind in _SMALL:
        line = node.label + _kind_line(node)
        canvas.text(x, top + 14, line, size=11, fill=INK, anchor="middle", room=width - 12)
    else:
        room = width - (80 if node.meets else 20)
        canvas.text(left + 10, top + 14, node.label, size=12, bold=True, room=room)
        canvas.text(left + 10, top + 30, _kind_line(node), size=11, fill=MUTED, room=width - 20)
    at = top + (28 if node.kind in _SMALL else 42)
    for number, name in enumerate(node.parameters[:_CHIPS]):
        _draw_parameter(canvas, known[name], node.label, left + 8, at + number * _ROW, width - 16)
    rest = node.parameters[_CHIPS:]
    shown = rest[: int((width - 60) / 12)]
    for number, name in enumerate(shown):
        shade, tip = _owner(known[name])
        canvas.rect(left + 8 + 12 * number, at + _CHIPS * _ROW + 2, 10, 10, fill=shade, radius=3, opacity=0.9, tip=tip)
    if rest:
        canvas.text(left + 14 + 12 * len(shown), at + _CHIPS * _ROW + 7, f"{len(rest)} more", size=10, fill=MUTED)


def _owner(parameter: Parameter) -> tuple[str, str]:
    """The colour of a parameter's owner, and a description of the parameter."""
    owner = "frozen" if parameter.owner is None else f"worker {parameter.owner}"
    shade = "#9aa5b1" if parameter.owner is None else colour(parameter.owner)
    return shade, f"{parameter.name} {_shape(parameter.shape)}, {quantity(parameter.num_bytes, 'B')}, {owner}"


def _draw_parameter(canvas: Canvas, parameter: Parameter, inside: str, x: float, y: float, width: float) -> None:
    (shade, tip), shape = _owner(parameter), _shape(parameter.shape)
    canvas.rect(x, y, width, _ROW - 3, fill=shade, radius=4, opacity=0.9, tip=tip)
    short, letters = parameter.name.removeprefix(inside + "."), num_letters(width * 0.55, 10)
    if len(short) > letters:
        short = "\u2026" + short[1 - letters :]  # the end of a path says most
    canvas.text(x + 7, y + 7, short, size=10, fill=PAPER, bold=True)
    canvas.text(x + width - 7, y + 7, shape, size=10, fill=PAPER, anchor="end", room=width * 0.4)


_STYLE = """
body { margin: 24px; font: 14px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; color: #1f2933; }
figure { margin: 0 0 24px; overflow-x: auto; border: 1px solid #e4e7eb; border-radius: 8px; }
rect:hover { stroke: #1f2933; stroke-width: 1.5; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: left; }
td.figure { text-align: right; font-variant-numeric: tabular-nums; } tr:hover { background: #f5f7fa; }
i { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px; }
"""


def page(network: Network) -> str:
    """The picture and a table of owners, as one HTML page that needs nothing from elsewhere."""
    rows = []
    for parameter in network.partition.parameters:
        worker = parameter.owner
        dot = "" if worker is None else f'<i style="background:{colour(worker)}"></i>worker {worker}'
        shape = _shape(parameter.shape)
        rows.append(
            f'<tr><td>{escape(parameter.name)}</td><td>{shape}</td><td class="figure">{parameter.num_bytes:,}</td>'
            f"<td>{dot or 'frozen'}</td></tr>"
        )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(network.name)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<figure>\n{draw(network)}</figure>\n"
        "<table><thead><tr><th>parameter</th><th>shape</th><th>bytes</th><th>owner</th></tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table>\n</body></html>\n"
    )
