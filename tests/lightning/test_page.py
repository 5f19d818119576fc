"""The scripts of docs/lightning.md, as they stand there: one result, however they are started and whoever dies."""

import io
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import modules  # noqa: F401  # Lightning is imported once, and not in every fork
import pytest

import evenstep.lightning  # noqa: F401  # likewise
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import Completed, cli_run, run_workers

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
SCRIPT, FABRIC = re.findall(r"```python\n(import.*?)```", PAGE.read_text(), re.DOTALL)
HEAD = "import os, warnings\nwarnings.simplefilter('ignore')  # theirs, about names and settings of torch"


def start(text: str, folder: Path, workers: int, faults: list[Fault] | None = None) -> Completed:
    """Run a script of the page in a folder of its own."""
    folder.mkdir()
    (folder / "train.py").write_text(f"{HEAD}\nos.chdir({str(folder)!r})\n{text}")
    variables = plant(faults, folder / "faults") if faults else {}
    done = cli_run("run", "-n", str(workers), folder / "train.py", variables=variables)
    assert done.code == 0, done.stderr
    assert struck(folder / "faults") == list(range(len(faults or [])))
    return done


def result(done: Completed) -> list[str]:
    """What a script says in the end, and its fingerprints."""
    return sorted(re.findall(r"fingerprint \w+|accuracy [\d.]+, .*\]", done.stdout))


def written(folder: Path) -> dict[str, bytes]:
    """Metrics that were logged, and which checkpoints there are."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.csv")}
    return found | {str(path.relative_to(folder)): b"" for path in folder.rglob("*.ckpt")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Completed, Path]:
    """What one worker makes of the script, and where."""
    folder = tmp_path_factory.mktemp("alone") / "1"
    return start(SCRIPT, folder, 1), folder


def test_the_script_has_one_result_for_one_two_and_three_workers_of_which_some_die(tmp_path, alone):
    expected, folder = alone
    assert len(result(expected)) == 4, "three fingerprints, and what it printed"
    assert set(written(folder)) > {"checkpoints/last.ckpt", "logs/lightning_logs/version_0/metrics.csv"}
    two = start(SCRIPT, tmp_path / "2", 2)
    deaths = [Fault("kill", "backward", 9, worker=1), Fault("kill", "inside update", 10, worker=0)]
    killed = start(SCRIPT, tmp_path / "3", 3, deaths)
    for name, done in {"2": two, "3": killed}.items():
        assert result(done) == result(expected)
        assert written(tmp_path / name) == written(folder), "what the first worker wrote it writes again"


class Forked:
    """In the place of `subprocess.Popen`: what it would start, without importing everything once more."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: str | None) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.environ.clear()
            os.environ.update(env)
            runpy.run_path(command[1], run_name="__main__")
            code = 0
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode


def run_here(text: str, folder: Path) -> str:
    """Run the script in this process, which nobody has launched; what it says."""
    warnings.simplefilter("ignore")
    for name in [name for name in os.environ if name.startswith("EVENSTEP_")]:
        del os.environ[name]
    (folder / f"{os.getpid()}.py").write_text(text)
    sys.argv = [str(folder / f"{os.getpid()}.py")]
    os.chdir(folder)
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return said.getvalue()


def test_the_script_has_the_same_result_by_lightnings_own_launcher(tmp_path, alone):
    def body(_):
        subprocess.Popen = Forked
        return run_here(SCRIPT.replace('accelerator="cpu",', 'accelerator="cpu", devices=2,'), tmp_path)

    (said,) = run_workers(1, body)
    assert result(Completed(0, said, "", b"")) == result(alone[0])


def test_the_script_has_the_same_result_by_torchrun(tmp_path, alone):
    def body(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="none")
        return run_here(SCRIPT, tmp_path)

    with socket.socket() as kept:  # nobody else gets its port meanwhile
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = str(kept.getsockname()[1])
        first, second = run_workers(2, body)
    assert result(Completed(0, first, "", b"")) == result(alone[0])
    assert "fingerprint" not in second
    assert "accuracy 0" not in second


@pytest.fixture(scope="module")
def fabric_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Completed, Path]:
    """What one worker makes of the loop, and where."""
    folder = tmp_path_factory.mktemp("fabric") / "1"
    return start(FABRIC, folder, 1), folder


@pytest.mark.parametrize("workers", [2, 3])
def test_a_fabric_loop_has_one_result(tmp_path, fabric_alone, workers):
    expected, folder = fabric_alone
    faults = [Fault("kill", "backward", 7)] if workers == 3 else None
    several = start(FABRIC, tmp_path / str(workers), workers, faults)
    assert result(several) == result(expected)
    assert written(tmp_path / str(workers)) == written(folder)
