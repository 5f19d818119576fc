"""Checkpoints that are written while training goes on, and going on from them as if nothing had happened."""

import json
import multiprocessing
import re
import runpy
import signal
import sys
import textwrap

import pytest
from safetensors import SafetensorError

import processes
from evenstep.run import checkpoint
from evenstep.run.checkpoints import Checkpoints, Snapshot
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import Cli, cli_run

SCRIPT = """
    import os, sys, time
    import torch
    import torch.nn.functional as F
    from torch import nn
    import evenstep
    from evenstep.core.control import ask

    def stop(number):
        os.kill(os.getppid(), number)
        while "stopping after this step" not in str(ask({"status": True}, os.getppid())["events"]):
            time.sleep(0.01)

    def claim(name):
        try:
            os.close(os.open(f"{sys.argv[1]}/{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    with evenstep.Run(shards=6, seed=SEED, timeout_s=30.0) as run:
        data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,)))
        model = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 3))
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        run.checkpoint(sys.argv[1], every=EVERY, keep=2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        best = 9.0
        for epoch in range(5):
            for batch in run.batches(data, batch_size=16):
                run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
                torch.rand(1)
                EACH
            found = run.evaluate(data, 20, lambda part: {"loss": F.cross_entropy(model(part[0]), part[1])})
            plateau.step(found["loss"])  # no state of ours: it is right again because the script is run again
            best = min(best, found["loss"])
        if run.worker == 0:
            print("best", best, "rate", optimizer.param_groups[0]["lr"], "random", float(torch.rand(1)))
"""


def training(each="pass", seed=3, samples=50, width=8, every="3"):
    words = {"EACH": each, "SEED": str(seed), "SAMPLES": str(samples), "WIDTH": str(width), "EVERY": every}
    return re.sub("|".join(words), lambda match: words[match[0]], SCRIPT)


def lines(done):
    assert done.code == 0, done.stderr
    return [line.removeprefix("[0] ") for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the training ends on when nobody stops it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "train.py").write_text(textwrap.dedent(training()))
    return lines(cli_run("run", "-n", "1", folder / "train.py", folder / "saved"))


def steps(directory):
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


STOP_AT_10 = "if run.version == 10 and run.worker == 0: stop(15)"


@pytest.mark.parametrize("counts", [(3, 1), (1, 3), (2, 5)])
def test_a_stopped_run_goes_on_with_any_number_of_workers(script, tmp_path, undisturbed, counts):
    path, saved = script(training(STOP_AT_10)), tmp_path / "saved"
    first = cli_run("run", "-n", str(counts[0]), path, saved)
    assert first.code == 75
    newest = steps(saved)[-1]
    assert newest in (10, 11), "it is in the middle of the third epoch"
    where = f"evenstep: stopped by SIGTERM after step {newest}; its checkpoint is {saved}/step-{newest:09}"
    assert first.stderr.splitlines()[-1] == f"{where}: go on with --resume"
    second = cli_run("run", "-n", str(counts[1]), "--resume", script(training()), saved)
    assert second.stderr.startswith(f"[0] evenstep: going on from {saved}/step-{newest:09}, after step {newest}\n")
    assert lines(second) == undisturbed
    assert len(steps(saved)) == 2, "only the newest are kept"


def test_a_run_may_be_resumed_again_and_again_and_lose_workers_between(script, tmp_path, undisturbed):
    saved = tmp_path / "saved"
    stop = "if run.version in (4, 9, 15) and claim(run.version): stop(2)"
    path = script(training(stop))
    saved.mkdir()
    for number, count in enumerate((2, 3, 1)):
        variables = plant([Fault("kill", "forward", 4)], tmp_path / f"faults-{number}")
        done = cli_run("run", "-n", str(count), "--resume", path, saved, variables=variables)
        assert done.code == 75, done.stderr
        assert struck(tmp_path / f"faults-{number}") == [0]
    assert lines(cli_run("run", "-n", "2", "--resume", path, saved)) == undisturbed


def test_a_crashed_run_goes_on_from_the_newest_good_checkpoint(script, tmp_path, undisturbed):
    saved = tmp_path / "saved"
    newest = saved / "step-000000009"
    with Cli("run", "-n", "2", script(training("while run.version == 10: time.sleep(0.01)")), saved) as cli:
        assert processes.until(lambda: (newest / "checkpoint.json").exists() and steps(saved) == [6, 9])
        cli.kill(signal.SIGKILL)
        cli.wait()
    state = newest / json.loads((newest / "checkpoint.json").read_text())["state"]
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    done = cli_run("run", "-n", "2", "--resume", script(training()), saved)
    assert lines(done) == undisturbed
    assert f"passed over: {newest}" in done.stderr
    assert "going on from" in done.stderr


