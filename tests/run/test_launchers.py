"""The same script by itself, under `evenstep run` and under torchrun."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

import evenstep
from workers import Cli, Outcome, cli_run, python_run, run_outcomes

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"
LIGHT = Path(__file__).parents[1] / "light"


def be_torchrun(argv: Sequence[str]) -> int:
    """What `torchrun` does; it starts its workers itself."""
    torchrun.main(list(argv))
    return 0


def last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


@pytest.mark.timeout(400)  # torch is imported twice, which takes its time where others work
def test_python_the_launcher_and_torchrun_end_on_the_same_last_line(tmp_path):
    example = tmp_path / "digits.py"
    example.write_text(EXAMPLE.read_text().replace("epochs=6", "epochs=2"))
    (tmp_path / "sklearn").symlink_to(LIGHT / "sklearn")
    alone = python_run(example)
    assert alone.code == 0, alone.stderr
    launched = cli_run("run", "-n", "3", example, timeout_s=100)
    assert launched.code == 0, launched.stderr
    with Cli("--standalone", "--nproc-per-node", "2", example, program=be_torchrun) as command:
        started = command.wait(100)
    assert started.code == 0, started.stderr
    expected = last_line(alone.stdout)
    assert expected.startswith("fingerprint ")
    assert len(expected.split()[1]) == 64
    assert last_line(launched.stdout) == expected
    assert last_line(started.stdout) == expected
    assert "accuracy 0.9" in launched.stdout
    assert "epoch 2/2" in launched.stderr


def test_a_worker_whose_first_fellow_does_not_come_says_so():
    with socket.socket() as taken:  # and not listening: so nobody else does either
        taken.bind(("127.0.0.1", 0))
        outcome = _first_fellow_at(str(taken.getsockname()[1]))
    assert outcome.kind == "SilenceError"
    assert "worker 0 did not come within 1 s: worker 1 waits for its word" in outcome.text


def _first_fellow_at(port: str) -> Outcome:
    """How a worker ends whose first fellow should be there."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}

    def body(_):
        for name in [name for name in os.environ if name.startswith("EVENSTEP_")]:
            del os.environ[name]
        os.environ.update(place)
        evenstep.Run(timeout_s=1.0)

    (outcome,) = run_outcomes(1, body)
    return outcome
