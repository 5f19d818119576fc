"""Several servers with slices of one model: one version for all, nothing lost and nothing twice, whoever dies."""

import os
import random
import re
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import processes
from evenstep.core.errors import CheckpointError, ConfigError, RefusedError, ServerError, UnreachableError
from evenstep.server import ParameterServer, connect
from workers import Cli

SHAPES = {"w": (30, 20), "b": (20,), "u": (7,)}


def model():
    net = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    net["frozen"] = nn.Parameter(torch.ones(3), requires_grad=False)
    net.register_buffer("count", torch.tensor(0))
    return net


def filled(amount):
    return {name: torch.full(shape, float(amount)) for name, shape in SHAPES.items()}


@contextmanager
def serving(*args, **options):
    with ParameterServer(
        *(args or (model(),)), **{"staleness": None, "servers": 2, "transports": ("tcp",), **options}
    ) as s:
        yield s


def pids(server):
    """The processes of the servers, in order."""
    return sorted(processes.descendants(server._host._watcher.pid))


def value_of(found):
    """The one number that all trained elements have."""
    values = {float(x) for name in SHAPES for x in found[name].flatten()}
    assert len(values) == 1, f"a mixture of versions: {values}"
    return values.pop()


def test_a_client_sees_one_server():
    with serving(transports=("http",)) as server, connect(server.url.split(","), worker="me") as client:
        assert client.update_parameters({**filled(1), "count": torch.tensor(3)}, kind="delta", buffers=["count"]) == 1
        assert client.update_parameters({"u": torch.ones(7)}, kind="delta") == 2
        found = client.get_parameters()
        assert [float(found[name].flatten()[0]) for name in ("w", "b", "u", "frozen", "count")] == [-1, -1, -2, 1, 3]
        assert list(client.get_parameters(since=1)) == ["u"]
        assert list(client.get_parameters(["b"], min_version=2)) == ["b"]
        status = client.status()
        assert status["parameters"]["w"]["shape"] == [30, 20]
        assert [each["version"] for each in status["servers"]] == [2, 2]
        assert sum(each["num_bytes"] for each in status["servers"]) == status["num_bytes"] == 4 * 630 + 8
        assert [worker["name"] for worker in status["workers"]] == ["me"]


def test_addresses_that_do_not_belong_together_are_one_sentence():
    with serving() as server, serving() as other, ParameterServer(model(), transports=("tcp",)) as alone:
        a, b = server.url.split(",")
        wrong = {
            f"{b},{a}": "the addresses are of servers [1, 0], expected [0, 1] in order",
            f"{a},{a}": "the addresses are of servers [0, 0], expected [0, 1] in order",
            a: f"{a} is server 0 of 2; give the addresses of all, joined by commas",
            b: f"{b} is server 1 of 2; give the addresses of all, joined by commas",
            f"{server.url},{a}": f"{a} is server 0 of 2, but 3 addresses were given; give all",
            f"{a},{other.url.split(',')[1]}": "belong to different sets of servers; give those of one set",
            f"{alone.url},{b}": f"{alone.url} holds a whole model; give only its address, without 1 others",
        }
        for url, sentence in wrong.items():
            for register in (True, False):
                with pytest.raises(ConfigError) as refused:
                    connect(url, timeout_s=20, register=register)
                assert sentence in str(refused.value)
        with connect(server.url) as client:  # the workers of wrong addresses have left
            assert [worker["name"] for worker in client.status()["workers"]] == [client.worker]
            for one in client.servers.connections:
                with pytest.raises(RefusedError, match="which hold one model together: connect to all of them"):
                    one.push("update", {"worker": client.worker, "sequence": 9}, {})


@pytest.mark.parametrize("staleness", [None, 3])
def test_no_reader_sees_a_mixture_of_versions(staleness):
    """Every update moves all elements by another amount, so two slices agree only if they had the same updates."""
    dice, problems, over = random.Random(3), [], threading.Event()
    amounts = [[dice.randrange(1, 1 << 12) for _ in range(25)] for _ in range(3)]
    with serving(staleness=staleness, transports=("memory",)) as server:

        def read():
            with connect(server.url, register=False) as client:
                seen = 0
                while not over.is_set():
                    try:
                        found = client.get_parameters()
                        value_of(found)
                    except AssertionError as error:
                        problems.append(str(error))
                    assert client.version >= seen
                    seen = client.version

        def write(mine):
            with connect(server.url) as client:
                for amount in mine:
                    client.update_parameters(filled(-amount), kind="delta")
                    assert value_of(client.get_parameters()) >= amount

        readers = [threading.Thread(target=read) for _ in range(2)]
        writers = [threading.Thread(target=write, args=(mine,)) for mine in amounts]
        for thread in readers + writers:
            thread.start()
        for thread in writers:
            thread.join()
        over.set()
        for thread in readers:
            thread.join()
        assert not problems
        with connect(server.url, register=False) as client:
            assert value_of(client.get_parameters()) == sum(map(sum, amounts))
            assert client.version == 75


