"""Runs and terminals: a closed one ends nothing, Ctrl-C stops after the step, and nobody need read what is shown."""

import os
import re
import select
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

import processes
from terminals import Terminal
from workers import cli_run, fork_cli

TRAIN = """
    import os, sys, time
    import torch
    import evenstep

    with evenstep.Run(shards=4) as run:
        model = torch.nn.Linear(3, 2)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.checkpoint({folder!r}, every=10_000)
        data = torch.utils.data.TensorDataset(torch.randn(64, 3))
        for batch in run.batches(data, batch_size=16, epochs={epochs}):
            run.step(batch, lambda part: model(part[0]).square().mean())
            print("step", run.version, flush=True)
            print("beside", run.version, file=sys.stderr, flush=True)
            if run.version > 8 and not os.path.exists({folder!r} + "/go"):
                time.sleep(0.2)
        if run.worker == 0:
            open({folder!r} + "/end", "w").write(run.fingerprint())
"""


def training(folder, epochs):
    """Of four steps an epoch; from the eighth step on they take their time until there is a file `go` in the folder."""
    folder.mkdir(exist_ok=True)
    return TRAIN.format(folder=str(folder), epochs=epochs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of 20 epochs that everybody could read."""
    folder = tmp_path_factory.mktemp("quiet")
    (folder / "train.py").write_text(dedent(training(folder, 20)))
    (folder / "go").touch()
    done = cli_run("run", "-n", "1", folder / "train.py")
    assert done.code == 0, done.stderr
    return (folder / "end").read_text()


def test_a_run_whose_terminal_is_closed_writes_a_checkpoint_and_goes_on(script, tmp_path, undisturbed):
    folder = tmp_path / "folder"
    with Terminal("run", "-n", "2", script(training(folder, 20))) as terminal:
        terminal.until_it_says("step 8\n")
        terminal.hang_up()
        assert processes.until(lambda: list(folder.glob("step-*"))), "SIGHUP means a checkpoint"
        (folder / "go").touch()
        assert terminal.wait() == 0
    assert (folder / "end").read_text() == undisturbed


def test_groups_whose_terminal_is_closed_go_on(script, tmp_path):
    folder = tmp_path / "folder"
    text = re.sub(r"run\.checkpoint\(.*\)", "pass", training(folder, 20))
    with Terminal("run", "--framework", "downpour", "--workers-per-group", "1", script(text)) as terminal:
        terminal.until_it_says("step 8\n")
        terminal.hang_up()
        (folder / "go").touch()
        assert terminal.wait() == 0
    assert (folder / "end").exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_does_not_matter(script, tmp_path, undisturbed, stream):
    folder = tmp_path / "folder"
    reading, writing = os.pipe()

    def attach():
        null = os.open(os.devnull, os.O_WRONLY)
        for fd, name in enumerate(("stdout", "stderr"), start=1):
            os.dup2(writing if name == stream else null, fd)
        os.close(reading)
        os.close(writing)

    pid = fork_cli(["run", "-n", "2", str(script(training(folder, 20)))], attach)
    os.close(writing)
    assert os.read(reading, 1)
    os.close(reading)
    (folder / "go").touch()
    assert os.waitpid(pid, 0)[1] == 0
    assert (folder / "end").read_text() == undisturbed


def test_a_run_alone_goes_on_when_nobody_reads_its_progress(script, tmp_path, undisturbed):
    folder = tmp_path / "folder"
    text = re.sub(r"\bprint\(.*\)", "pass", training(folder, 20))
    with subprocess.Popen([sys.executable, script(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stderr.readline()
        process.stdout.close()
        process.stderr.close()
        (folder / "go").touch()
    assert process.returncode == 0
    assert (folder / "end").read_text() == undisturbed


def test_a_run_without_standard_streams_shows_nothing_and_ends_well(script, tmp_path, undisturbed):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "go").touch()
    command = f"exec {sys.executable} -m evenstep run -n 2 {script(training(folder, 20))} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0
    assert (folder / "end").read_text() == undisturbed


def test_a_log_that_cannot_be_written_is_said_once_and_ends_nothing(script, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").symlink_to("/dev/full")
    done = cli_run("run", "-n", "1", "--log-dir", tmp_path / "logs", script(training(tmp_path / "folder", 2)))
    assert done.code == 0, done.stderr
    assert done.stderr.count("the log of worker 0 cannot be written: No space left on device") == 1


# ---- Ctrl-C ----


@pytest.mark.parametrize("options", [[], ["--framework", "downpour", "--workers-per-group", "1"]])
def test_ctrl_c_stops_after_the_step(script, tmp_path, options):
    text = training(tmp_path / "folder", 1000)
    if options:
        text = re.sub(r"run\.checkpoint\(.*\)", "pass", text)
    with Terminal("run", *(options or ["-n", "2"]), script(text)) as terminal:
        terminal.until_it_says("step 8\n")
        family = processes.descendants(terminal.pid)
        terminal.press(b"\x03")
        assert terminal.wait() == 75
        assert "stopping after this step; a second signal stops at once" in terminal.said
        assert re.search(r"stopped by SIGINT after step \d+", terminal.said)
        assert "Traceback" not in terminal.said
        assert "KeyboardInterrupt" not in terminal.said
    assert not any(map(processes.is_alive, family))


def test_ctrl_c_twice_stops_at_once(script):
    path = script(
        """
        import time, torch, evenstep
        with evenstep.Run(shards=2) as run:
            model = torch.nn.Linear(3, 2)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for batch in run.batches(torch.utils.data.TensorDataset(torch.randn(64, 3)), batch_size=16):
                print("inside", flush=True)
                run.step(batch, lambda part: time.sleep(600))
        """
    )
    with Terminal("run", "-n", "2", path) as terminal:
        terminal.until_it_says("[1] inside")
        family = processes.descendants(terminal.pid)
        terminal.press(b"\x03")
        terminal.until_it_says("a second signal stops at once")
        terminal.press(b"\x03")
        assert terminal.wait() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.said
    assert not any(map(processes.is_alive, family))


def test_ctrl_z_stops_the_launcher_alone_and_the_run_goes_on_when_it_does(script, tmp_path, undisturbed):
    folder = tmp_path / "folder"
    with Terminal("run", "-n", "2", script(training(folder, 20))) as terminal:
        terminal.until_it_says("step 8\n")
        os.kill(terminal.pid, signal.SIGSTOP)  # what Ctrl-Z comes to; a session without a shell ignores the key
        assert processes.until(lambda: processes.is_stopped(terminal.pid))
        select.select([], [], [], 1.5)
        os.kill(terminal.pid, signal.SIGCONT)
        (folder / "go").touch()
        assert terminal.wait() == 0
    assert (folder / "end").read_text() == undisturbed
