"""A head and its agents: one run on two nodes, of which one is lost; nothing outlives whoever has started them."""

import os
import re
import signal
import subprocess
import threading

import pytest

import forks
import processes
from evenstep.agents import process
from evenstep.core.errors import ConfigError, PeerError, SilenceError, UnsupportedError

pytest.importorskip("cloudpickle", reason="clusters need it: pip install 'evenstep[ray]'")
from evenstep.agents.agent import Agent
from evenstep.agents.head import Head, HeadOrder
from evenstep.agents.view import RunView, ScriptError
from evenstep.agents.work import ShippedWork
from workers import run_workers


def training(directory=None):
    """Train; with a directory, take time until there is a file `go`."""
    import time
    from pathlib import Path

    import torch

    import evenstep

    def loss(part):
        if directory and not Path(directory, "go").exists():
            time.sleep(0.1)
        return model(part[0]).square().mean()

    with evenstep.Run(shards=4, seed=1) as run:
        model = torch.nn.Linear(4, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for batch in run.batches(torch.utils.data.TensorDataset(torch.ones(32, 4)), batch_size=8, epochs=10):
            run.step(batch, loss)
        run.print("done")
        return run.fingerprint(), run.num_workers


def by_value(function, *args):
    """As a function of a script that was started by hand."""
    import sys

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    try:
        return ShippedWork.of(function, args, {})
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])


def join(agent, head, count, work, token="a secret"):
    """Let an agent join, in a thread; what it says comes into a list."""
    said = []

    def attend():
        try:
            agent.join(head.address, count, token, work)
        except (ConfigError, PeerError, SilenceError) as error:
            said.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    return thread, said


def hear_out(head, shown):
    while head.code is None:
        for report in head.reports(0.1):
            shown.hear(report)


def test_a_lost_agent_costs_a_step_and_one_without_the_token_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "Popen", forks.Forked)  # nobody waits for imports
    seen, work = [], by_value(training, str(tmp_path))
    shown = RunView(lambda progress: seen.append(progress), quiet=False)
    with Head(work, HeadOrder("127.0.0.1", "a secret", 3)) as head, Agent() as one, Agent() as two, Agent() as stranger:
        for agent in (one, two, stranger):
            agent.warm_up()
        threads = [join(stranger, head, 1, work, "a guess"), join(one, head, 2, work), join(two, head, 1, work)]
        while len(seen) < 3 or not threads[0][1]:
            for report in head.reports(0.1):
                shown.hear(report)
            assert head.code is None
        os.kill(one.pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        hear_out(head, shown)
        found = shown.end(head.code, head.result)
        for thread, _ in threads:
            thread.join()
        assert found == (run_workers(1, lambda worker: training())[0][0], 1)
        (refused,), (killed,), regular = [said for _, said in threads]
        assert isinstance(refused, ConfigError)
        assert "it does not know the token" in str(refused)
        assert "was killed by SIGKILL" in str(killed)
        assert regular == []
    out, err = capsys.readouterr()
    assert out == f"done\nfingerprint {found[0]}\n"
    assert re.search(r"is lost: .*; workers \d, \d went with it", err)
    assert re.search(r"1 workers from now on: \d$", err, re.MULTILINE)


def fails():
    raise ValueError("a bad day")


def test_without_agents_the_head_computes_and_errors_stops_and_mistakes_are_told_apart():
    with Head(by_value(fails), HeadOrder("127.0.0.1", "", 0)) as head:
        shown = RunView(None, quiet=True)
        hear_out(head, shown)
        with pytest.raises(ScriptError, match=r"^Traceback(?s:.*)in fails(?s:.*)ValueError: a bad day$"):
            shown.end(head.code, head.result)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.77"):
        Head(by_value(fails), HeadOrder("192.0.2.77", "", 0))


@pytest.mark.parametrize("code", [75, 130])
def test_how_a_run_ends_is_told_apart(code):
    with pytest.raises(KeyboardInterrupt) as stop:
        RunView(None, quiet=True).end(code, None)
    assert stop.value.args == (code,)
    shown = RunView(None, quiet=True)
    shown.hear({"event": {"mistake": "one sentence"}})
    with pytest.raises(ConfigError, match=r"^one sentence$"):
        shown.end(2, None)
    shown = RunView(None, quiet=True)
    shown.hear({"err": "evenstep: worker 0 was killed by SIGSEGV"})
    with pytest.raises(SilenceError, match=r"^worker 0 was killed by SIGSEGV \(exit code 139\)$"):
        shown.end(139, None)
    shown = RunView(None, quiet=True)
    shown.hear({"err": "evenstep: worker 0 (pid 7 on here) ended with exit code 3"})
    with pytest.raises(SilenceError, match=r"^worker 0 \(pid 7 on here\) ended with exit code 3$") as failed:
        shown.end(3, None)
    assert failed.value.exit_code == 3
    assert not failed.value.was_shown


def test_a_worker_that_hung_leaves_its_stack_with_the_error_if_nothing_was_shown():
    lines = ["evenstep: worker 1 is stuck; its stack:", "[1] one", "[1] two", "evenstep: worker 1 is stuck"]
    for quiet in (True, False):
        shown = RunView(None, quiet=quiet)
        for line in lines:
            shown.hear({"err": line})
        with pytest.raises(SilenceError) as failed:
            shown.end(137, None)
        assert str(failed.value) == "worker 1 is stuck (exit code 137)"
        notes = getattr(failed.value, "__notes__", [])
        assert notes == (["worker 1 is stuck; its stack:\n[1] one\n[1] two"] if quiet else [])


def test_a_mistake_of_the_script_is_the_error_that_it_is_without_a_cluster():
    shown = RunView(None, quiet=True)
    shown.hear({"event": {"error": "evenstep: batch_size=0, expected a whole number above 0"}})
    with pytest.raises(ConfigError, match=r"^batch_size=0, expected a whole number above 0$"):
        shown.end(ConfigError.exit_code, None)
    with pytest.raises(UnsupportedError, match=r"^batch_size=0"):
        shown.end(UnsupportedError.exit_code, None)
    with pytest.raises(ScriptError, match=r"^batch_size=0") as failed:
        shown.end(7, None)
    assert failed.value.exit_code == 7


def test_what_a_run_said_last_is_not_said_again(capsys):
    shown = RunView(None, quiet=False)
    shown.hear({"err": "evenstep: worker 0 (pid 7 on here) ended with exit code 3"})
    with pytest.raises(SilenceError) as failed:
        shown.end(3, None)
    assert failed.value.was_shown
    assert capsys.readouterr().err.count("ended with exit code 3") == 1


def test_an_agent_that_does_not_get_on_is_given_up(monkeypatch):
    monkeypatch.setattr("evenstep.agents.agent._WARM_S", 0.2)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    monkeypatch.setattr("evenstep.agents.process.begin", lambda module: subprocess.Popen(["sleep", "600"], **pipes))
    with Agent() as agent, pytest.raises(SilenceError, match=r"did not import torch within 0\.2 s"):
        agent.warm_up()


def test_nothing_outlives_whoever_has_started_it():
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        head, agent = Head(by_value(training), HeadOrder("127.0.0.1", "", 5)), Agent()
        os.write(writing, f"{head.pid} {agent.pid}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    ours = list(map(int, os.read(reading, 4096).split()))
    os.close(reading)
    os.waitpid(pid, 0)
    assert processes.until(lambda: not any(map(processes.is_alive, ours)))
