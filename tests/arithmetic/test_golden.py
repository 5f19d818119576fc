"""Portable arithmetic ends on the fingerprints that are committed, wherever and on how many workers it runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import portable
import pytest

from evenstep.arithmetic.cases import cases
from evenstep.arithmetic.probe import golden
from evenstep.native import arithmetic

HERE = Path(__file__).parent
DIGITS = HERE.parents[1] / "examples" / "digits.py"
LIGHT = HERE.parent / "light"
TRAININGS: dict[str, str] = json.loads((HERE / "trainings.json").read_text())

pytestmark = [
    pytest.mark.timeout(400),  # torch is imported each time, which takes its time where others work
    pytest.mark.skipif(not arithmetic.bits(), reason="this processor has no AVX2 and FMA"),
    pytest.mark.skipif(not golden().applies, reason=f"the golden fingerprints belong to torch {golden().torch}"),
]


@pytest.fixture(scope="module")
def evenstep():
    """What the command line says, in forks of a process that torch is imported into but once."""
    with portable.opened(LIGHT) as process:

        def output_of(*argv: str | Path, codes: tuple[int, ...] = (0,)) -> str:
            code, out, err = process.run(*argv)
            assert code in codes, err
            return out

        yield output_of


@pytest.fixture(scope="module")
def different_operations(evenstep) -> list[str]:
    """Which operations of the probe give other bits here than in the golden table."""
    return json.loads(evenstep("doctor", "--json", codes=(0, 1)))["differ"]


def verdict(found: dict[str, str], operations: list[str]) -> str:
    """What to say where fingerprints differ."""
    others = {name for name, fingerprint in found.items() if TRAININGS[name] != fingerprint}
    return f"{sorted(others)} end on other bits here; operations of the probe that differ: {operations or 'none'}"


def test_every_operation_of_the_probe_has_its_golden_bits(different_operations):
    assert different_operations == []


def test_the_golden_table_has_every_case_and_none_is_an_error():
    assert list(golden().operations) == [name for name, _ in cases()]
    assert not [name for name, digest in golden().operations.items() if digest.startswith("error")]


def test_trainings_on_three_workers_end_on_their_golden_fingerprints(evenstep, different_operations):
    said = evenstep("run", "-n", "3", "--arithmetic", "portable", HERE / "trainings.py")
    found = {line["name"]: line["fingerprint"] for line in map(json.loads, said.splitlines())}
    assert found == {name: TRAININGS[name] for name in found}, verdict(found, different_operations)
    assert len(found) == 4


def test_the_example_on_one_worker_that_python_starts_ends_on_its_golden_fingerprint(different_operations):
    """It is started for real, and starts again by itself: kernels were not chosen before."""
    path = os.pathsep.join(filter(None, (str(LIGHT), os.environ.get("PYTHONPATH"))))
    chosen = {"EVENSTEP_ARITHMETIC": "portable", "EVENSTEP_MAX_STEPS": "20", "PYTHONPATH": path}
    command, environment = [sys.executable, str(DIGITS)], {**os.environ, **chosen}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {"digits": done.stdout.split()[-1]}
    assert found["digits"] == TRAININGS["digits"], verdict(found, different_operations)


def test_the_demo_ends_on_the_fingerprint_that_the_readme_and_its_picture_show(evenstep, different_operations):
    texts = [(HERE.parents[1] / name).read_text() for name in ("README.md", "docs/pictures/demo.svg")]
    shown = {fingerprint for text in texts for fingerprint in re.findall(r"\b[0-9a-f]{64}\b", text) or ["none"]}
    said = evenstep("run", "-n", "2", "--arithmetic", "portable", DIGITS)
    assert shown == {said.split()[-1]}, f"operations of the probe that differ: {different_operations or 'none'}"


def test_a_difference_is_told_with_the_operations_behind_it():
    text = verdict({**TRAININGS, "vae": "0" * 64}, ["exp", "lstm"])
    assert text == "['vae'] end on other bits here; operations of the probe that differ: ['exp', 'lstm']"
