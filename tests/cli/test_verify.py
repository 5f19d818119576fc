"""`evenstep verify`: it sees what differs, names it, and tells a failure from a difference."""

import os
import signal

import pytest

import processes
from evenstep.cli.main import main
from evenstep.cli.verify import Digests, compare
from workers import Cli

TRAIN = """
    import os
    import torch
    import evenstep

    with evenstep.Run(shards=4) as run:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        BEFORE
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
        for batch in run.batches(torch.utils.data.TensorDataset(torch.randn(64, 3)), batch_size=16, epochs=2):
            run.step(batch, lambda part: model(part[0]).square().mean() + NOISE)
            AFTER
        print("bytes \\udcff".encode(errors="surrogateescape"))
"""


def training(before: str = "pass", after: str = "pass", noise: str = "0.0") -> str:
    return TRAIN.replace("BEFORE", before).replace("AFTER", after).replace("NOISE", noise)


@pytest.mark.long
def test_runs_that_agree_are_called_equal(script, capsys):
    """The only one here that starts everything for real."""
    assert main(["verify", "--workers", "1,3", "--steps", "3", str(script(training()))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[:2]] == [["1", "workers", "3", "steps"], ["3", "workers", "3", "steps"]]
    assert lines[0].split()[-1] == lines[1].split()[-1]
    assert len(lines[0].split()[-1]) == 64
    assert lines[2:] == ["all equal, at every step"]


def test_without_steps_the_whole_script_is_compared(warm, script, capsys):
    assert main(["verify", "--workers", "1,2,4", str(script(training()))]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[:3]] == ["8", "8", "8"]


def test_runs_that_differ_are_told_where_first(warm, script, capsys):
    noise = '(run.version == 3 and os.environ["EVENSTEP_WORKERS"] == "3") * 1e-6 * model[2].weight.sum()'
    assert main(["verify", "--workers", "1,2,3", str(script(training(noise=noise)))]) == 1
    out = capsys.readouterr().out
    assert "1 and 3 workers differ after step 4, first in 'model.2.weight', and in 2 more" in out
    assert "1 and 2" not in out
    assert "all equal" not in out


def test_weights_that_differ_from_the_start_are_told_so_with_a_remedy(warm, script, capsys):
    noise = 'model[0].bias.data.add_(float(os.environ["EVENSTEP_WORKERS"]))'
    assert main(["verify", "--workers", "1,2", "--steps", "2", str(script(training(before=noise)))]) == 1
    out = capsys.readouterr().out
    assert "1 and 2 workers differ before the first step, first in 'model.0.bias'" in out
    assert "build the model inside `with evenstep.Run(...)`" in out


def test_a_script_that_fails_is_an_error_with_its_traceback(warm, script, capsys):
    path = script(training(after='if run.num_workers == 2: raise ValueError("a bad day")'))
    assert main(["verify", "--workers", "1,2", str(path)]) == 1
    captured = capsys.readouterr()
    assert f"evenstep: {path} on 2 workers ended with exit code 1:" in captured.err
    assert captured.err.rstrip().endswith("ValueError: a bad day")
    assert "equal" not in captured.out


def test_a_script_without_a_step_cannot_be_compared(warm, script, capsys):
    path = script("print('nothing to see')")
    assert main(["verify", "--workers", "1,2", str(path)]) == 2
    assert f"{path} made no step on 1 workers" in capsys.readouterr().err


@pytest.mark.long
def test_a_script_that_takes_too_long_is_ended(script, capsys):
    assert main(["verify", "--workers", "1,2", "--timeout", "0.5", str(script("import time; time.sleep(600)"))]) == 1
    assert "did not end within 0.5 s; see --timeout" in capsys.readouterr().err


def test_a_verification_that_is_killed_takes_its_runs_with_it(script):
    with Cli("verify", script("import time; time.sleep(600)")) as cli:
        assert processes.until(lambda: any("evenstep run" in line for line in processes.descendants(cli.pid).values()))
        family = processes.descendants(cli.pid)
        cli.kill(signal.SIGKILL)
        cli.wait()
        assert processes.until(lambda: not any(map(processes.is_alive, family)))


def test_arguments_of_the_script_are_its_own(warm, script, capsys):
    path = script("import sys\nsys.exit(sys.argv[1:] != ['--workers', '7', '--steps'])")
    assert main(["verify", "--workers", "1,2", str(path), "--workers", "7", "--steps"]) == 2
    assert "made no step" in capsys.readouterr().err


def test_traces_are_compared_step_by_step_and_name_by_name():
    steps = [{"a": "0", "b": "0"}, {"a": "1", "b": "1"}, {"a": "2", "b": "2"}]
    one = Digests(1, steps, "f")
    assert compare(one, Digests(2, steps, "f")) is None
    assert compare(one, Digests(2, [*steps[:2], {"a": "2", "b": "x"}], "g")) == (
        "1 and 2 workers differ after step 2, first in 'b'"
    )
    assert compare(one, Digests(2, [steps[0], {"a": "x"}, steps[2]], "g")) == (
        "1 and 2 workers differ after step 1, first in 'a', and in 1 more"
    )
    assert compare(one, Digests(2, steps[:2], "f")) == "1 and 2 workers differ in their number of steps: 2 and 1"
    assert compare(one, Digests(2, steps, "g")) == (
        "1 and 2 workers differ at the end only: the script changed the state after its last step"
    )
    assert os.environ.get("EVENSTEP_DIGESTS") is None
