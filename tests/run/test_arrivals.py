"""What travels while the model computes: updates of a layer during backward, values of a layer until it is used."""

import copy
import json
import os
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
import processes
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.run.arrivals import Awaited
from evenstep.run.progress import Merger, Progress
from evenstep.server import ParameterServer


def data():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(30, 6, generator=generator), torch.randint(0, 3, (30,), generator=generator))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.recurrent, self.last = nn.Linear(6, 5), nn.GRU(5, 5), nn.Linear(5, 3)
        self.between = lambda hidden: None

    def forward(self, x):
        hidden, _ = self.recurrent(F.relu(self.first(x)).unsqueeze(0))
        self.between(hidden)
        return self.last(hidden.squeeze(0))


FIRST, RECURRENT, LAST = range(3)


@pytest.fixture
def server(monkeypatch):
    with ParameterServer(staleness=None, transports=("tcp", "memory"), token="x") as server:
        place = {
            "group": 0,
            "groups": 1,
            "server_group": 0,
            "servers": [[server.urls]],
            "staleness": None,
            "lock": True,
        }
        monkeypatch.setenv("EVENSTEP_STANDING", json.dumps({**place, "token": "x"}))
        yield server


def train(prepared=lambda run, model: None, step=None):
    """The fingerprint at the end."""
    with evenstep.Run(shards=1, seed=3, quiet=True, timeout_s=20) as run:
        torch.manual_seed(1)
        model = Net()
        model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
        prepared(run, model)
        for batch in run.batches(data(), 10):
            run.step(batch, step or (lambda part: F.cross_entropy(model(part[0]), part[1])))
    return run.fingerprint()


@pytest.fixture
def expected(monkeypatch):
    return train()


def test_an_update_is_applied_while_backward_still_runs(expected, server):
    seen = []

    def watch(run, model):
        def in_the_middle(_):
            """Between the last layer and the others, backward goes on when the server has the last one's update."""
            assert processes.until(lambda: server.store.state.versions["last.weight"] > seen_so_far())
            assert server.store.state.versions["first.weight"] == before["first"], "which is yet to come"
            seen.append(run.version)

        def between(hidden):
            before.update(
                first=server.store.state.versions["first.weight"], last=server.store.state.versions["last.weight"]
            )
            hidden.register_hook(in_the_middle)

        before = {}

        def seen_so_far():
            return before["last"]

        model.between = between

    assert train(watch) == expected, "the same bits"
    assert seen == [0, 1, 2]


def test_a_layer_waits_for_its_own_values_only(expected, server):
    events = []

    def watch(run, model):
        traffic = run._engine.updates.traffic
        arrivals, courier = traffic.arrivals, traffic.courier
        write, held, free, lock = arrivals.write, [], [0], threading.Lock()

        def hold_back(part, values, version):
            with lock:
                now = part == FIRST or version <= free[0] or version == 3  # no layer runs after the last step
                if not now:
                    held.append((part, values, version))
            if now:
                write(part, values, version)

        def first_is_done(*_):
            events.append(("forward", FIRST))
            with lock:
                free[0] = run.version
            while held:
                write(*held.pop())

        courier._line = replace(courier._line, write=hold_back)
        arrivals.watch = lambda what, part: events.append((what, part))
        model.first.register_forward_hook(first_is_done)

    assert train(watch) == expected, "the same bits"
    step = [
        ("needs", FIRST), ("has", FIRST), ("forward", FIRST),
        ("needs", RECURRENT), ("has", RECURRENT), ("needs", LAST), ("has", LAST),
        ("sends", LAST), ("sends", RECURRENT), ("sends", FIRST),
    ]  # fmt: skip
    assert events[10:30] == step * 2, "the first layer ran before the values of the others were there"


def test_who_takes_a_parameter_out_of_a_module_waits_for_it(server):
    def watch(run, model):
        run._engine.updates.traffic.arrivals.watch = lambda what, part: events.append((what, part))
        model.last.register_forward_pre_hook(lambda module, _: events.append("last"))

    events = []
    held = {}

    def step(part):
        model = held["model"]
        return F.cross_entropy(F.linear(F.relu(model.first(part[0])), model.last.weight), part[1])

    def prepared(run, model):
        watch(run, model)
        held["model"] = model

    train(prepared, step)
    assert ("has", LAST) in events
    assert events.index(("has", LAST)) < events.index(("sends", LAST))
    assert type(held["model"].last._parameters) is dict, "an ordinary module again"
    assert "last" not in events


