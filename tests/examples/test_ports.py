"""The scripts that show how one ports: each gives one result, whoever computes it and whoever dies."""

import re
from pathlib import Path

import pytest

from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run

PORTS = sorted((Path(__file__).parents[2] / "examples" / "ports").glob("*.py"))
GOOD = {  # what each of them prints last, and what it must be to have learnt something
    "adapters": (r"accuracy ([\d.]+)", lambda found: found[-1] > 0.7),
    "contrastive": (r"halves ([\d.]+) fit", lambda found: found[-1] < 25),
    "detection": (r"list ([\d.]+)", lambda found: found[-1] < 0.15),
    "gan": (r"correlate by ([\d.]+)", lambda found: found[-1] > 0.7),
    "image_classifier": (r"accuracy ([\d.]+)", lambda found: found[-1] > 0.7),
    "language_model": (r"loss ([\d.]+)", lambda found: found[-1] < found[0] - 0.1),
    "lstm": (r"loss ([\d.]+)", lambda found: found[-1] < found[0] - 0.2),
    "vae": (r"batch ([\d.]+)", lambda found: found[-1] < 0.85 * found[0]),
}


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """So that the forks need not; and not before, or those of all other tests would be the larger for it."""
    import sklearn.datasets  # noqa: F401  # as above


@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_a_port_learns_and_gives_one_result_on_three_workers_of_which_one_dies(path, tmp_path):
    alone = cli_run("run", "-n", "1", path)
    assert alone.code == 0, alone.stderr
    pattern, learnt = GOOD[path.stem]
    assert learnt([float(number) for number in re.findall(pattern, alone.stdout)]), alone.stdout
    killed = cli_run("run", "-n", "3", path, variables=plant([Fault("kill", "backward", 7)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert sorted(killed.stdout.splitlines()) == sorted(alone.stdout.splitlines()), killed.stderr
    assert "fingerprint" in killed.stdout


@pytest.mark.parametrize("path", PORTS, ids=lambda path: path.stem)
def test_a_port_is_short(path):
    assert len(path.read_text().splitlines()) <= 60
