"""Makes docs/performance.md and its charts of the records in benchmarks/results.

``python benchmarks/performance.py`` writes them, with ``--check`` it only says whether they are what it would write.
The words around the tables are in ``performance.md`` beside this file: there, a line ``@engine`` stands for all that
``results/engine.json`` has, ``@engine?`` if it is there at all. So no figure of the page lacks the command that prints
it, its date and its machine.
"""

import argparse
import sys
from pathlib import Path

import charts
from results import FOLDER, Record

ROOT = Path(__file__).resolve().parent.parent
WORDS = Path(__file__).with_suffix(".md")
HIDDEN = {"processor", "cores", "GPU", "torch", "load average before"}


def pages(words: str, results: Path) -> dict[str, str]:
    """What belongs into docs/, by path: the page and its charts.

    Raises:
        ValueError: The words name a record that is not there, or leave one out.
    """
    found = {path.stem: Record.load(path) for path in sorted(results.glob("*.json"))}
    lines, drawn, used = [], {}, set()
    for line in words.splitlines():
        name = line.removeprefix("@").removesuffix("?")
        if not line.startswith("@"):
            lines.append(line)
            continue
        if line.endswith("?") and name not in found:
            lines.append(f"Not measured yet: `make bench-{name}` does it.")
            continue
        if name not in found:
            raise ValueError(f"{line}: there is no {name}.json in {results}; run its benchmark with --json")
        used.add(name)
        text, pictures = section(name, found[name])
        lines.append(text)
        drawn |= pictures
    if left := sorted(found.keys() - used):
        raise ValueError(f"{WORDS.name} leaves out {', '.join(left)}; it needs a line @{left[0]}")
    return {"performance.md": "\n".join(lines) + "\n", **drawn}


def section(name: str, record: Record) -> tuple[str, dict[str, str]]:
    """The text of a record, and its charts by path."""
    parts, drawn = [f"`{record.command}`, {origin(record)}"], {}
    for number, table in enumerate(record.tables, 1):
        parts += [f"**{table.title}**"] if table.title else []
        parts.append(table.markdown())
        if table.chart:
            path = f"charts/{name}-{number}.svg" if len(record.tables) > 1 else f"charts/{name}.svg"
            drawn[path] = charts.svg(table, table.chart)
            parts.append(f"![{table.title or name}: {table.chart.means}]({path})")
    return "\n\n".join([*parts, *record.notes]), drawn


def origin(record: Record) -> str:
    """When and where the figures come from."""
    facts = record.machine
    where = [facts["GPU"]] if "GPU" in facts else [f"{facts['processor']}, {facts['cores']} cores"]
    load = facts.get("load average before")
    loaded = "load not noted" if load is None else f"load average {load} before"
    more = [f"{name} {value}" for name, value in facts.items() if name not in HIDDEN]
    return ", ".join([record.date, *where, f"torch {facts['torch']}", loaded, *more])


def main() -> int:
    """Write the page and its charts, or check them; 1 if they differ."""
    parser = argparse.ArgumentParser(description="Make docs/performance.md of benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is not as it should be")
    options = parser.parse_args()
    docs = ROOT / "docs"
    try:
        wanted = {docs / path: text for path, text in pages(WORDS.read_text(), FOLDER).items()}
    except ValueError as error:
        parser.error(str(error))
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    spare = sorted(set((docs / "charts").glob("*.svg")) - set(wanted))
    if options.check:
        for path in stale + spare:
            print(f"{path.relative_to(ROOT)} is not what the results say: make performance", file=sys.stderr)
        return 1 if stale or spare else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path])
        print(f"written: {path.relative_to(ROOT)}")
    for path in spare:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
