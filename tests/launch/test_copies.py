"""A forked copy of a worker that goes on as if it were the worker: it gets a sentence, and nobody else notices."""

import re

import pytest

from workers import cli_run

TRAIN = """
    import os, signal, sys, time
    import torch
    from torch import nn
    import evenstep

    def ended(pid):
        for _ in range(2000):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.025)
        os.kill(pid, signal.SIGKILL)
        return "it waits for ever"

    with evenstep.Run(shards=4) as run:
        model = nn.Sequential(nn.Linear(3, 4), NORM, nn.Linear(4, 2))
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
        run.checkpoint(sys.argv[1], every=2)
        data = torch.utils.data.TensorDataset(torch.randn(64, 3))
        for batch in run.batches(data, batch_size=16, epochs=3, loaders=LOADERS):
            run.step(batch, lambda part: model(part[0]).square().mean())
            if run.version == 3 and run.worker == 1:
                copy = os.fork()
                if copy:
                    print("the copy ended with", ended(copy))
                elif "exits" in sys.argv:
                    sys.exit(0)
"""


TWO = ("-n", "2", "--weights", "1,1")  # nobody moves shards


def training(norm="nn.BatchNorm1d(4)", loaders=0):
    return TRAIN.replace("NORM", norm).replace("LOADERS", str(loaders))


@pytest.mark.parametrize(("norm", "loaders"), [("nn.BatchNorm1d(4)", 0), ("nn.ReLU()", 2)])
def test_a_copy_that_goes_on_is_told_so_and_the_run_ends_as_without_it(script, tmp_path, norm, loaders):
    path = script(training(norm, loaders))
    alone = cli_run("run", "-n", "1", path, tmp_path / "alone")
    done = cli_run("run", *TWO, path, tmp_path / "both")
    assert done.code == 0, done.stderr
    assert "[1] the copy ended with 2" in done.stdout
    told = r"\[1\] evenstep: process (\d+) is a forked copy of worker 1 \(process (?!\1)\d+\) and cannot go on in"
    assert re.search(told, done.stderr)
    assert done.stdout.splitlines()[-1] == alone.stdout.splitlines()[-1], "the fingerprint"
    if not loaders:  # else the copy's iterator ends the loaders that it shares with the worker's, and that is replaced
        assert "replaced" not in done.stderr


def test_a_copy_that_exits_inside_of_the_run_does_not_end_it(script, tmp_path):
    done = cli_run("run", *TWO, script(training()), tmp_path / "both", "exits")
    assert done.code == 0, done.stderr
    assert "[1] the copy ended with 0" in done.stdout
    assert not [line for line in done.stderr.splitlines() if not line.startswith("epoch")]
