"""Groups and servers from the outside: one group ends on the bits of none, and several end on one model."""

import os
import re
import signal
import textwrap

import pytest

import processes
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import Cli, cli_run

SCRIPT = """
    import os, signal, sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    import evenstep

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
            self.outer.weight = self.inner.weight
            self.alone, self.frozen = nn.Parameter(torch.ones(3)), nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x):
            return self.outer(F.relu(self.frozen(self.inner(x))))[:, :3] * self.alone

    def trained(parameter):
        return parameter.requires_grad

    with evenstep.Run(shards=6, seed=3, timeout_s=20.0) as run:
        data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)), torch.arange(50.0))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), Tied())
        model, optimizer = run.prepare(model, torch.optim.Adam(filter(trained, model.parameters()), 1e-2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)

        def function(part):
            return F.cross_entropy(model(part[0]), part[1]), {"id": part[2]}

        for epoch in range(2):
            for batch in run.batches(data, batch_size=9):
                run.step(batch, function, clip_norm=0.5 if epoch == 1 else None)
                scheduler.step()
                AFTER
            ids = run.metrics()["id"]
            assert abs(ids - 49 / 2) < 1e-9, f"every sample exactly once, over all groups: {ids}"
            found = run.evaluate(data, 20, lambda part: {"loss": F.cross_entropy(model(part[0]), part[1])})
        outputs = run.predict(data, 20, lambda part: model(part[0]))
        if run.worker == 0:
            print("loss", found["loss"], float(outputs.double().norm()))
    print("steps", run.version)
    names = {name: value.double().norm().item() for name, value in model.state_dict().items()}
    print("weights", sorted(names.items()))
"""


def training(after="pass"):
    return SCRIPT.replace("AFTER", after)


def lines(done, worker):
    return [line.removeprefix(f"[{worker}] ") for line in done.stdout.splitlines() if line.startswith(f"[{worker}] ")]


def fingerprint(done):
    assert done.code == 0, done.stderr
    return re.fullmatch(r"fingerprint ([0-9a-f]{64})", done.stdout.splitlines()[-1])[1]


@pytest.fixture(scope="session")
def without_servers(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(textwrap.dedent(training()))
    return cli_run("run", "-n", "1", path)


# ---- one group ----


@pytest.mark.parametrize(
    "options",
    [
        ["--framework", "allreduce", "-n", "2"],
        ["--framework", "sandblaster", "-n", "3"],
        ["--groups", "1", "--workers-per-group", "2", "--servers", "1"],
    ],
)
def test_one_group_with_servers_ends_on_the_fingerprint_of_none(script, without_servers, options):
    done = cli_run("run", *options, script(training()))
    assert fingerprint(done) == fingerprint(without_servers), "weights, buffers and optimizer state"
    mine = "0" if "allreduce" in options else "0.0"
    assert lines(done, mine) == lines(without_servers, "0"), (
        "every metric, the evaluation and what is left of the model"
    )
    assert progress(done) == progress(without_servers)


def progress(done):
    return [re.sub(" +[0-9]+ samples/s", "", line) for line in done.stderr.splitlines() if line.startswith("epoch")]


@pytest.mark.parametrize(
    ("point", "visit", "worker"),
    [
        ("backward", 5, 1),
        ("before update", 5, 0),
        ("after update", 5, 1),
        ("inside commit", 8, 0),
        ("after commit", 9, 0),
    ],
)
def test_whoever_dies_every_update_counts_once(script, tmp_path, without_servers, point, visit, worker):
    variables = plant([Fault("kill", point, visit, worker=worker)], tmp_path / "faults")
    done = cli_run("run", "--workers-per-group", "2", "--servers", "2", script(training()), variables=variables)
    assert struck(tmp_path / "faults") == [0]
    assert fingerprint(done) == fingerprint(without_servers), done.stderr


def test_a_group_can_be_scaled_while_it_runs(script, tmp_path, without_servers):
    faults = [Fault("scale", "forward", 9, workers=3), Fault("scale", "forward", 20, workers=1)]
    variables = plant(faults, tmp_path / "faults")
    done = cli_run("run", "-n", "2", "--servers", "2", script(training()), variables=variables)
    assert struck(tmp_path / "faults") == [0, 1]
    assert fingerprint(done) == fingerprint(without_servers), done.stderr


# ---- several groups ----


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--framework", "downpour", "--workers-per-group", "2"], "downpour: 2 groups of 2 workers, 1 server"),
        (
            ["--groups", "3", "--workers-per-group", "1", "--servers", "2", "--staleness", "1"],
            "at most 1 updates ahead",
        ),
        (["--framework", "hogwild", "--groups", "3"], "hogwild: 3 groups of 1 worker, 1 server, updates in shared"),
        (["--framework", "distributed-hogwild", "--servers-per-group", "2"], "2 groups that tell each other"),
    ],
)
def test_groups_see_every_sample_once_and_end_on_one_model(script, options, says):
    done = cli_run("run", *options, script(training()))
    assert fingerprint(done)
    assert says in done.stderr.splitlines()[0]
    groups = int(re.search(r"(\d+) groups? of", done.stderr)[1])
    of_all = [lines(done, f"{group}.0") for group in range(groups)]
    for mine in of_all:
        assert mine[0] == of_all[0][0], "metrics, evaluation and prediction are the same in all groups"
        assert mine[2] == of_all[0][2], "and so are the final weights"
    assert sum(int(mine[1].removeprefix("steps ")) for mine in of_all) == 2 * 6, "as many updates as batches"
    shown = [line for line in done.stderr.splitlines() if line.startswith("epoch")]
    assert [line[:23] for line in shown] == ["epoch 1/1  6 steps  los"] * 2, done.stderr


