"""Weak and strong scaling by name: what a batch is, and how its samples are dealt to shards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.plan.planner import lay
from evenstep.plan.topology import Device, Machine, Topology
from workers import cli_run, run_workers

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)


def train(folder=None, *, load=False, stop_at=None, spans=None, **options):
    with evenstep.Run(shards=6, seed=3, quiet=True) as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        if load:
            run.load(folder)
        if spans is not None:
            run._engine.sharing.replan(spans)
        sizes = []
        for batch in run.batches(DATA, epochs=2, **options):
            sizes.append(len(batch))
            run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            if run.version == stop_at:
                run.save(folder)
                break
        return run.fingerprint(), sizes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_so_many_for_each_worker_is_so_many_times_as_many_for_one(count):
    whole = train(batch_size=8 * count)
    assert max(whole[1]) == 8 * count
    for found in run_workers(count, lambda _: train(batch_size=8, batch_per_worker=True)):
        assert found == whole


def test_a_checkpoint_of_other_global_batches_is_refused(tmp_path):
    whole = train(batch_size=16)
    run_workers(2, lambda _: train(tmp_path, stop_at=3, batch_size=8, batch_per_worker=True))
    for found in run_workers(2, lambda _: train(tmp_path, load=True, batch_size=8, batch_per_worker=True)):
        assert found[0] == whole[0]
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, load=True, batch_size=8, batch_per_worker=True)
    assert str(caught.value) == (
        "the checkpoint that was loaded had 60 samples in global batches of 16; with batch_per_worker=True, 1 workers "
        "make global batches of 8 of 60 here: start as many workers as then, or give batch_size=16 without "
        "batch_per_worker"
    )
    assert train(tmp_path, load=True, batch_size=16)[0] == whole[0], "the remedy helps"


SCRIPT = """
    import os, signal, sys, time
    import torch
    import torch.nn.functional as F
    from torch import nn
    import evenstep
    from evenstep.core.control import ask

    def stop():
        os.kill(os.getppid(), signal.SIGTERM)
        while "stopping after this step" not in str(ask({"status": True}, os.getppid())["events"]):
            time.sleep(0.01)

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    with evenstep.Run(shards=6, seed=3, timeout_s=30.0) as run:
        data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(0, 3, (60,)))
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.checkpoint(sys.argv[1], every=2)
        for batch in run.batches(data, int(sys.argv[2]), 4, batch_per_worker=bool(int(sys.argv[3]))):
            run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
            struck = sys.argv[1] + "/struck"
            if len(sys.argv) > 4 and run.version == 5 and run.worker == 1 and not os.path.exists(struck):
                open(struck, "w").close()
                {"stop": stop, "kill": kill}[sys.argv[4]]()
"""


def last_line(done):
    assert done.code == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("[0] ")


def test_the_global_batch_stays_when_workers_are_lost_and_when_a_run_is_resumed_on_others(script, tmp_path):
    path = script(SCRIPT)
    whole = last_line(cli_run("run", "-n", "1", path, tmp_path / "a", "16", "0"))
    assert whole.startswith("fingerprint ")
    for number, options in enumerate((["--no-replace"], [])):
        lost = cli_run("run", "-n", "2", *options, path, tmp_path / f"b{number}", "8", "1", "kill")
        assert last_line(lost) == whole
        assert "was killed by SIGKILL" in lost.stderr
    stopped = cli_run("run", "-n", "2", path, tmp_path / "c", "8", "1", "stop")
    assert stopped.code == 75, stopped.stderr
    assert last_line(cli_run("run", "-n", "3", "--resume", path, tmp_path / "c", "8", "1")) == whole


def test_dealing_in_turn_is_another_arithmetic_and_the_same_on_any_number_of_workers():
    alone = train(batch_size=16, deal="round-robin")
    assert alone[0] != train(batch_size=16)[0]
    for found in run_workers(3, lambda _: train(batch_size=16, deal="round-robin")):
        assert found == alone


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (5.0, 1.0, 1.0), (0.3, 2.0, 1.0)], ids=str)
def test_the_shards_of_any_layout_end_on_the_same_bits(speeds):
    machines = tuple(Machine(f"m{i}", (Device("d", speed=speed),), rack=f"r{i % 2}") for i, speed in enumerate(speeds))
    layout = lay(Topology(machines), 6)
    alone = train(batch_size=16)
    for found in run_workers(3, lambda _: train(batch_size=16, spans=list(layout.spans))):
        assert found == alone


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0, "batch_per_worker": True}, "batch_size=0, expected a whole number above 0"),
        ({"batch_size": 8, "deal": "random"}, "deal='random', expected 'position' or 'round-robin'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, sentence):
    with pytest.raises(ConfigError) as caught:
        train(**options)
    assert str(caught.value) == sentence
