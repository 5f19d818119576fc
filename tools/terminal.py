"""Runs a command in a terminal and writes what it shows in the end as an SVG: ``terminal.py OUT.svg COMMAND...``.

Nothing is invented: the picture is the screen, after every carriage return and line that was written over.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from html import escape
from pathlib import Path

COLUMNS, ROWS = 118, 60
ADVANCE, LINE, EDGE = 7.25, 17, 14
STYLE = (
    "rect{fill:#1b1f27;rx:6}text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dce5;"
    "white-space:pre}.typed{fill:#8fc7ff;font-weight:bold}"
)
TOKENS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n\b])|([^\x1b\r\n\b]+)|\x1b.")


class Screen:
    """The lines of a terminal that only appends, goes back to the left or up, and erases to the right."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def show(self, text: str) -> None:
        """Take what a program writes."""
        for amount, order, control, plain in TOKENS.findall(text):
            if plain:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + plain + line[self._column + len(plain) :]
                self._column += len(plain)
            elif control == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif control:
                self._column = 0 if control == "\r" else max(0, self._column - 1)
            elif order == "A":
                self._row = max(0, self._row - int(amount or 1))
            elif order == "K":
                self.lines[self._row] = self.lines[self._row][: self._column]


def recorded(command: list[str]) -> tuple[int, str]:
    """Run a command in a terminal of its own; returns its exit code and all that it wrote."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    written = b""
    try:
        while read := os.read(terminal, 1 << 16):
            sys.stdout.buffer.write(read)
            sys.stdout.flush()
            written += read
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    finally:
        os.close(terminal)  # hangs up on any process that is left
    return process.wait(), written.decode(errors="replace")


def svg(typed: str, lines: list[str]) -> str:
    """A terminal with a command in it, and the lines that it showed."""
    shown = [f"$ {typed}", *lines]
    while shown and not shown[-1].strip():
        shown.pop()
    width, height = round(max(map(len, shown)) * ADVANCE + 2 * EDGE), len(shown) * LINE + 2 * EDGE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    text = [
        f'<text class="{"shown" if number else "typed"}" x="{EDGE}" y="{EDGE + LINE * number + 12}" '
        f'xml:space="preserve">{escape(line.rstrip())}</text>'
        for number, line in enumerate(shown)
        if line.strip()
    ]
    label = f' role="img" aria-label="{escape(typed)} in a terminal">'
    frame = f'<rect width="{width}" height="{height}"/>'
    return "\n".join([head + label, f"<style>{STYLE}</style>", frame, *text, "</svg>", ""])


def main() -> int:
    """Run, draw, and give the command's exit code; a command that fails is not drawn."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    out, command = Path(sys.argv[1]), sys.argv[2:]
    code, written = recorded(command)
    if code == 0:
        screen = Screen()
        screen.show(written)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(svg(" ".join(command), screen.lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