def test_a_group_replaces_its_worker_and_the_others_go_on(script, tmp_path):
    variables = plant([Fault("kill", "backward", 4, worker=1)], tmp_path / "faults")
    options = ["--framework", "distributed-hogwild", "--workers-per-group", "2"]
    done = cli_run("run", *options, script(training()), variables=variables)
    assert fingerprint(done)
    assert struck(tmp_path / "faults") == [0]
    assert re.search(r"group [01]: worker 1 .* was killed by SIGKILL at step \d+; it is replaced", done.stderr)
    assert lines(done, "0.0")[0] == lines(done, "1.0")[0]
    assert [lines(done, f"{group}.0")[1] for group in range(2)] == ["steps 6"] * 2


# ---- how it fails ----


def test_the_first_group_that_fails_is_the_one_that_is_heard(script):
    path = script(training("if run.group == 1 and run.version == 2: raise ValueError('mine')"))
    done = cli_run("run", "--framework", "downpour", "--workers-per-group", "1", path)
    assert done.code == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
    assert "Unreachable" not in done.stderr
    assert processes.until(lambda: not processes.descendants(), 5.0), "what is killed is gone in a moment"


def test_a_server_that_dies_ends_the_run(script):
    path = script(training("if run.version == 2: print('there', flush=True)") + "\n    import time; time.sleep(60)\n")
    with Cli("run", "--framework", "sandblaster", "-n", "1", path) as cli:
        cli.until_it_says("there")
        children = [pid for pid in processes.descendants(cli.pid) if parent(pid) == cli.pid]
        os.kill(min(children), signal.SIGKILL)
        done = cli.wait()
    assert done.code == 9
    assert re.fullmatch(
        r"evenstep: server 0 was killed by SIGKILL, and its parameters are gone; the run cannot go on",
        done.stderr.splitlines()[-1],
    )
    assert processes.until(lambda: not processes.descendants(), 5.0), "what is killed is gone in a moment"


@pytest.mark.parametrize(("which", "name"), [(min, "server 0"), (max, "the supervisor of group 0")])
def test_one_that_cannot_be_replaced_and_is_stopped_ends_the_run(script, which, name):
    after = "print('there', flush=True); import time; time.sleep(0.05)"
    path = script(training(after).replace("range(2)", "range(99)"))
    with Cli("run", "--framework", "sandblaster", "-n", "2", path) as cli:
        cli.until_it_says("there", 4)
        pid = which(pid for pid in processes.descendants(cli.pid) if parent(pid) == cli.pid)
        os.kill(pid, signal.SIGSTOP)
        done = cli.wait()
    assert done.code == 6
    assert f"evenstep: {name} (pid {pid}) has been stopped; the run cannot go on" in done.stderr.splitlines()
    assert processes.until(lambda: not processes.descendants(), 5.0), "what is killed is gone in a moment"


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("pause", ["0.05", "0.2 * run.group * (run.version == 3)"])  # in steps; waiting for the other
def test_a_signal_stops_all_groups_after_their_steps(script, pause):
    after = f"print('there', flush=True); import time; time.sleep({pause})"
    path = script(training(after).replace("range(2)", "range(99)"))
    with Cli("run", "--framework", "downpour", "--workers-per-group", "1", path) as cli:
        cli.until_it_says("there", 6)
        cli.kill(signal.SIGTERM)
        done = cli.wait()
    assert done.code == 75
    assert done.stderr.count("stopped by SIGTERM after step") == 2
    assert processes.until(lambda: not processes.descendants(), 5.0), "what is killed is gone in a moment"


def test_when_the_launcher_is_killed_nobody_is_left(script):
    path = script(
        training("print('there', flush=True); import time; time.sleep(0.05)").replace("range(2)", "range(99)")
    )
    with Cli("run", "--framework", "downpour", "--workers-per-group", "1", path) as cli:
        cli.until_it_says("there", 4)
        everyone = processes.descendants(cli.pid)
        assert len(everyone) == 2 + 2 + 1
        cli.kill(signal.SIGKILL)
        cli.wait()
        assert processes.until(lambda: not any(map(processes.is_alive, everyone)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--framework", "sandblaster", "--groups", "2"], "--groups 2 contradicts --framework sandblaster"),
        (["-n", "2", "--groups", "2"], "with groups, give only --workers-per-group"),
        (["-n", "2", "--framework", "downpour"], "-n 2 with 2 groups: use --workers-per-group instead"),
        (["--servers", "1", "--resume"], "--resume with servers"),
        (["--groups", "2", "--workers-per-group", "5", "--shards", "4"], "5 workers but only 4 shards"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(script, options, says):
    done = cli_run("run", *options, script("pass"))
    assert done.code == 2
    (line,) = done.stderr.splitlines()
    assert says in line
