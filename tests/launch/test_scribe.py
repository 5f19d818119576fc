"""What is written down of a run: every step once, in order, whoever dies; and a full disk ends nothing."""

import json
import textwrap
from pathlib import Path

from evenstep.exchange.journal import Entry, Journal
from evenstep.launch.job import Job
from evenstep.launch.scribe import Scribe
from workers import cli_run

SCRIPT = """
    import os, signal
    import torch
    import evenstep

    with evenstep.Run(shards=4) as run:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        net, optimizer = run.prepare(net, torch.optim.Adam(net.parameters(), 1e-2))
        data = torch.utils.data.TensorDataset(torch.randn(40, 4))
        for batch in run.batches(data, 10, epochs=6):
            if run.version in (5, 11, 17) and run.num_workers > 2 and run.worker == run.version % 3:
                os.kill(os.getpid(), signal.SIGKILL)
            run.log("lr", 1e-2)
            run.log("workers", run.num_workers)
            loss = run.step(batch, lambda part: net(part[0]).pow(2).mean())
            run.print("loss", float(loss))
        run.log("last", 7)
"""


def test_every_step_is_written_once_whoever_dies_with_servers_or_without(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    logs = []
    for workers, servers in ((1, ()), (3, ()), (2, ("--servers", "1"))):
        path = tmp_path / f"{workers}.json"
        done = cli_run("run", "-n", str(workers), *servers, "--log-json", path, tmp_path / "train.py")
        assert done.code == 0, done.stderr
        assert (workers == 3) == ("killed by SIGKILL" in done.stderr)
        *steps, last = map(json.loads, path.read_text().splitlines())
        assert [found["step"] for found in steps] == list(range(1, 25))
        printed = [float(line.removeprefix("loss ")) for line in done.stdout.splitlines() if line.startswith("loss")]
        assert [found["loss"] for found in steps] == printed
        assert (last["step"], last["logged"]) == (24, {"last": 7.0})
        assert all(found["logged"].pop("workers") <= workers for found in steps)
        logs.append([{**found, "time": None} for found in steps])
    assert logs[0] == logs[1] == logs[2], "the same figures on any number of workers"
    assert logs[0][0]["logged"] == {"lr": 1e-2}


def test_several_groups_have_steps_of_their_own(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    path, board = tmp_path / "steps.json", tmp_path / "board"
    groups = ("--groups", "2", "--workers-per-group", "1")
    done = cli_run("run", *groups, "--log-json", path, "--tensorboard", board, tmp_path / "train.py")
    assert done.code == 0, done.stderr
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for group in range(2):
        *steps, last = (line for line in found if line["group"] == group)
        assert [line["step"] for line in steps] == list(range(1, 13)), "24 batches, every other one"
        assert (last["step"], last["logged"]) == (12, {"last": 7.0})
    assert sorted(place.name for place in board.iterdir()) == ["group-0", "group-1"]
    assert all(next(place.iterdir()).read_bytes().count(b"loss") == 12 for place in board.iterdir())


def test_what_no_group_can_write_is_one_sentence(tmp_path):
    (tmp_path / "train.py").touch()
    for option, said in (("--log-json", "cannot write"), ("--tensorboard", "cannot create")):
        done = cli_run("run", "--groups", "2", option, "/dev/null/there", tmp_path / "train.py")
        assert done.code == 2
        assert done.stderr.startswith(f"evenstep: {option}: {said} /dev/null/there: Not a directory; name another")
        assert len(done.stderr.splitlines()) == 1


def test_a_script_that_fails_in_its_first_step_says_only_that(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("net(part[0]).pow(2).mean()", "1 / 0"))
    done = cli_run("run", "-n", "2", "--log-json", tmp_path / "steps.json", tmp_path / "train.py")
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "no step was recorded" not in done.stderr


def test_a_full_disk_is_said_once_and_the_other_file_goes_on(new_segment, tmp_path):
    segment, said = new_segment(1), []
    scribe = Scribe(segment, Job("x", (), 1, log_json=Path("/dev/full"), tensorboard=tmp_path), said.append)
    journal = Journal(segment)
    for number in range(3):
        aside = {"samples": 8, "logged": {}}
        journal.append(Entry(f"step {number}", [1.0, {}, None, [], [], False], aside=aside))
        scribe.finish(trained=True)
    scribe.close()
    assert said == ["--log-json /dev/full could not be written from step 1 on: No space left on device"]
    (events,) = tmp_path.iterdir()
    assert events.read_bytes().count(b"loss") == 3


def test_a_run_without_steps_here_says_where_they_are(new_segment, tmp_path):
    said = []
    scribe = Scribe(new_segment(1), Job("x", (), 1, log_json=tmp_path / "steps"), said.append)
    scribe.finish(trained=True)
    scribe.close()
    (sentence,) = said
    assert "workers that meet only at a server" in sentence
