"""What was acknowledged survives: snapshots, the log, and kill -9 at any moment."""

import json
import os
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.native import core
from evenstep.server import ParameterServer, connect


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def make(directory, net=None, **options):
    net = net or model()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    options = {"staleness": None, "directory": directory, "transports": ("tcp",), **options}
    return ParameterServer(net, optimizer, **options)


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model().named_parameters()}


def plain(num_steps):
    """What a single process makes of the same gradients."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for step in range(1, num_steps + 1):
        for name, p in net.named_parameters():
            p.grad = gradients(step)[name]
        optimizer.step()
    return net.state_dict()


def same(found, expected):
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("durable", [False, True])
def test_a_server_goes_on_from_its_directory(tmp_path, durable):
    for first in (1, 4):
        with make(tmp_path, durable=durable) as server, connect(server.url, worker="w") as client:
            assert client.version == first - 1
            for step in range(first, first + 3):
                assert client.update_parameters(gradients(step)) == step
    with make(tmp_path, durable=durable) as server, connect(server.url, worker="w") as client:
        assert same(client.get_parameters(), plain(6)), "the optimizer's state went on too"
        assert client._sequence == 6


def test_snapshots_come_every_so_many_updates_and_leave_one(tmp_path):
    with make(tmp_path, snapshot_every=2) as server, connect(server.url) as client:
        for step in range(1, 6):
            client.update_parameters(gradients(step))
            assert json.loads((tmp_path / "server.json").read_text())["version"] == step // 2 * 2
            assert len(list(tmp_path.iterdir())) == 3
    assert json.loads((tmp_path / "server.json").read_text())["version"] == 5


def test_a_server_without_a_model_finds_it_in_its_directory(tmp_path):
    with make(tmp_path) as server, connect(server.url) as client:
        client.update_parameters(gradients(1))
    again = ParameterServer(None, lambda p: torch.optim.Adam(p, 0.01), directory=tmp_path, transports=("tcp",))
    with again as server, connect(server.url) as client:
        assert same(client.get_parameters(), plain(1))


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_torn_end_of_the_log_is_left_out_and_a_harmed_snapshot_is_named(tmp_path, harm):
    server = make(tmp_path, durable=True)
    with server, connect(server.url) as client:
        for step in range(1, 4):
            client.update_parameters(gradients(step))
        (log,) = tmp_path.glob("log-*")
        kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        data = bytearray(log.read_bytes())
        size = len(data) // 3
    for path in tmp_path.iterdir():
        path.unlink()
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    if harm == "cut":
        del data[-5:]
    else:
        data[-size // 2] ^= 1
    log.write_bytes(data)
    with make(tmp_path, durable=True) as server, connect(server.url) as client:
        assert client.version == 2
        assert same(client.get_parameters(), plain(2))
    (state,) = tmp_path.glob("state-*")
    content = bytearray(state.read_bytes())
    content[-3] ^= 1
    state.write_bytes(content)
    with pytest.raises(CheckpointError, match="was altered: its checksum is another"):
        make(tmp_path)


def test_a_directory_of_another_model_is_named(tmp_path):
    make(tmp_path).close()
    with pytest.raises(CheckpointError, match="belongs to another model"):
        make(tmp_path, nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="durable=True needs a directory"):
        ParameterServer(nn.Linear(1, 1), durable=True)


def test_a_snapshot_that_fails_costs_nothing_that_was_acknowledged(tmp_path, monkeypatch, caplog):
    replace, copies = os.replace, {}

    def no_space(source, target):
        if target.name == "server.json":
            raise OSError(28, "No space left on device")
        replace(source, target)

    server = make(tmp_path, durable=True, snapshot_every=2)
    with server, connect(server.url) as client:
        monkeypatch.setattr(os, "replace", no_space)
        for step in range(1, 6):
            assert client.update_parameters(gradients(step)) == step
        assert "SNAPSHOT FAILED" in caplog.text
        copies = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        monkeypatch.undo()
    elsewhere = tmp_path / "as a kill would have left it"
    elsewhere.mkdir()
    for name, content in copies.items():
        (elsewhere / name).write_bytes(content)
    with make(elsewhere, durable=True) as server, connect(server.url) as client:
        assert client.version == 5
        assert same(client.get_parameters(), plain(5))


class Mortal:
    """A durable server in a process of its own, always at the same address."""

    def __init__(self, directory):
        self._directory, self._port = directory, 0
        self.start()

    def start(self):
        reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                core.die_with_parent()
                self._serve(writing)
            finally:
                os._exit(1)
        os.close(writing)
        self.url = os.read(reading, 100).decode()
        os.close(reading)
        self._port = int(self.url.rpartition(":")[2])

    def _serve(self, writing):
        torch.manual_seed(1)
        server = ParameterServer(
            nn.Linear(50, 40, bias=False), staleness=None, directory=self._directory, durable=True, snapshot_every=7,
            transports=("tcp",), port=self._port,
        )  # fmt: skip
        server.start()
        os.write(writing, server.url.encode())
        signal.pause()

    def kill(self):
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def test_every_acknowledged_update_survives_kill_9(tmp_path):
    """Servers are killed at random moments, again and again, while two workers send to them."""
    num_updates, num_kills, dice = 40, 5, random.Random(7)
    server = Mortal(tmp_path)
    done = {"a": 0, "b": 0}

    def work(name):
        with connect(server.url, worker=name) as client:
            while done[name] < num_updates:
                client.update_parameters({"weight": torch.full((40, 50), -1.0)}, kind="delta")
                done[name] += 1

    def look():
        with connect(server.url, register=False) as client:
            return client.get_parameters()["weight"], client.version

    begin, _ = look()
    threads = [threading.Thread(target=work, args=(name,)) for name in done]
    for thread in threads:
        thread.start()
    for kill in range(num_kills):
        while sum(done.values()) < 2 * num_updates * kill / num_kills:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.02))
        server.kill()
        server.start()
    for thread in threads:
        thread.join()
    end, version = look()
    server.kill()
    assert version == 2 * num_updates, "every update once: nothing lost, nothing twice"
    assert torch.allclose(end - begin, torch.full((40, 50), 2.0 * num_updates), atol=1e-3)
