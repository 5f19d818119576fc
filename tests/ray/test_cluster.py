"""Runs on a Ray cluster: the result of `python train.py` on any number of nodes, also when one of them is lost."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import processes
from workers import run_workers


def training(seconds, directory):
    import torch

    import evenstep

    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    with evenstep.Run(shards=4, seed=1, quiet=not directory) as run:
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


def left():
    """What of ours is in the cluster."""
    import ray

    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    return len(groups), ray.available_resources().get("CPU")


def run_it(cluster, workers):
    import evenstep.ray

    seen = []
    found = evenstep.ray.run(training, 0.0, None, workers=workers, quiet=True, on_progress=seen.append)
    assert processes.until(lambda: left() == (0, 2.0), 20.0), left()
    return found


@pytest.mark.parametrize(("workers", "count"), [(1, 1), ((1, 8), 2)])
def test_workers_on_nodes_end_on_the_fingerprint_of_one_process(ray, fingerprint, workers, count):
    assert ray.call(run_it, workers) == (fingerprint, count)


def lose(cluster, directory, victim):
    """Kill a node, or an actor's process, as soon as the run has done four steps."""
    import evenstep.ray

    extra = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) if victim == "node" else None

    def strike():
        assert processes.until(Path(directory, "step-4").exists, 60.0)
        if extra is not None:
            cluster.remove_node(extra, allow_graceful=False)
        else:
            pids = [pid for pid, line in processes.descendants().items() if "ray::AgentActor" in line]
            os.kill(pids[-1], signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    progress = []
    try:
        workers = (2, 3) if victim == "node" else 2
        found = evenstep.ray.run(training, 0.2, directory, workers=workers, quiet=True, on_progress=progress.append)
    finally:
        thread.join()
    assert processes.until(lambda: left() == (0, 2.0), 20.0), left()
    return found, len(progress)


@pytest.mark.parametrize("victim", ["node", "actor"])
def test_a_lost_node_and_a_lost_actor_change_no_bit(ray, fingerprint, tmp_path, victim):
    found, progress = ray.call(lose, str(tmp_path), victim)
    assert found == (fingerprint, 2)
    assert progress > 3


def mistakes(cluster):
    import threading as threads

    import evenstep.ray

    def fails():
        raise ValueError("a bad day")

    lock = threads.Lock()
    calls = {
        "failing": lambda: evenstep.ray.run(fails, workers=2, quiet=True),
        "room": lambda: evenstep.ray.run(fails, workers=9, start_timeout_s=1.0),
        "zero": lambda: evenstep.ray.run(fails, workers=0),
        "range": lambda: evenstep.ray.run(fails, workers=(3, 2)),
        "unshippable": lambda: evenstep.ray.run(lambda: lock),
        "missing": lambda: evenstep.ray.run("nowhere.py"),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            said[name] = f"{type(error).__name__}: {error}"
    assert processes.until(lambda: left() == (0, 2.0), 20.0), left()
    return said


def test_mistakes_get_a_sentence_and_errors_of_the_script_their_traceback(ray):
    said = ray.call(mistakes)
    assert said["failing"].startswith("ScriptError: Traceback")
    assert said["failing"].endswith("ValueError: a bad day")
    assert said["room"].startswith("ConfigError: there is room for 2 workers, expected at least 9: each takes 1 CPU")
    assert said["zero"].startswith("ConfigError: workers=0, expected a whole number above 0")
    assert said["range"].startswith("ConfigError: workers=(3, 2), expected")
    assert "cannot be shipped to the workers: cannot pickle '_thread.lock' object" in said["unshippable"]
    assert said["missing"] == "ConfigError: there is no script nowhere.py; name a Python file to run"


def blocks(cluster, directory):
    import hashlib

    import ray

    import evenstep.ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"x": [float(n), 1.0], "y": n % 3} for n in range(200)]
    found = []
    for number in (1, 5):
        place = Path(directory, str(number))
        place.mkdir()
        assert evenstep.ray.write(ray.data.from_items(rows, override_num_blocks=number), place) == 200
        found.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in place.iterdir()})
    try:
        evenstep.ray.write(ray.data.from_items([{"x": 1.0}]), place, ["z"])
    except Exception as error:  # noqa: BLE001  # looked at by the test
        return found, f"{type(error).__name__}: {error}"


def test_the_same_rows_in_other_blocks_are_the_same_bytes(ray, tmp_path):
    (one, five), said = ray.call(blocks, str(tmp_path))
    assert one == five
    assert said == "ConfigError: there is no column 'z' in the data set, which has x"


def command(cluster, directory):
    """`evenstep run --on ray`, of a script with a module beside it."""
    import subprocess
    import sys

    Path(directory, "beside.py").write_text("SEED = 1\n")
    Path(directory, "train.py").write_text(
        "import sys, torch, evenstep, beside\n"
        "with evenstep.Run(shards=4, seed=beside.SEED) as run:\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "    for batch in run.batches(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4):\n"
        "        run.step(batch, lambda part: model(part[0]).square().mean())\n"
        "    run.print('on', run.num_workers, sys.argv[1])\n"
    )
    where = {**os.environ, "RAY_ADDRESS": cluster.address}
    words = [sys.executable, "-m", "evenstep", "run", "--on", "ray", "-n", "2", f"{directory}/train.py", "argument"]
    done = subprocess.run(words, env=where, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_runs_a_script_with_what_lies_beside_it(ray, tmp_path):
    code, out, err = ray.call(command, str(tmp_path))
    assert code == 0, err
    assert "on 2 argument" in out
    assert "fingerprint " in out


def test_options_of_one_machine_are_refused():
    from workers import cli_run

    done = cli_run("run", "--on", "spark", "-n", "2", __file__)
    assert (done.code, done.stderr.strip()) == (2, "evenstep: --on spark, expected ray, or ray://HOST:PORT")
    for option, value in (("--weights", "1,1"), ("--groups", "2"), ("--listen", "127.0.0.1:0"), ("--grace", "3")):
        done = cli_run("run", "--on", "ray", option, value, "-n", "2", __file__)
        assert done.code == 2
        assert f"{option} is of one machine, and means nothing with --on ray; leave it out" in done.stderr
    done = cli_run("run", "--on", "ray", __file__)
    assert "-n None with --on ray, expected a number of workers" in done.stderr


def test_no_cluster_is_one_sentence():
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    from workers import run_outcomes

    def body(worker):
        import warnings

        import evenstep.ray

        warnings.simplefilter("default")  # those of Ray are no errors
        evenstep.ray.run(training, 0, None, address="127.0.0.1:1")

    (outcome,) = run_outcomes(1, body)
    assert outcome.kind == "ConfigError"
    assert "no Ray cluster can be reached at 127.0.0.1:1" in outcome.text
