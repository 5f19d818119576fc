"""Runs on barrier tasks: the result of `python train.py` on any number of executors, also when one of them is lost."""

import os
import signal
import threading
from pathlib import Path

import pytest

import processes
from workers import run_workers

SCRIPT = """
import sys, evenstep, torch
with evenstep.Run(shards=4, seed=1) as run:
    model = torch.nn.Linear(4, 2)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    for batch in run.batches(data, batch_size=4):
        run.step(batch, lambda part: model(part[0]).square().mean())
    run.once(lambda: open(sys.argv[1], "w").write(run.fingerprint()) and None)
"""


def training(seconds, directory):
    import time

    import torch

    import evenstep

    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    with evenstep.Run(shards=4, seed=1, quiet=True) as run:
        model = torch.nn.Linear(4, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if directory:
            run.checkpoint(f"{directory}/checkpoints", every=2)
        for batch in run.batches(data, batch_size=16, epochs=3):
            run.step(batch, lambda part: model(part[0]).square().mean())
            if directory:
                Path(directory, f"step-{run.version}").touch()
            time.sleep(seconds)
        return run.fingerprint(), run.num_workers


@pytest.fixture(scope="module")
def fingerprint():
    return run_workers(1, lambda worker: training(0, None))[0][0]


def run_it(session, workers, seconds=0.0, directory=None):
    from evenstep.spark import run

    return run(training, seconds, directory, workers=workers, session=session, quiet=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_on_executors_end_on_the_fingerprint_of_one_process(spark, fingerprint, workers):
    assert spark.call(run_it, workers) == (fingerprint, workers)


def lose_an_executor(session, directory, victim):
    """Kill an executor, or a worker, as soon as the run has done four steps."""

    def strike():
        assert processes.until(Path(directory, "step-4").exists, 60.0)
        pids = [pid for pid, line in processes.descendants().items() if victim in line]
        os.kill(pids[-1], signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        return run_it(session, 3, 0.2, directory)
    finally:
        thread.join()


@pytest.mark.parametrize("victim", ["CoarseGrainedExecutorBackend", "evenstep.agents.node"])
def test_a_lost_executor_and_a_lost_worker_change_no_bit(spark, fingerprint, tmp_path, victim):
    assert spark.call(lose_an_executor, str(tmp_path), victim) == (fingerprint, 3)


def run_script(session, directory):
    from evenstep.spark import run

    path = Path(directory, "train.py")
    path.write_text(SCRIPT)
    assert run(path, f"{directory}/out", workers=2, session=session, quiet=True) is None
    return Path(directory, "out").read_text()


def test_a_script_runs_as_it_does_elsewhere(spark, tmp_path):
    assert len(spark.call(run_script, str(tmp_path))) == 64


def mistakes(session):
    import threading as threads

    from evenstep.spark import run

    def fails():
        raise ValueError("a bad day")

    lock = threads.Lock()
    calls = {
        "failing": lambda: run(fails, workers=2, session=session, quiet=True),
        "slots": lambda: run(fails, workers=9, session=session),
        "zero": lambda: run(fails, workers=0, session=session),
        "unshippable": lambda: run(lambda: lock, workers=1, session=session),
        "arguments": lambda: run(fails, 1, workers=1, session=session),
        "missing": lambda: run("nowhere.py", workers=1, session=session),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_mistakes_get_a_sentence_and_errors_of_the_script_their_traceback(spark):
    said = spark.call(mistakes)
    assert said["failing"].startswith("ScriptError: Traceback")
    assert said["failing"].endswith("ValueError: a bad day")
    assert said["slots"].startswith("ConfigError: 9 workers, but the application has 4 slots for tasks")
    assert said["zero"] == "ConfigError: workers=0, expected a whole number above 0"
    assert "cannot be shipped to the workers: cannot pickle '_thread.lock' object" in said["unshippable"]
    assert "cannot be called like this: too many positional arguments" in said["arguments"]
    assert said["missing"] == "ConfigError: there is no script nowhere.py; name a Python file to run"
