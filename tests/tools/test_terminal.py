"""A picture of a terminal is what was on its screen."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import terminal

    return terminal


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("a\r\nb", ["a", "b"]),
        ("0 %\r50 %\r100 %", ["100 %"]),
        ("a long line\rshort", ["shortg line"]),
        ("a long line\rshort\x1b[K", ["short"]),
        ("one\r\ntwo\x1b[A\rthe first", ["the first", "two"]),
        ("\x1b[1;31mred\x1b[0m", ["red"]),
        ("ab\bc", ["ac"]),
    ],
)
def test_a_screen_has_what_was_written_last(terminal, written, lines):
    screen = terminal.Screen()
    screen.show(written)
    assert screen.lines == lines


def test_a_command_is_recorded_in_a_terminal_and_drawn(terminal, tmp_path, monkeypatch):
    out = tmp_path / "new" / "out.svg"
    program = "import sys; print(sys.stdout.isatty()); print('<&>')"
    monkeypatch.setattr("sys.argv", ["terminal.py", str(out), sys.executable, "-c", program])
    assert terminal.main() == 0
    _, *shown = [element.text for element in ET.parse(out).iter("{http://www.w3.org/2000/svg}text")]
    assert shown == ["True", "<&>"]


def test_a_command_that_fails_is_not_drawn(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["terminal.py", str(tmp_path / "out.svg"), sys.executable, "-c", "raise SystemExit(3)"]
    )
    assert terminal.main() == 3
    assert not list(tmp_path.iterdir())


def test_the_pictures_of_the_readme_come_after_less_than_a_screen_of_text():
    lines = (ROOT / "README.md").read_text().splitlines()
    pictures = [number for number, line in enumerate(lines) if line.startswith("![")]
    assert len(pictures) == 2
    assert pictures[0] <= 25
    for number in pictures:
        assert (ROOT / lines[number].rpartition("](")[2].rstrip(")")).exists()
