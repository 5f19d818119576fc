"""The script of docs/transformers.md, as it stands there: one result, on any number of workers and whoever dies."""

import re
from pathlib import Path

import evenstep.transformers  # noqa: F401  # likewise
import models  # noqa: F401  # transformers is imported once, and not in every fork
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import Completed, cli_run

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
(SCRIPT,) = re.findall(r"```python\n(import.*?)```", PAGE.read_text(), re.DOTALL)
HEAD = "import os, warnings\nwarnings.simplefilter('ignore')  # theirs, about names and settings of torch"


def start(folder: Path, workers: int, faults: list[Fault]) -> Completed:
    """Run the script in a folder of its own."""
    folder.mkdir()
    (folder / "train.py").write_text(f"{HEAD}\nos.chdir({str(folder)!r})\n{SCRIPT}")
    done = cli_run("run", "-n", str(workers), folder / "train.py", variables=plant(faults, folder / "faults"))
    assert done.code == 0, done.stderr
    assert struck(folder / "faults") == list(range(len(faults)))
    return done


def result(done: Completed, folder: Path) -> tuple[list[str], dict[str, bytes]]:
    """What the script says in the end, its fingerprints, and the weights that it leaves behind."""
    said = sorted(re.findall(r"fingerprint \w+|loss [\d.]+, letters .*\)", done.stdout))
    return said, {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_the_script_has_one_result_for_one_two_and_three_workers_of_which_some_die(tmp_path):
    expected = result(start(tmp_path / "1", 1, []), tmp_path / "1")
    assert len(expected[0]) == 4, "three fingerprints, and what it printed"
    assert "model/model.safetensors" in expected[1]
    assert result(start(tmp_path / "2", 2, []), tmp_path / "2") == expected
    deaths = [Fault("kill", "backward", 9, worker=1), Fault("kill", "inside update", 8, worker=0)]
    assert result(start(tmp_path / "3", 3, deaths), tmp_path / "3") == expected
