"""Charts of tables as SVG: bars from the peer's figure to ours, or from 0 where there is no peer.

The text of a chart is its data: the same table gives the same bytes. It has no background and takes the colours of a
light or a dark page.
"""

import math
from collections.abc import Callable, Iterator
from html import escape

from results import Chart, Table

WIDTH, LEFT, RIGHT, BAR, GAP = 860, 380, 60, 11, 7
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#444}.a{fill:#3b6fb6}.b{fill:#93b4dd}"
    ".goal{stroke:#c2571a;stroke-width:2}.base{stroke:#777}.n{font-size:11px}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.a{fill:#6f9fe0}.b{fill:#3f5f8f}.goal{stroke:#f0883e}}"
)


def figures(cell: str) -> list[float]:
    """The numbers of a cell: two of ``0.94 / 0.99``, none of ``-``."""
    try:
        return [float(part) for part in cell.split(" / ")]
    except ValueError:
        return []


def svg(table: Table, chart: Chart) -> str:
    """The chart of a table.

    Raises:
        ValueError: The table has nothing to draw.
    """
    column = {name: number for number, name in enumerate(table.columns)}
    rows = []
    for cells in table.rows:
        values = [value for name in chart.values for value in figures(cells[column[name]])]
        goals = figures(cells[column[chart.goal]]) if chart.goal else []
        if values:
            rows.append((", ".join(cells[column[name]] for name in chart.labels), values, goals))
    if not rows:
        raise ValueError(f"none of the columns {', '.join(chart.values)} has a figure")
    place = scale([each for _, values, goals in rows for each in (*values, *goals)], chart.base)
    base = place(0.0 if chart.base is None else chart.base)
    body, height = [], 28
    for label, values, goals in rows:
        body += group(label, values, goals, height, place, base)
        height += BAR * len(values) + GAP
    goal = " (the mark: the goal)" if any(goals for _, _, goals in rows) else ""
    heading = f'<text x="{LEFT}" y="16">{escape(chart.means + goal)}</text>'
    line = f'<line class="base" x1="{base:.1f}" x2="{base:.1f}" y1="22" y2="{height}"/>'
    size = f'viewBox="0 0 {WIDTH} {height + 4}" width="{WIDTH}" height="{height + 4}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(chart.means)}">'
    return "\n".join([head, f"<style>{STYLE}</style>", heading, *body, line, "</svg>", ""])


def scale(values: list[float], base: float | None) -> Callable[[float], float]:
    """Where a figure lies from left to right: by its logarithm around a base, else by itself from 0."""
    width = WIDTH - LEFT - RIGHT
    if base is None:
        top = max(values)
        return lambda value: LEFT + width * value / top
    low, high = (math.log(pick([*values, base])) for pick in (min, max))
    return lambda value: LEFT + width * (math.log(value) - low) / ((high - low) or 1.0)


def group(
    label: str, values: list[float], goals: list[float], top: int, place: Callable[[float], float], base: float
) -> Iterator[str]:
    """The bars of one row, its label and its goal."""
    height = BAR * len(values)
    yield f'<text x="{LEFT - 8}" y="{top + height / 2 + 4:g}" text-anchor="end">{escape(label)}</text>'
    for number, value in enumerate(values):
        left, right, y = min(base, place(value)), max(base, place(value)), top + number * BAR
        kind = "ab"[number % 2]
        yield f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{max(right - left, 1):.1f}" height="{BAR - 1}"/>'
        yield f'<text class="n" x="{right + 4:.1f}" y="{y + BAR - 2}">{value:g}</text>'
    for goal in goals:
        x = place(goal)
        yield f'<line class="goal" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 1}" y2="{top + height}"/>'
