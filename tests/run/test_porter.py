"""A run that no supervisor looks after answers for itself: under plain python, and for workers of torchrun."""

import json
import os
import re
import urllib.request
from types import SimpleNamespace

import pytest
import torch

import evenstep
import processes
from evenstep.core.control import ask
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError, Stopped
from evenstep.run.porter import open_page
from workers import run_workers

DATA = torch.utils.data.TensorDataset(torch.arange(64.0).view(32, 2))


def steps(run, count, **checkpoints):
    net = torch.nn.Linear(2, 1)
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 1e-4))
    if checkpoints:
        run.checkpoint(every=10**9, **checkpoints)
    for batch in run.batches(DATA, 8, epochs=count // 4):
        run.step(batch, lambda part: net(part[0]).pow(2).mean())
        yield run.version


@pytest.mark.long
def test_under_plain_python_there_is_a_page_with_the_figures_of_status(capsys):
    before = processes.descendants()
    with evenstep.Run(shards=4, quiet=True, page=True) as run:
        for _ in steps(run, 4):
            pass
        url = re.fullmatch(r"evenstep: page (\S+), its buttons need the token \S+\n", capsys.readouterr().err)[1]
        (page,) = processes.descendants().keys() - before.keys()
        asked = ask({"status": True}, os.getpid())
        with urllib.request.urlopen(f"{url}/status", timeout=60) as reply:
            shown = json.loads(reply.read())
        assert (shown["step"], shown["num_shards"]) == (4, 4)
        assert shown["workers"] == asked["workers"]
        assert [(w["worker"], w["pid"], w["shards"]) for w in asked["workers"]] == [(0, os.getpid(), [0, 4])]
    assert not processes.is_alive(page)
    with pytest.raises(ConfigError, match="no job answers"):
        ask({"status": True}, os.getpid())


def test_buttons_that_need_no_supervisor_work_and_the_others_say_why_not(tmp_path, capsys):
    me = os.getpid()

    def train():
        with evenstep.Run(shards=2, quiet=True, page=True) as run:
            assert ask({"status": True}, me)["buttons"] == ["checkpoint", "fingerprint", "stop"]
            with pytest.raises(ConfigError, match="2 workers, but they come and go only under `evenstep run`"):
                ask({"scale": 2}, me)
            for version in steps(run, 400, directory=tmp_path):
                if version == 1:
                    ask({"checkpoint": True}, me)
                    ask({"fingerprint": True}, me)
                if version == 2:
                    fingerprint = run.fingerprint()
                    found = ask({"status": True}, me)
                    assert found["fingerprint"] == [2, fingerprint]
                    assert processes.until(lambda: ask({"status": True}, me)["checkpoints"], 20.0)
                    ask({"stop": True}, me)
                assert version < 3, "it stops after the step"

    with pytest.raises(Stopped):
        train()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000002", "step-000000003"]
    assert f"stopped from its page after step 3; its checkpoint is {tmp_path}/step-000000003" in capsys.readouterr().err


def test_the_first_worker_answers_for_all_of_its_machine():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True, page=True) as run:
            for _ in steps(run, 4):
                pass
            found = ask({"status": True}, os.getpid()) if worker == 0 else {}
            run.exchange("both have looked", lambda shard: torch.zeros(1))
        return os.getpid(), found.get("workers")

    (first, shown), (second, nothing) = run_workers(2, body)
    assert nothing is None
    assert [(w["worker"], w["pid"], w["step"]) for w in shown] == [(0, first, 3), (1, second, 3)]
    (begin, middle), (same, end) = (w["shards"] for w in shown)
    assert (begin, middle, end) == (0, same, 4), "whatever each of them has"
    assert all(w["compute_s"] > 0 for w in shown)


def test_two_runs_of_a_process_cannot_both_have_one():
    with (
        evenstep.Run(shards=2, quiet=True, page=True),
        pytest.raises(ConfigError, match="this process already has a page of another run"),
    ):
        evenstep.Run(shards=2, quiet=True, page=True)


def test_where_there_can_be_no_page_is_one_sentence_and_a_supervisor_serves_its_own():
    told = []
    group = SimpleNamespace(num_machines=2, rank=0, tell=told.append)
    with pytest.raises(
        ConfigError, match="under torchrun on 2 machines, expected one: start the run with `evenstep run"
    ):
        open_page(0, Environment(), group, 8, served=False)
    with pytest.raises(ConfigError, match="on the server's own page"):
        open_page(0, Environment(), group, 8, served=True)
    assert open_page(None, Environment(), group, 8, served=True) is None
    assert open_page(8080, Environment(supervised=True), group, 8, served=False) is None
    assert told == [{"page": 8080}]