def test_a_pause_lets_a_reader_in_when_updates_come_too_fast(monkeypatch):
    monkeypatch.setattr("evenstep.server.client.server_set._TRIES", 0)
    with serving() as server, connect(server.url) as client, connect(server.url, register=False) as reader:
        for version in range(1, 4):
            client.update_parameters(filled(-1), kind="delta")
            assert value_of(reader.get_parameters()) == version
        begin = time.monotonic()
        reader.servers._pause(True, begin + 30)  # and is gone: the others wait no longer than a moment
        client.update_parameters(filled(-1), kind="delta")
        assert 1.0 <= time.monotonic() - begin < 20


def die_before_telling(client, amount):
    """An update as `update` sends it, except that the worker dies when server 0 has applied it."""
    client.servers.spread = lambda *_, **__: True
    return client.update_parameters(filled(amount), kind="delta")


@pytest.mark.parametrize("then", ["read", "write"])
def test_what_a_dying_worker_has_not_told_is_told_by_the_next(then):
    with serving(lease_s=0.3) as server:
        with connect(server.url, worker="dying") as client:
            assert die_before_telling(client, -1) == 1
            assert [each["version"] for each in client.status()["servers"]] == [1, 0]
        with connect(server.url) as client:
            if then == "write":
                assert client.update_parameters(filled(-1), kind="delta") == 2
            assert value_of(client.get_parameters(min_version=1)) == (1 if then == "read" else 2)


def test_what_a_dying_worker_has_not_decided_never_was():
    with serving(lease_s=0.2) as server, connect(server.url, worker="alive") as client:
        with connect(server.url, worker="dying") as dying:
            dying._leader.push = None  # what comes after staging fails
            with pytest.raises(TypeError):
                dying.update_parameters(filled(-5), kind="delta")
        assert client.update_parameters(filled(-1), kind="delta") == 1
        with connect(server.url, worker="dying") as again:  # under the same name and with the same number
            assert again.update_parameters(filled(-2), kind="delta") == 2
        assert value_of(client.get_parameters()) == 3


def test_a_follower_that_lost_what_was_staged_gets_it_again():
    with serving() as server, connect(server.url, timeout_s=20) as client:
        stage, lost = client.servers.stage, []

        def stage_but_lose_the_first(*args, **options):
            if lost:
                return stage(*args, **options)
            lost.append(args)
            return client.servers.at.__setitem__(1, client.servers.at[0])

        client.servers.at = [0, 0]
        client.servers.stage = stage_but_lose_the_first
        assert client.update_parameters(filled(-1), kind="delta") == 1
        assert value_of(client.get_parameters()) == 1


