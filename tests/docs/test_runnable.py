"""Code blocks of the manual that are marked as runnable are run, and print what the page shows.

A comment above a block marks it: ``<!-- run: train.py -->`` saves the block under a name; ``<!-- run -->`` types the
lines of a console block that begin with ``$``; ``<!-- run: for 1 epochs, and kill worker 1 -->`` does so with 1 as the
last word, and a fault. What was saved and never typed is run on two workers. Of the lines that a page shows, numbers
may be others; fingerprints may too, but those that are the same on the page are the same in truth, and those that
differ there differ.
"""

import re
from pathlib import Path

import pytest

from evenstep.testing import Fault, plant
from workers import cli_run, python_run

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^<!-- run(?:: (.*?))? -->\n```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if BLOCK.search(path.read_text())]
MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

inputs = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
labels = (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long()
train, test = TensorDataset(inputs[:400], labels[:400]), TensorDataset(inputs[400:], labels[400:])


def build():
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
"""


def typed(line, mark, folder):
    """Do what a line of a console says; returns what it printed."""
    program, *arguments = line.partition("#")[0].split()
    if few := re.search(r"for (\d+) epochs", mark):
        arguments[-1] = few[1]
    if program == "python":
        done = python_run(*arguments)
        assert done.code == 0, done.stderr
        return done.stdout
    assert program == "evenstep", f"who knows what {line!r} does"
    # Who replaces it comes late, and so the others go on without it, however slow they are.
    faults = [Fault("kill", "backward", 7, worker=1), Fault("slow", "join", worker=1, seconds=2.0)]
    killed = plant(faults, folder / "faults", in_order=True) if "kill worker 1" in mark else {}
    done = cli_run(*arguments, variables=killed)
    assert done.code == 0, done.stderr
    return done.stdout + done.stderr


def pattern(line):
    """A line of a page as a regular expression, with its fingerprint as a group."""
    parts = re.split(r"([0-9a-f]{64}|\d[\d.]*)", line.strip())
    found = [re.escape(part) if number % 2 == 0 else _number(part) for number, part in enumerate(parts)]
    return re.sub(r"(\\ )+", r"\\s+", "".join(found))


def _number(part):
    return "([0-9a-f]{64})" if len(part) == 64 else r"\d[\d.]*"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_marked_as_runnable_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    waiting, shown = {}, []  # scripts that nobody has typed yet; (fingerprint on the page, in truth)
    for mark, language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            (tmp_path / mark).write_text(text)
            waiting[mark] = True
            continue
        for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, *expected = command.rstrip().splitlines()
            waiting = {name: True for name in waiting if name not in line.split()}
            said = typed(line, mark, tmp_path)
            for each in expected:
                found = re.search(f"^\\s*{pattern(each)}\\s*$", said, re.MULTILINE)
                assert found, f"{line!r} does not say {each!r} but\n{said}"
                shown += zip(re.findall("[0-9a-f]{64}", each), found.groups(), strict=True)
    for name in waiting:
        done = cli_run("run", "-n", "2", name)
        assert done.code == 0, f"{name}: {done.stderr}"
    pairs = set(shown)
    assert len(pairs) == len(dict(pairs)) == len({truth for _, truth in pairs}), sorted(pairs)


def test_a_line_of_a_page_is_compared_but_for_its_numbers():
    fingerprint = "ab" * 32
    assert re.fullmatch(pattern("step 4 is done, 0.5 s"), "step 17 is done, 12.25 s")
    assert not re.fullmatch(pattern("step 4 is done"), "step 4 is gone")
    assert re.fullmatch(pattern(f"fingerprint {fingerprint}"), f"fingerprint {'cd' * 32}")[1] == "cd" * 32


def test_there_is_something_to_run():
    assert {"tutorial", "howto"} <= {page.stem for page in PAGES}
