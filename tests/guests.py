"""The test kit for runs on somebody else's cluster, whichever it is: what is trained, and what the tests see of it."""

import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import drivers
import processes
from workers import run_workers

STEPS = 400
SCRIPT = """
import sys, torch, evenstep, beside
with evenstep.Run(shards=4, seed=beside.SEED) as run:
    model = torch.nn.Linear(4, 2)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in run.batches(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=4):
        run.step(batch, lambda part: model(part[0]).square().mean())
    run.print("on", run.num_workers, sys.argv[1])
    run.once(lambda: open(sys.argv[1], "w").write(run.fingerprint()) and None)
"""


def training(directory=None, steps=STEPS):
    """Train; with a directory, note there who does what, and take time until there is a file `go`."""
    from pathlib import Path

    import torch

    import evenstep

    def take_time():
        if directory and not Path(directory, "go").exists():
            time.sleep(0.1)

    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    with evenstep.Run(shards=4, seed=1) as run:
        model = torch.nn.Linear(4, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        if directory:
            run.checkpoint(f"{directory}/checkpoints", every=1000)
        for batch in run.batches(data, batch_size=16, epochs=steps // 4):
            run.step(batch, lambda part: (take_time(), model(part[0]).square().mean())[1])
            if directory and len(run.local_shards):
                Path(directory, f"{run.version}-{run.num_workers}").touch()
        return run.fingerprint(), run.num_workers


@pytest.fixture(scope="session")
def fingerprint():
    """That of one process."""
    return run_workers(1, lambda worker: training())[0][0]


def run_and_look(call, directory, *events):
    """Start a run; one event after the other, wait until it has so many workers, and do something.

    Args:
        call: The run.
        directory: That `training` writes to.
        *events: Pairs of a number of workers, or of several, and what is then done, here, in the main thread; None:
            nothing.
    """
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    try:
        since = 0
        for workers, strike in events:
            since = _await(directory, workers, since, thread)
            if strike is not None:
                strike()
    finally:
        Path(directory, "go").touch()
        thread.join()
    return found[0]


def _await(directory, workers, since, thread):
    """Wait for a step of so many workers after another step; which it was."""
    found, wanted = [], [workers] if isinstance(workers, int) else workers

    def look():
        names = [name.split("-") for name in os.listdir(directory) if name.partition("-")[0].isdigit()]
        found[:] = [int(step) for step, count in names if int(step) > since and int(count) in wanted]
        return bool(found) or not thread.is_alive()

    assert processes.until(look, 240.0), f"no step with {workers} workers after step {since}"
    assert found, f"the run ended before a step with {workers} workers after step {since}"
    return min(found)


FEWER = range(1, 4)  # than four workers


def kill(name):
    """Kill the youngest process with a name that was not forked from another one with it."""
    named = {pid for pid, line in processes.descendants().items() if name in line}
    forked = {child for pid in named for child in processes.descendants(pid)}
    os.kill(max(named - forked), signal.SIGKILL)


def interrupt(call, directory):
    """Interrupt a run in its third step; what is said, and whether there is a checkpoint."""

    def strike():
        processes.until(Path(directory, "3-1").exists, 240.0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    said = []
    try:
        call()
    except KeyboardInterrupt:
        said.append("interrupted")
    finally:
        thread.join()
    return said, bool(os.listdir(Path(directory, "checkpoints")))


def said_by(**calls):
    """What each of some calls raises."""
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            said[name] = f"{type(error).__name__}: {error}"
    return said


def fails():
    """As a script may."""
    raise ValueError("a bad day")


def check_mistakes(said):
    """What every cluster says to the same mistakes."""
    assert said["failing"].startswith("ScriptError: Traceback")
    assert said["failing"].endswith("ValueError: a bad day")
    assert "evenstep/agents" not in said["failing"], "our own frames interest nobody"
    assert said["zero"] == ("ConfigError: workers=0, expected a whole number above 0, or a pair (at least, at most)")
    assert said["range"].startswith("ConfigError: workers=(3, 2), expected")
    assert "cannot be shipped to the workers: cannot pickle '_thread.lock' object" in said["unshippable"]
    assert "cannot be called with these arguments: too many positional arguments" in said["arguments"]
    assert said["missing"] == "ConfigError: there is no script nowhere.py; name a Python file to run"
    assert said["option"] == "ConfigError: run() has no option x, and a script takes no keyword arguments"


def common_mistakes(run, **where):
    """Calls that `check_mistakes` knows."""
    lock = threading.Lock()
    return {
        "failing": lambda: run(fails, workers=1, quiet=True, **where),
        "zero": lambda: run(fails, workers=0, **where),
        "range": lambda: run(fails, workers=(3, 2), **where),
        "unshippable": lambda: run(lambda: lock, workers=1, **where),
        "arguments": lambda: run(fails, 1, workers=1, **where),
        "missing": lambda: run("nowhere.py", workers=1, **where),
        "option": lambda: run(__file__, x=1, workers=1, **where),
    }


def put_script(directory):
    """A script with a module beside it."""
    Path(directory, "beside.py").write_text("SEED = 1\n")
    path = Path(directory, "train.py")
    path.write_text(SCRIPT)
    return path


def fingerprint_of_script(directory):
    """That of `python train.py`."""

    def body(worker):
        out = str(Path(directory, "alone"))
        sys.path.insert(0, str(directory))
        sys.argv = ["train.py", out]
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
        return Path(out).read_text()

    return run_workers(1, body)[0]


def scripts_of(page):
    """The scripts of a page of the documentation."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def execute(_, page, number):
    """Run one of them; what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(scripts_of(page)[number], page, "exec"), {"__name__": "page"})
    return out.getvalue()


def ship_by_value(folder, *pickles):
    """Let functions of test files travel: the cluster's processes cannot import them."""
    files = {__file__, *map(str, Path(folder).glob("*.py"))}
    for module in [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) in files]:
        for each in pickles:
            each.register_pickle_by_value(module)


def importable(*folders):
    """A PYTHONPATH by which the cluster's processes find what is in these folders too."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """The cluster stays, but nothing of ours stays in it."""
    yield
    ours = lambda: [line for line in processes.descendants().values() if "evenstep.agents" in line]  # noqa: E731
    assert processes.until(lambda: not ours(), 60.0), ours()


def give_time(folder, items):
    """A cluster takes its time on a machine that others use too."""
    for item in items:
        if Path(folder) in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


def shared(folder, begin, warm):
    """One cluster for the tests of a folder."""
    return drivers.Shared(Path(folder), begin, warm)