def test_a_parameter_that_nobody_waited_for_is_an_error(server):
    held = {}

    def prepared(run, model):
        held["weight"] = model.last.weight
        held["model"] = model

    def step(part):
        return F.cross_entropy(F.linear(F.relu(held["model"].first(part[0])), held["weight"]), part[1])

    with pytest.raises(UnsupportedError, match=r"'model.last.weight' through a reference kept outside the model"):
        train(prepared, step)


def test_what_would_see_one_group_only_is_refused(server):
    with evenstep.Run(quiet=True) as run:
        run.prepare(net := Net(), torch.optim.SGD(net.parameters(), 0.1))
        for name, call in {
            "load": lambda: run.load("x"),
            "edit": lambda: run.edit(lambda: None),
            "checkpoint": lambda: run.checkpoint("x", every=1),
            "exchange": lambda: run.exchange("x", lambda _: torch.ones(2)),
        }.items():
            with pytest.raises(UnsupportedError, match=f"run.{name} would see only this group"):
                call()
        with pytest.raises(UnsupportedError, match="one model with one optimizer"):
            run.prepare(nn.Linear(1, 1))


def test_what_is_saved_are_the_weights_that_the_servers_have(server, monkeypatch, tmp_path):
    with evenstep.Run(shards=1, seed=3, quiet=True) as run:
        run.prepare(net := Net(), torch.optim.Adam(net.parameters(), 0.01))
        for batch in run.batches(data(), 10):
            run.step(batch, lambda part: F.cross_entropy(net(part[0]), part[1]))
        run.save(tmp_path / "saved")
    monkeypatch.delenv("EVENSTEP_STANDING")
    with evenstep.Run(shards=1, seed=3, quiet=True) as run:
        run.prepare(other := Net(), torch.optim.Adam(other.parameters(), 0.01))
        run.load(tmp_path / "saved")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in server.store.tensors().items())


def test_what_cannot_be_is_one_sentence(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"the command line starts servers, but the script says Run\(server='http"):
        evenstep.Run(server="http://x:1")
    here = json.loads(os.environ["EVENSTEP_STANDING"])
    monkeypatch.setenv("EVENSTEP_STANDING", json.dumps({**here, "groups": 4}))
    run = evenstep.Run(quiet=True)
    with pytest.raises(ConfigError, match="4 groups but only 3 batches of 10"), run:
        next(iter(run.batches(data(), 10)))
    monkeypatch.setenv("EVENSTEP_STANDING", json.dumps({**here, "servers": [[server.urls] * 4]}))
    run = evenstep.Run(quiet=True)
    with pytest.raises(ConfigError, match=r"4 servers .* only 3 layers with parameters"), run:
        run.prepare(net := Net(), torch.optim.SGD(net.parameters(), 0.1))
    monkeypatch.setenv("EVENSTEP_STANDING", "{}")
    with pytest.raises(ConfigError, match="EVENSTEP_STANDING cannot be read"):
        evenstep.Run()


def test_awaited_parameters_are_a_dict_like_any_other():
    model = nn.Linear(2, 2)
    Awaited.hang(model)
    needed = []
    model._parameters.bundle_of, model._parameters.need = {"weight": 7, "bias": 8}, needed.append
    assert model.weight is not None
    assert list(model.state_dict()) == ["weight", "bias"]
    assert needed == [7, 7, 8]
    assert type(copy.deepcopy(model)._parameters) is dict
    assert model._parameters.get("none", 5) == 5
    Awaited.take_down(model)
    assert type(model._parameters) is dict


def test_progress_of_groups_is_merged_and_weighted():
    merger = Merger(2)
    (shown,) = merger.add(0, Progress(0, 2, 1, 2, 10, 4.0, {"a": 1.0}, 10))
    assert (shown.batch, shown.num_batches, shown.loss) == (1, 3, 4.0)
    (shown,) = merger.add(1, Progress(0, 2, 1, 1, 30, 8.0, {"a": 2.0}, 30))
    assert (shown.batch, shown.num_batches, shown.num_samples) == (2, 3, 30)
    assert (shown.loss, shown.metrics) == (7.0, {"a": 1.75})
    (shown,) = merger.add(1, Progress(1, 2, 0, 1, 0, None, {}))
    assert (shown.epoch, shown.batch, shown.num_batches) == (0, 2, 3), "one group is still in the first epoch"
    over, after = merger.add(0, Progress(0, 2, 2, 2, 10, 2.0, {"a": 1.0}, 10))
    assert (over.epoch, over.batch, over.num_batches, over.loss) == (0, 3, 3, 6.5)
    assert (after.epoch, after.batch) == (1, 0)