@pytest.mark.parametrize("durable", [True, False])
def test_servers_that_are_killed_come_back_with_every_update(tmp_path, durable):
    """Either server is killed at random moments, again and again, while two workers send and one reads."""
    num_updates, num_kills, dice = 24, 4, random.Random(5)
    done = {"a": 0, "b": 0}
    options = {"directory": tmp_path, "durable": durable, "snapshot_every": 5}
    with serving(**options) as server:

        def work(name):
            with connect(server.url, worker=name) as client:
                while done[name] < num_updates:
                    client.update_parameters(filled(-1), kind="delta")
                    done[name] += 1
                    assert value_of(client.get_parameters()) >= done[name]

        threads = [threading.Thread(target=work, args=(name,)) for name in done]
        for thread in threads:
            thread.start()
        for kill in range(num_kills):
            while sum(done.values()) < 2 * num_updates * kill / num_kills:
                time.sleep(0.001)
            time.sleep(dice.uniform(0, 0.02))
            processes.until(lambda: len(pids(server)) == 2)
            os.kill(pids(server)[dice.randrange(2)], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert done == {"a": num_updates, "b": num_updates}
        with connect(server.url, register=False) as client:
            assert value_of(client.get_parameters()) == 2 * num_updates
            assert client.version == 2 * num_updates
        for pid in pids(server):  # and all at once
            os.kill(pid, signal.SIGKILL)
    with serving(**options) as server, connect(server.url, worker="a") as client:
        assert value_of(client.get_parameters()) == 2 * num_updates
        assert client.update_parameters(filled(-1), kind="delta") == 2 * num_updates + 1
    for count, words in ((3, "is of 2 servers, expected 3"), (1, "is of 2 servers, expected 1")):
        with pytest.raises(CheckpointError, match=words):
            ParameterServer(model(), directory=tmp_path, servers=count)


def test_without_a_directory_one_death_ends_all_with_a_sentence():
    server = ParameterServer(model(), staleness=None, servers=2, transports=("tcp",))
    server.start()
    try:
        with connect(server.url, timeout_s=0.5) as client:
            os.kill(pids(server)[1], signal.SIGKILL)
            with pytest.raises(UnreachableError, match="cannot be reached"):
                client.update_parameters(filled(1), kind="delta")
        assert processes.until(lambda: not processes.is_alive(server._host._watcher.pid)), "all has been said"
        with pytest.raises(ServerError, match=r"server 1 of 2 \(pid \d+\) was killed by SIGKILL: its slice of the"):
            server._host.check()
    finally:
        server.close()


BUILDER = """
import torch
from torch import nn

def build():
    model = nn.Linear(30, 20)
    return model, torch.optim.SGD(model.parameters(), 0.5)
"""


def test_the_death_of_the_process_that_starts_them_is_said(tmp_path, caplog):
    server = ParameterServer(model(), servers=2, transports=("tcp",), directory=tmp_path)
    server.start()
    starter, theirs = server._host._watcher.pid, pids(server)
    os.kill(starter, signal.SIGKILL)
    assert processes.until(lambda: not any(map(processes.is_alive, (starter, *theirs))))
    sentence = (
        f"the process that starts the servers (pid {starter}) was killed by SIGKILL, and all servers ended with it; "
        "start them again with the same directory"
    )
    with pytest.raises(ServerError, match=re.escape(sentence)):
        server._host.check()
    assert sentence in caplog.text
    server.close()


def test_the_command_starts_them_watches_them_and_takes_them_along(script, tmp_path):
    argv = ["server", f"{script(BUILDER, 'model.py')}:build", "--servers", "2", "--staleness", "none"]
    with Cli(*argv, "--transports", "tcp", "--directory", tmp_path / "state", "--durable") as cli:
        cli.until_it_says("serving at")
        url = cli.stdout.split()[-1]
        with connect(url, worker="w") as client:
            assert client.update_parameters({"bias": torch.ones(20)}) == 1
            starter = min(processes.descendants(cli.pid))
            os.kill(max(processes.descendants(starter)), signal.SIGKILL)
            assert client.update_parameters({"bias": torch.ones(20)}) == 2
        assert "it is started again from its directory" in cli.stderr
        all_of_them = list(processes.descendants(cli.pid))
        assert len(all_of_them) == 3
        cli.kill(signal.SIGKILL)
        assert processes.until(lambda: not any(map(processes.is_alive, all_of_them)))
    with Cli(*argv) as cli:
        cli.until_it_says("serving at", times=3)
        assert [line.count(",") for line in cli.stdout.splitlines()] == [1, 1, 1]
        os.kill(max(processes.descendants(min(processes.descendants(cli.pid)))), signal.SIGKILL)
        done = cli.wait()
        assert done.code == ServerError.exit_code
        assert "with a directory it would have been started again" in done.stderr.splitlines()[-1]


def test_a_signal_to_all_processes_ends_them_as_one_to_the_first_does(script):
    argv = ["server", f"{script(BUILDER, 'model.py')}:build", "--servers", "2", "--transports", "tcp"]
    with Cli(*argv) as cli:
        cli.until_it_says("serving at")
        for pid in [*processes.descendants(cli.pid), cli.pid]:
            os.kill(pid, signal.SIGTERM)
        done = cli.wait(20.0)
    assert done.code == 0
    assert "lost the server" not in done.stderr


@pytest.mark.parametrize("content", ["nonsense", "[]", '{"name": 3, "count": 2}', '{"name": "x"}', "[" * 5000])
def test_an_altered_set_of_servers_is_one_sentence(tmp_path, content):
    (tmp_path / "servers.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"servers\.json (cannot be read|was altered)"):
        ParameterServer(model(), directory=tmp_path, servers=2)


def test_without_a_lock_clients_change_the_memory_of_every_server():
    with serving(lock=False, transports=("memory",)) as server, connect(server.url) as client:
        for version in range(1, 6):
            assert client.update_parameters(filled(-1), kind="delta") == version
        with connect(server.url, register=False) as reader:
            assert value_of(reader.get_parameters(min_version=5)) == 5
