"""What a benchmark prints and keeps: its tables, with the command, the date and the machine that they belong to.

A benchmark begins a `Record` before it measures anything, gives it tables and notes, which are printed, and saves it
where ``--json FILE`` says. ``performance.py`` makes a page and its charts of the saved records. Nothing here imports
torch before it has to: the page is made without it.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"
AGAINST_PEERS: dict[str, Any] = {
    "values": ["ratio"],
    "labels": ["what"],
    "means": "times as long as the peer",
    "goal": "goal",
}


@dataclass(frozen=True)
class Chart:
    """What of a table is drawn: one group of bars a row.

    Attributes:
        values: The columns whose figures are drawn; a cell such as ``0.94 / 0.99`` has two of them.
        labels: The columns that name a row.
        means: What a figure is, in words: ``times as long as the peer``.
        base: The figure of the peer, from which bars go left and right on a logarithmic scale; None where there is no
            peer, and bars begin at 0.
        goal: The column of the goals, if there is one.
    """

    values: Sequence[str]
    labels: Sequence[str]
    means: str
    base: float | None = 1.0
    goal: str | None = None


@dataclass(frozen=True)
class Table:
    """A table as it is printed: every row has as many cells as there are columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    chart: Chart | None = None

    def markdown(self) -> str:
        """The table with aligned columns: the first to the left, the others to the right."""
        lines = [self.columns, *self.rows]
        widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(self.columns))]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        return "\n".join(
            "| "
            + " | ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            + " |"
            for line in (self.columns, rule, *self.rows)
        )


@dataclass
class Record:
    """All that one run of a benchmark has found."""

    command: str
    date: str
    machine: dict[str, str]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls) -> "Record":
        """A record of this process, with the load of the machine before anything was measured."""
        return cls(command(sys.argv), datetime.now(UTC).date().isoformat(), machine_facts())

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", **chart: Any) -> None:
        """Print a table and keep it; what `Chart` takes makes a chart of it."""
        drawn = Chart(**chart) if chart else None
        self.tables.append(Table(list(columns), [list(row) for row in rows], title, drawn))
        print(f"\n{title}\n" if title else "")
        print(self.tables[-1].markdown(), flush=True)

    def note(self, text: str) -> None:
        """Print a sentence and keep it."""
        self.notes.append(text)
        print(f"\n{text}", flush=True)

    def save(self, path: Path | None) -> None:
        """Print the machine, and write everything to a file if there is to be one."""
        print("\n" + "\n".join(f"{name}: {value}" for name, value in self.machine.items()))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Record":
        """The record of a file."""
        found = json.loads(path.read_text())
        for table in found["tables"]:
            table["chart"] = table["chart"] and Chart(**table["chart"])
        return cls(**{**found, "tables": [Table(**table) for table in found["tables"]]})


def command(arguments: Sequence[str]) -> str:
    """The command line that shows these figures, without where they are written to."""
    words = [word for word in arguments[1:] if not word.startswith("--json=")]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(arguments[0]).name}", *words])


def shown(rows: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """The rows, each told as progress as soon as it is there."""
    for row in rows:
        print("  ".join(row), file=sys.stderr, flush=True)
        yield row


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file as well")


def machine_facts() -> dict[str, str]:
    """What a reader must know about the machine to judge the figures."""
    import torch

    facts = {"processor": processor(), "cores": str(len(os.sched_getaffinity(0))), "torch": torch.__version__}
    if torch.cuda.is_available():
        facts["GPU"] = torch.cuda.get_device_name()
    return {**facts, "load average before": f"{os.getloadavg()[0]:.2f}"}


def processor() -> str:
    """The processor's name and the vector instructions that torch uses on it."""
    import torch

    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return f"{(names or [platform.machine()])[0]} ({torch.backends.cpu.get_cpu_capability()})"
