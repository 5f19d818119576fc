"""A canvas that writes self-contained SVG, and the colours of all our pictures."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

__all__ = ["INK", "MUTED", "PAPER", "Canvas", "colour", "num_letters"]

INK, MUTED, PAPER = "#1f2933", "#7b8794", "#ffffff"
_PALETTE = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#b07aa1",
    "#76b7b2",
    "#edc948",
    "#ff9da7",
    "#9c755f",
    "#6b6ecf",
)
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LETTER = 0.56  # the width of a letter as a fraction of its height


def colour(number: int) -> str:
    """The colour of a worker or device."""
    if number < len(_PALETTE):
        return _PALETTE[number]
    return f"hsl({number * 137.508 % 360:.0f} 48% 52%)"


def num_letters(width: float, size: float) -> int:
    """How many letters of a size fit into a width."""
    return max(int(width / (_LETTER * size)), 1)


class Canvas:
    """Collects shapes, from back to front. Lengths are pixels; y grows downwards."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 6.0,
        opacity: float = 1.0,
        tip: str = "",
    ) -> None:
        """A rectangle with round corners; `tip` is shown when a pointer rests on it."""
        self._add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}" opacity="{opacity:g}"',
            "rect",
            tip,
        )

    def circle(self, x: float, y: float, radius: float, *, fill: str, stroke: str = "none", tip: str = "") -> None:
        """A disc."""
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" stroke="{stroke}"', "circle", tip)

    def curve(
        self, points: Sequence[tuple[float, float]], *, stroke: str = MUTED, width: float = 1.5, arrow: bool = False
    ) -> None:
        """A smooth line downwards (or upwards) through points, vertical at each of them."""
        text = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
        for (x, y), (to_x, to_y) in pairwise(points):
            half = (to_y - y) / 2
            text += f" C{x:.1f},{y + half:.1f} {to_x:.1f},{to_y - half:.1f} {to_x:.1f},{to_y:.1f}"
        end = ' marker-end="url(#tip)"' if arrow else ""
        self._parts.append(f'<path d="{text}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{end}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12.0,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """A line of text whose middle is at height y; shortened if it is longer than `room`."""
        whole = text
        if room is not None and len(text) > num_letters(room, size):
            text = text[: max(num_letters(room, size) - 1, 1)] + "\u2026"
        tip = f"<title>{escape(whole)}</title>" if text != whole else ""
        weight = ' font-weight="600"' if bold else ""
        y += 0.35 * size  # the baseline: many viewers do not know `dominant-baseline`
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{tip}{escape(text)}</text>"
        )

    def render(self, width: float, height: float) -> str:
        """The whole picture."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{_FONT}" role="img">\n'
            f"<title>{escape(self._title)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0.8 L7,4 L0,7.2 z" fill="{MUTED}"/></marker></defs>\n'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )

    def _add(self, start: str, name: str, tip: str) -> None:
        self._parts.append(f"{start}><title>{escape(tip)}</title></{name}>" if tip else f"{start}/>")
