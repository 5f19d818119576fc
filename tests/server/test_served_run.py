"""Training through a server: synchronously the same bits as without, and otherwise as many updates as are due."""

import json
import math
import os
import signal
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.core.errors import ConfigError, RefusedError, UnsupportedError
from evenstep.native import core
from evenstep.server import ParameterServer, connect
from workers import run_workers


def images(count=52):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 12, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )


def build():
    torch.manual_seed(8)
    return nn.Sequential(
        nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 4), Sometimes()
    )


class Sometimes(nn.Module):
    """A parameter that some shards do not use, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.scale, self.frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return x * self.scale if x.sum() > 0 else x * self.frozen


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def train(optimizer, epochs=2, **options):
    """Loss of every step, accuracy at the end, and the state."""
    with evenstep.Run(shards=8, seed=3, quiet=True, **options) as run:
        model = build()
        model, _ = run.prepare(model, OPTIMIZERS[optimizer](model.parameters()), sync_batchnorm=False)
        seen = []
        for batch in run.batches(images(), batch_size=18, epochs=epochs):
            loss, metrics = run.step(batch, lambda part: outcome(model, part))
            seen += [float(loss), metrics["right"]]
        seen += run.evaluate(images(), 16, lambda part: {"x": F.cross_entropy(model(part[0]), part[1])}).values()
        return seen, {name: value.clone() for name, value in model.state_dict().items()}


def outcome(model, part):
    y = model(part[0])
    return F.cross_entropy(y, part[1]), {"right": (y.argmax(1) == part[1]).float()}


@contextmanager
def serving(make, transport):
    """A server in a process of its own (or several), so that workers can be forked from this one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            core.die_with_parent()
            server = make((transport,))
            server.start()
            os.write(writing, json.dumps(server.url).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        yield json.loads(os.read(reading, 1000))
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def server_of(optimizer, **options):
    def make(transports):
        model = build()
        return ParameterServer(model, OPTIMIZERS[optimizer](model.parameters()), transports=transports, **options)

    return make


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("num_workers", "optimizer", "transport"),
    [
        (1, "Adam", "tcp"),
        (2, "momentum", "http"),
        (3, "Adam", "tcp"),
        (3, "Adafactor", "memory"),
        (8, "Adam", "memory"),
        (2, "Adam", "tcp,tcp"),
        (3, "momentum", "memory,memory,memory"),
        (2, "Adafactor", "tcp,tcp"),
    ],
)
def test_synchronous_updates_through_a_server_end_on_the_bits_of_a_run_without(num_workers, optimizer, transport):
    seen, state = train(optimizer)
    servers, transport = transport.count(",") + 1, transport.partition(",")[0]
    with serving(server_of(optimizer, workers=num_workers, servers=servers), transport) as url:
        for found in run_workers(num_workers, lambda _: train(optimizer, server=url)):
            assert found[0] == seen, "every loss, metric and the evaluation"
            assert same(found[1], state)
        with connect(url, register=False) as client:
            assert same(client.get_parameters(), state)
            assert client.version == 6


@pytest.mark.parametrize(("aggregate", "messages"), [(True, 6), (False, 18)])
def test_workers_of_one_machine_send_one_message_for_all(aggregate, messages):
    seen, state = train("Adam")
    with serving(server_of("Adam", workers=1 if aggregate else 3), "tcp") as url:
        server = evenstep.Server(url, aggregate=aggregate)
        for found in run_workers(3, lambda _: train("Adam", server=server)):
            assert found[0] == seen
            assert same(found[1], state)
        with connect(url, register=False) as client:
            assert client.version == 0
            status = client.status()
            assert (status["version"], status["requests"]["update"]) == (6, messages)


def spanning(**options):
    """What only workers that meet can do: batch norm over all, clipping, exchanges, edits; and a scheduler."""
    with evenstep.Run(shards=8, seed=3, quiet=True, **options) as run:
        model = build()
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 0.01))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for number, batch in enumerate(run.batches(images(), batch_size=18, epochs=2)):
            run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]), clip_norm=0.5)
            scheduler.step()
            if number == 2:
                run.edit(lambda: model[0].weight.clamp_(-0.2, 0.2))
        total = run.exchange("x", lambda shard: torch.tensor([float(shard)]))
        return float(total), {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_that_aggregate_can_do_all_that_workers_do(servers):
    def make(transports):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return ParameterServer(model, optimizer, transports=transports, servers=servers)

    total, state = spanning()
    with serving(make, "tcp") as url:
        for found in run_workers(2, lambda _: spanning(server=url)):
            assert found[0] == total
            assert same(found[1], state)


@pytest.mark.parametrize("aggregate", [True, False])
def test_a_scheduler_of_the_worker_moves_the_servers_learning_rate(aggregate):
    def train(**options):
        with evenstep.Run(shards=4, quiet=True, **options) as run:
            model = build()
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), sync_batchnorm=False)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for batch in run.batches(images(), batch_size=18):
                run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
                scheduler.step()
            return {name: value.clone() for name, value in model.state_dict().items()}

    expected, net = train(), build()
    with ParameterServer(net, torch.optim.SGD(net.parameters(), 0.1), transports=("tcp",)) as server:
        assert same(train(server=evenstep.Server(server.url, aggregate=aggregate)), expected)
        assert server.store.state.optimizer.param_groups[0]["lr"] == 0.1 * 0.5 * 0.5, "that of the last step"


