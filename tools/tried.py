"""Tries the wheel on Pythons and torches, and keeps a list: ``tried.py --wheel W --pair PYTHON TORCH ...``.

For each pair a fresh environment without a compiler gets the wheel and what it needs by pip; then, away from the
sources, evenstep is imported, the demo is run, and the tests of the engine that start no process. What came of it goes
into docs/tried.json, in the place of what was there of the same pair, and docs/tried.md is written from it.
``--page`` only writes the page.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST, PAGE = ROOT / "docs/tried.json", ROOT / "docs/tried.md"
BESIDES = ["scikit-learn", "pytest", "pytest-timeout", "hypothesis", "networkx"]  # what the demo and the tests need
ASK = (
    "import json, platform, torch, evenstep; from evenstep.native import arithmetic, core; "
    "print(json.dumps([platform.python_version(), torch.__version__, core.__file__]))"
)
HEAD = """# What it was tried on

One wheel, for every Python from 3.11 on. `make tried` installs it by pip into fresh environments without a compiler;
there it is imported, `examples/demo.py` is run (one worker, and three of which one is killed, end on the same weights;
the fingerprint is compared with the README's), and so are the tests of the engine that start no process.

"""
COLUMNS = ["Python", "torch", "import", "demo", "engine's tests", "date", "system", "wheel"]


def page(rows: list[dict[str, str]]) -> str:
    """The list as a page."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[name] for name in COLUMNS] for row in rows)]
    return HEAD + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


class Place:
    """A fresh environment, and a copy of the demo and the tests, in a folder."""

    def __init__(self, folder: Path, python: str) -> None:
        self._folder = folder
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        for name in ("examples", "tests", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "pyproject.toml"):
            shutil.copyfile(ROOT / name, folder / name)

    def run(self, *arguments: str, timeout_s: float = 1200.0) -> subprocess.CompletedProcess[str]:
        """Run Python there. A compiler fails if it is called."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EVENSTEP"))}
        command = [str(self._folder / "venv/bin/python"), *arguments]
        return subprocess.run(
            command, cwd=self._folder, env={**variables, "CC": "false"}, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip


def verdict(done: subprocess.CompletedProcess[str], good: str) -> str:
    """A cell: what is good, or the last thing that was said."""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return good if done.returncode == 0 else f"failed: {' '.join(said)[:80]}".replace("|", "/")


def attempt(wheel: Path, python: str, torch: str, folder: Path) -> dict[str, str]:
    """Try one pair; returns a row."""
    place = Place(folder, python)
    needed = [f"{wheel}[server]", f"torch=={torch}", *BESIDES]
    done = place.run("-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", "evenstep", *needed)
    asked = place.run("-c", ASK) if done.returncode == 0 else done
    facts = json.loads(asked.stdout) if asked.returncode == 0 else [Path(python).name, torch, ""]
    row = {"Python": facts[0], "torch": facts[1], "import": verdict(asked, "yes"), "demo": "-", "engine's tests": "-"}
    if asked.returncode == 0:
        assert facts[2].startswith(str(folder)), f"{facts[2]} is not what was installed"
        demo = place.run("examples/demo.py")
        expected = set(re.findall(r"\b[0-9a-f]{64}\b", (ROOT / "README.md").read_text()))
        same = set(re.findall(r"\b[0-9a-f]{64}\b", demo.stdout)) == expected
        row["demo"] = verdict(demo, "same weights, the README's" if same else "same weights, of its own")
        tests = place.run("-m", "pytest", "-p", "no:cacheprovider", "--quick", "tests/engine")
        counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", tests.stdout + tests.stderr)
        row["engine's tests"] = ", ".join(counts) or verdict(tests, "passed")
        print(tests.stdout[-3000:], file=sys.stderr)
    row["date"] = datetime.now(UTC).date().isoformat()
    row["system"] = f"{platform.machine()}, {' '.join(platform.libc_ver())}"
    row["wheel"] = f"`{wheel.name}`"
    return row


def main() -> int:
    """Try every pair of the command line; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Try the wheel on Pythons and torches.")
    parser.add_argument("--wheel", type=Path, help="what to install")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("PYTHON", "TORCH"), help="try these")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(LIST.read_text()) if LIST.exists() else []
    for python, torch in options.pair:
        with tempfile.TemporaryDirectory(prefix="evenstep-tried-") as folder:
            row = attempt(options.wheel.resolve(), python, torch, Path(folder))
        print(json.dumps(row, indent=1), flush=True)
        rows = [other for other in rows if (other["Python"], other["torch"]) != (row["Python"], row["torch"])]
        rows = sorted([*rows, row], key=lambda each: [each["Python"], each["torch"]])
        LIST.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(page(rows))
    return 1 if any("failed" in " ".join(row.values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