def test_a_worker_killed_in_the_middle_of_a_checkpoint_costs_nothing(script, tmp_path, undisturbed):
    variables = plant([Fault("kill", "checkpoint", 2)], tmp_path / "faults")
    done = cli_run("run", "-n", "2", script(training("time.sleep(0.02)")), tmp_path / "saved", variables=variables)
    assert lines(done) == undisturbed
    assert struck(tmp_path / "faults") == [0]


def test_one_process_resumes_by_itself(script, tmp_path, undisturbed):
    saved = tmp_path / "saved"
    path = script(training().replace("keep=2", "keep=2, resume=True"))
    text = path.read_text()
    path.write_text(text.replace("pass", "if run.version == 8: raise SystemExit(4)", 1))
    assert python(path, saved) == (4, [])
    path.write_text(text)
    assert python(path, saved) == (0, undisturbed)


def python(path, saved):
    """Run a script as `python path saved` does, without importing torch again; return its exit code and lines."""
    out = path.with_suffix(".out")

    def body():
        sys.argv = [str(path), str(saved)]
        with out.open("w") as sys.stdout:
            runpy.run_path(str(path), run_name="__main__")

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    return process.exitcode, out.read_text().splitlines()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 4}, "seed: 3 in the checkpoint, 4 here"),
        ({"width": 9}, "model.0.weight: (8, 4) torch.float32 in the checkpoint, (9, 4) torch.float32 here"),
        ({"samples": 51}, "50 samples in batches of 16 in the checkpoint, 51 in batches of 16 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_differences(script, tmp_path, change, sentence):
    saved = tmp_path / "saved"
    assert cli_run("run", "-n", "2", script(training()), saved).code == 0
    done = cli_run("run", "-n", "2", "--resume", script(training(**change)), saved)
    assert done.code == 8
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_checkpoint_resuming_is_starting(script, tmp_path, undisturbed):
    done = cli_run("run", "-n", "2", "--resume", script(training()), tmp_path / "none")
    assert lines(done) == undisturbed
    assert "starting over" in done.stderr


def test_resuming_a_script_without_checkpoints_is_said(script, tmp_path, undisturbed):
    path = script(re.sub(r"run\.checkpoint\(.*\)", "pass", training()))
    done = cli_run("run", "-n", "2", "--resume", path, tmp_path / "none")
    assert lines(done) == undisturbed
    assert done.stderr.count("--resume, but the script has not called run.checkpoint(directory, every=...)") == 1


def test_a_checkpoint_that_cannot_be_written_is_said_and_training_goes_on(script, tmp_path, undisturbed):
    (tmp_path / "saved").write_text("in the way")
    done = cli_run("run", "-n", "2", script(training()), tmp_path / "saved")
    assert lines(done) == undisturbed
    assert "CHECKPOINT FAILED, training goes on" in done.stderr


def test_a_second_run_is_not_let_into_the_directory_of_the_first(script, tmp_path, undisturbed):
    saved, go = tmp_path / "saved", tmp_path / "go"
    wait = f"while run.version == 10 and not os.path.exists({str(go)!r}): time.sleep(0.01)"
    with Cli("run", "-n", "2", script(training(wait)), saved) as first:
        assert processes.until(lambda: len(steps(saved)) > 0)
        for options in ([], ["--resume"]):
            second = cli_run("run", "-n", "2", *options, script(training(), "second.py"), saved)
            assert second.code == 8
            (line,) = second.stderr.splitlines()
            assert re.search(r"saved is taken: the run of process \d+ on .* give each run a directory of its own", line)
        go.touch()
        assert lines(first.wait()) == undisturbed
        assert "CHECKPOINT FAILED" not in first.stderr


def test_a_signal_asks_for_a_checkpoint_now(script, tmp_path):
    saved = tmp_path / "saved"
    patiently = "time.sleep(0 if 'step-' in str(os.listdir(sys.argv[1])) else 0.3)"
    with Cli("run", "-n", "2", script(training(patiently, every="1000")), saved) as cli:
        assert processes.until(lambda: "generation 1" in cli_run("status", "--job", str(cli.pid)).stdout)
        cli.kill(signal.SIGHUP)
        assert processes.until(lambda: len(steps(saved)) == 1)
        assert cli.wait().code == 0


def test_the_second_signal_and_a_deadline_stop_at_once(script, tmp_path):
    forever = script(training("print('here', flush=True); time.sleep(600)"))
    with Cli("run", "-n", "2", forever, tmp_path / "a") as cli:
        cli.until_it_says("here", times=2)
        cli.kill(signal.SIGTERM)
        assert processes.until(lambda: "a second signal stops at once" in cli.stderr)
        cli.kill(signal.SIGTERM)
        assert cli.wait().code == 143
    with Cli("run", "-n", "2", "--grace", "0.5", forever, tmp_path / "b") as cli:
        cli.until_it_says("here", times=2)
        cli.kill(signal.SIGTERM)
        assert cli.wait().code == 143


def test_a_signal_that_comes_after_the_last_step_lets_the_run_come_to_its_end(script, tmp_path, undisturbed):
    last = "if run.worker == 0: stop(15)\n        if run.worker == 0:"
    done = cli_run("run", "-n", "2", script(training().replace("if run.worker == 0:", last)), tmp_path / "saved")
    assert lines(done) == undisturbed


def test_a_run_can_be_stopped_while_its_only_worker_catches_up(script, tmp_path, undisturbed):
    saved = tmp_path / "saved"
    saved.mkdir()
    each = """
                if run.version == 10 and claim("killed"): os.kill(os.getpid(), 9)
                if run.version == 5 and os.path.exists(f"{sys.argv[1]}/killed") and claim("told"): stop(15)
    """
    done = cli_run("run", "-n", "1", script(training(each, every="1000")), saved)
    assert done.code == 75, done.stderr
    assert steps(saved) == [11]
    assert lines(cli_run("run", "-n", "2", "--resume", script(training()), saved)) == undisturbed


@pytest.mark.parametrize("every", ["0", "-1", "'3 weeks'", "2.5"])
def test_what_is_no_interval_is_refused(script, tmp_path, every):
    done = cli_run("run", "-n", "1", script(training(every=every)), tmp_path / "saved")
    assert done.code == 2
    assert "expected a number of steps above 0, or a time such as" in done.stderr


def test_a_worker_joins_a_resumed_run_whose_checkpoint_has_made_room_for_newer_ones(script, tmp_path, undisturbed):
    saved = tmp_path / "saved"
    assert cli_run("run", "-n", "2", script(training(STOP_AT_10).replace("keep=2", "keep=1")), saved).code == 75
    path = script(training("time.sleep(0.05)", every="1").replace("keep=2", "keep=1"))
    variables = plant([Fault("kill", "forward", 12, worker=1)], tmp_path / "faults")
    done = cli_run("run", "-n", "2", "--resume", path, saved, variables=variables)
    assert lines(done) == undisturbed
    assert struck(tmp_path / "faults") == [0]
    assert "go on without it" not in done.stderr


def test_a_script_with_two_runs_goes_on_in_the_second(script, tmp_path):
    def twice(each):
        text = training(each).replace("    with evenstep", "    for number in range(2):\n     with evenstep")
        return text.replace("run.checkpoint(sys.argv[1],", "run.checkpoint(f'{sys.argv[1]}/{number}',")

    quiet = cli_run("run", "-n", "1", script(twice("pass")), tmp_path / "quiet")
    stop = STOP_AT_10.replace("run.version == 10", "number == 1 and run.version == 10")
    assert cli_run("run", "-n", "2", script(twice(stop)), tmp_path / "saved").code == 75
    done = cli_run("run", "-n", "3", "--resume", script(twice("pass")), tmp_path / "saved")
    assert lines(done)[-1] == lines(quiet)[-1]


FACTS = {"shards": 1, "seed": 0, "optimizers": 0, "data": [], "values": {}, "groups": [], "tracked": {}}


def test_a_full_disk_is_said_and_leaves_nothing_half_written(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    checkpoints = Checkpoints(tmp_path, 1, keep=1)
    facts = {**FACTS, "version": 1}
    checkpoints.write(Snapshot({}, facts, b"journal"), wait=True)
    monkeypatch.setattr(checkpoint, "save_file", full)
    checkpoints.write(Snapshot({}, {**facts, "version": 2}, b"journal"), wait=True)
    assert "CHECKPOINT FAILED" in capsys.readouterr().err
    assert steps(tmp_path) == [1]
    assert checkpoints.newest() == tmp_path / "step-000000001"


def test_the_newest_is_the_one_that_was_written_last_even_if_a_run_began_anew(tmp_path):
    for version in (7, 8, 3):
        facts = {**FACTS, "version": version}
        Checkpoints(tmp_path, 1, keep=2).write(Snapshot({}, facts, b"journal"), wait=True)
    assert steps(tmp_path) == [3, 8]
    assert Checkpoints(tmp_path, 1, keep=2).newest() == tmp_path / "step-000000003"
