"""Workers under `evenstep run` that train through a server and die: nothing lost, nothing twice, or one sentence."""

import re

import pytest
import torch

from evenstep.cli.trace import events_of
from evenstep.core.errors import UnsupportedError
from evenstep.picture import timeline
from evenstep.server import connect
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import Cli, cli_run

BUILDER = """
    import torch
    from torch import nn

    def build():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 3))
        return model, torch.optim.Adam(model.parameters(), 1e-2)

    def bare():
        return build()[0]
"""
SCRIPT = """
    import os, signal, sys, torch
    import torch.nn.functional as F
    import evenstep
    from model import build

    with evenstep.Run(shards=6, seed=3, OPTIONS) as run:
        data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)))
        model, optimizer = run.prepare(*build())
        for number, batch in enumerate(run.batches(data, batch_size=16, epochs=3)):
            loss, metrics = run.step(batch, lambda p: (F.cross_entropy(model(p[0]), p[1]), {"one": p[1] * 0.0 + 1}))
            assert loss == loss and abs(metrics["one"] - 1) < 1e-6
            if number == 6 and run.worker == 1 and not os.path.exists(sys.argv[1]):
                open(sys.argv[1], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if run.worker == 0:
            print("loss", float(loss))
"""
STEPS = 12


@pytest.fixture
def job(script, tmp_path):
    """Writes a training script with some options; the path, and that of the file by which worker 1 dies once."""
    script(BUILDER, "model.py")

    def write(options, name="train.py"):
        return script(re.sub("OPTIONS", options, SCRIPT), name), tmp_path / "died"

    return write


def serving(tmp_path, *argv, build="build"):
    return Cli("server", f"{tmp_path / 'model.py'}:{build}", "--transports", "tcp", *argv)


def url_of(cli):
    cli.until_it_says("serving at")
    return cli.stdout.split()[-1]


def look(url):
    with connect(url, register=False) as client:
        found = client.get_parameters()
        return found, client.version


@pytest.mark.parametrize(
    ("servers", "point", "worker"), [(2, "inside update", 0), (1, "after update", 0), (1, "backward", 1)]
)
def test_a_machine_whose_worker_dies_sends_every_update_once(job, tmp_path, servers, point, worker):
    plain, marker = job("quiet=False", "plain.py")
    marker.touch()
    expected = cli_run("run", "-n", "1", plain, marker)
    assert expected.code == 0, expected.stderr
    with serving(tmp_path, "--servers", str(servers)) as cli:
        url = url_of(cli)
        path, _ = job(f'server="{url}"')
        fault = Fault("kill", point, visit=5, worker=worker)
        done = cli_run("run", "-n", "2", path, marker, variables=plant([fault], tmp_path / "faults"))
        assert struck(tmp_path / "faults") == [0]
        assert done.code == 0, done.stderr
        assert "was killed by SIGKILL" in done.stderr
        loss = [line for line in expected.stdout.splitlines() if "loss" in line]
        assert [line for line in done.stdout.splitlines() if "loss" in line] == loss
        assert look(url)[1] == STEPS


@pytest.mark.parametrize(("staleness", "options"), [(None, ""), (2, ""), (None, "update_every=2,")])
def test_a_worker_that_sends_on_its_own_goes_on_where_it_died(job, tmp_path, staleness, options):
    build = "bare" if options else "build"
    with serving(tmp_path, "--staleness", str(staleness).lower(), "--lease", "5", build=build) as cli:
        url = url_of(cli)
        path, marker = job(f'server=evenstep.Server("{url}", staleness={staleness}, {options})')
        done = cli_run("run", "-n", "2", "--trace", tmp_path / "trace.json", path, marker)
        assert done.code == 0, done.stderr
        assert "was killed by SIGKILL" in done.stderr
        sent = 7 if not options else 3
        assert f"worker 1 is back: the {sent} updates that it has sent are left out" in done.stderr
        found, version = look(url)
        assert version == (2 * STEPS if not options else STEPS), "each worker has sent each of its updates once"
        assert all(bool(torch.isfinite(value).all()) for value in found.values())
    traced = timeline.read(events := events_of(tmp_path / "trace.json"))[0]
    assert traced.steps[0] == STEPS
    assert traced.steps[1] >= STEPS, "those of both of its lives"
    assert all(traced.spent[worker]["forward"] > 0 for worker in range(2))
    waits = {(event["tid"], event["name"]) for event in events if event.get("cat") == "wait"}
    assert len(waits) == 3, "both workers, and the one that came back"
    assert {name for _, name in waits} == {"wait for the server"}, "and for nobody else"


def test_a_synchronous_worker_that_sends_on_its_own_ends_the_run_with_a_sentence(job, tmp_path):
    with serving(tmp_path, "--workers", "2") as cli:
        path, marker = job(f'server=evenstep.Server("{url_of(cli)}", aggregate=False)')
        done = cli_run("run", "-n", "2", path, marker)
        assert done.code == UnsupportedError.exit_code
        last = done.stderr.splitlines()[-1]
        assert last.startswith("evenstep: worker 1 died after 7 updates and was started again, but synchronous updates")
        assert "or use Server(..., aggregate=True)" in last
