"""A node and its agent: workers of two nodes are one run; nothing outlives the agent."""

import os
import signal
import time

import pytest

import processes
from evenstep.agents.orders import Kind, Order, judge
from evenstep.core.errors import ConfigError, SilenceError

pytest.importorskip("cloudpickle", reason="clusters need it: pip install 'evenstep[ray]'")
from evenstep.agents.agent import Agent, ends_of
from evenstep.agents.shipping import ship, unship


def training(seconds):
    import torch

    import evenstep

    with evenstep.Run(shards=4, seed=1, quiet=True) as run:
        model = torch.nn.Linear(4, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for batch in run.batches(torch.utils.data.TensorDataset(torch.ones(32, 4)), batch_size=8):
            run.step(batch, lambda part: model(part[0]).square().mean())
            time.sleep(seconds)
        run.print("done")
        return run.fingerprint(), run.num_workers


def by_value(function):
    """As a function of a script that was started by hand."""
    import sys

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    try:
        return ship(function, (0.0,))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])


def attempt(agents, data, on_report=lambda report: None):
    """One attempt with two workers on the first node and one on each other."""
    port, first, ends = agents[0].host(30.0), 0, []
    total = len(agents) + 1
    for number, agent in enumerate(agents):
        script, args = agent.function(data)
        count = 2 if number == 0 else 1
        agent.start(Order(script, args, tuple(range(first, first + count)), total, "127.0.0.1", port))
        first += count
    while any(agent.num_running for agent in agents):
        for agent in agents:
            reports = agent.reports(0.05) if agent.num_running else []
            ends += ends_of(reports)
            for report in reports:
                on_report(report)
        if any(end.code for end in ends):  # who has not met the others yet would wait for them for long
            for agent in agents:
                agent.stop()
    return judge(ends)


def test_workers_of_two_nodes_are_one_run_and_a_killed_one_is_told_from_an_error():
    with Agent() as one, Agent() as other:
        assert one.facts(60.0) == other.facts(60.0)
        said = []
        assert attempt([one, other], by_value(training), said.append).kind is Kind.DONE
        assert unship(one.result())[1] == 3
        assert other.result() is None
        assert [report["event"]["prints"] for report in said if "prints" in report.get("event", {})] == ["done"]

        def dies(seconds):
            from evenstep.core import env

            if env.read().worker == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return training(seconds)

        lost = attempt([one, other], by_value(dies))
        assert lost.kind is Kind.LOST
        assert "worker 1 (pid" in lost.text
        assert "SIGKILL" in lost.text

        def fails(seconds):
            raise ValueError("a bad day")

        failed = attempt([one, other], by_value(fails))
        assert failed.kind is Kind.FAILED
        assert failed.text.rstrip().endswith("ValueError: a bad day")
        folder, pid = one.folder, one.pid
    assert not folder.exists()
    assert not processes.is_alive(pid)


def test_a_node_that_ends_is_noticed():
    with Agent() as agent:
        agent.facts(60.0)
        os.kill(agent.pid, signal.SIGKILL)
        with pytest.raises(SilenceError, match="has ended with exit code -9"):
            agent.reports(30.0)


def test_nothing_outlives_an_agent_that_is_killed(tmp_path):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        agent = Agent()
        agent.facts(60.0)
        os.write(writing, f"{agent.pid} {agent.folder}".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    node, folder = os.read(reading, 4096).decode().split(" ", 1)
    os.close(reading)
    os.waitpid(pid, 0)
    assert processes.until(lambda: not processes.is_alive(int(node)) and not os.path.exists(folder))


def test_what_cannot_be_shipped_is_one_sentence():
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"<lambda> cannot be shipped to the workers: cannot pickle '_thread.lock'"):
        ship(lambda: lock)
    with pytest.raises(ConfigError, match="3 cannot be called; expected a function, or the path of a script"):
        ship(3)
    with pytest.raises(ConfigError, match="training cannot be called like this: missing a required argument"):
        ship(training)
    with pytest.raises(ConfigError, match="what the function returned cannot be read here"):
        unship(b"no pickle")