def test_the_first_worker_puts_the_model_where_the_server_has_none():
    seen, state = train("Adam")
    make = lambda transports: ParameterServer(None, OPTIMIZERS["Adam"], workers=2, transports=transports)  # noqa: E731
    with serving(make, "tcp") as url:
        for found in run_workers(2, lambda _: train("Adam", server=url)):
            assert found[0] == seen
            assert same(found[1], state)


@pytest.mark.parametrize("staleness", [1, None])
def test_asynchronous_workers_make_one_update_for_every_batch(staleness):
    with serving(server_of("momentum", staleness=staleness), "tcp") as url:
        seen = run_workers(2, lambda _: train("momentum", server=evenstep.Server(url, staleness=staleness))[0])
        assert all(loss == loss for found in seen for loss in found)
        with connect(url, register=False) as client:
            assert client.get_parameters()
            assert client.version == 2 * 6


@pytest.mark.parametrize(("every", "updates"), [(2, 3), ("epoch", 2)])
def test_one_worker_that_sends_what_it_changed_ends_where_it_would_have_alone(every, updates):
    _, state = train("momentum")
    make = lambda transports: ParameterServer(build(), staleness=None, transports=transports)  # noqa: E731
    with serving(make, "tcp") as url:
        (found,) = run_workers(
            1, lambda _: train("momentum", server=evenstep.Server(url, staleness=None, update_every=every))
        )
        with connect(url, register=False) as client:
            there = client.get_parameters()
            assert client.version == updates
    for name in dict(build().named_parameters()):
        assert torch.allclose(there[name], state[name], atol=1e-4)
        assert torch.equal(there[name], found[1][name])


def test_what_cannot_be_is_one_sentence():
    with ParameterServer(build(), OPTIMIZERS["Adam"], staleness=None, transports=("tcp",)) as server:
        with pytest.raises(ConfigError, match="has staleness None but the script says"):
            evenstep.Run(server=server.url)
        with evenstep.Run(server=evenstep.Server(server.url, staleness=None), quiet=True) as run:
            model = build()
            model, _ = run.prepare(model, OPTIMIZERS["Adam"](model.parameters()), sync_batchnorm=False)
            batch = next(iter(run.batches(images(), 18)))
            with pytest.raises(UnsupportedError, match="cannot be clipped here"):
                run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]), clip_norm=1.0)


def test_what_would_see_this_worker_only_is_refused(tmp_path):
    with (
        ParameterServer(build(), OPTIMIZERS["Adam"], staleness=None, transports=("tcp",)) as server,
        evenstep.Run(server=evenstep.Server(server.url, staleness=None), quiet=True) as run,
    ):
        model = build()
        model, _ = run.prepare(model, OPTIMIZERS["Adam"](model.parameters()), sync_batchnorm=False)
        calls = {
            "load": lambda: run.load(tmp_path),
            "checkpoint": lambda: run.checkpoint(tmp_path, every=1),
            "exchange": lambda: run.exchange("x", lambda _: torch.ones(2)),
            "edit": lambda: run.edit(lambda: None),
        }
        for name, call in calls.items():
            with pytest.raises(UnsupportedError, match=f"run.{name} in a run with a server"):
                call()
        batch = next(iter(run.batches(images(), 18)))
        run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
        run.save(tmp_path / "saved")
        saved = load_file(next((tmp_path / "saved").glob("*.safetensors")))
        assert same({name.removeprefix("model."): value for name, value in saved.items()}, model.state_dict())
        with pytest.raises(RefusedError, match="options of 0 groups came, expected those of 1"):
            run._others.client.update({}, options=[])


@pytest.mark.parametrize("every", [1, 2])
def test_a_loss_that_is_not_finite_is_a_result_as_any_other(every):
    with (
        ParameterServer(build(), OPTIMIZERS["Adam"], staleness=None, transports=("http",)) as server,
        evenstep.Run(server=evenstep.Server(server.url, staleness=None, update_every=every), quiet=True) as run,
    ):
        model = build()
        model, _ = run.prepare(model, OPTIMIZERS["Adam"](model.parameters()), sync_batchnorm=False)
        for batch in run.batches(images(), 26, epochs=2):
            loss, metrics = run.step(batch, lambda part: (outcome(model, part)[0] * torch.nan, {"x": torch.inf}))
            assert math.isnan(loss)
            assert metrics == {"x": math.inf}
        assert server.store.version == 4 // every
