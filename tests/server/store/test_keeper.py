"""What was acknowledged survives: snapshots, the log, and kill -9 at any moment."""

import json
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch
from torch import nn

import processes
from evenstep.core.errors import CheckpointError, ConfigError, UnreachableError
from evenstep.native import core
from evenstep.server import ParameterServer, connect
from evenstep.server.store.log import Log, read


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
        assert client.sequence == 6


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
    with pytest.raises(CheckpointError, match="was altered: its checksum differs"):
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


# ---- a disk that is full ----


@pytest.fixture
def full_disk():
    """Lets regular files grow no further than so much beyond a file, by a limit of the process: real errors."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(path, room):
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("staleness", [None, 0])
def test_after_a_full_disk_a_durable_server_goes_on_by_itself(tmp_path, full_disk, staleness, caplog):
    caplog.set_level("INFO", "evenstep.server")
    with make(tmp_path, durable=True, staleness=staleness) as server, connect(server.url, worker="w") as client:
        assert client.update_parameters(gradients(1)) == 1
        (log,) = tmp_path.glob("log-*")
        full_disk(log, 50)
        with pytest.raises(UnreachableError, match=r"the log cannot be written .* so the update was not applied"):
            client.update_parameters(gradients(9), sequence=2, timeout_s=0.3)
        assert server.store.version == 1
        assert client.get_parameters(["0.bias"]), "who reads is served"
        sending = threading.Thread(target=lambda: client.update_parameters(gradients(2), sequence=3))
        sending.start()
        time.sleep(0.2)
        assert server.store.status()["version"] == 1
        full_disk(log, 1 << 30)
        sending.join()
        assert client.update_parameters(gradients(3), sequence=4) == 3
        events = [text for _, text in client.status()["events"]]
        copies = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sum("updates are refused until it can" in text for text in events) == 1
    assert events[-1] == "the log can be written again"
    with make(copied(copies, tmp_path / "killed"), durable=True) as server:
        assert server.store.version == 3
        assert same(server.store.tensors(), plain(3))


def copied(copies, directory):
    """A directory as a kill would have left it."""
    directory.mkdir()
    for name, content in copies.items():
        (directory / name).write_bytes(content)
    return directory


def test_all_workers_of_an_update_that_the_disk_refused_send_it_again(tmp_path, full_disk):
    options = {"durable": True, "staleness": 0, "workers": 2}
    with make(tmp_path, **options) as server, connect(server.url) as a, connect(server.url) as b:
        (log,) = tmp_path.glob("log-*")
        full_disk(log, 50)
        threads = [threading.Thread(target=client.update_parameters, args=(gradients(1),)) for client in (a, b)]
        for thread in threads:
            thread.start()
        told = lambda: [text for _, text in server.store.status()["events"]]  # noqa: E731  # short
        assert processes.until(lambda: any("updates are refused until it can" in text for text in told()))
        assert server.store.status()["version"] == 0  # which waits until no attempt is under way
        full_disk(log, 1 << 30)
        for thread in threads:
            thread.join()
        assert server.store.version == 1
        assert same(server.store.tensors(), plain(1))


def test_nothing_is_put_on_a_full_disk_until_there_is_room(tmp_path, monkeypatch):
    def no_space(fd):
        raise OSError(28, "No space left on device")

    server = ParameterServer(
        None, lambda p: torch.optim.Adam(p, 0.01), directory=tmp_path, durable=True, transports=("tcp",), staleness=None
    )
    values = {name: value for name, value in model().state_dict().items()}
    with server, connect(server.url) as client:
        monkeypatch.setattr(os, "fsync", no_space)
        client.timeout_s = 0.3
        with pytest.raises(UnreachableError, match="nothing was put, try again"):
            client.put_parameters(values)
        assert server.store.layout is None
        assert list(tmp_path.iterdir()) == [], "nothing of it is left"
        monkeypatch.undo()
        client.timeout_s = 20
        assert client.put_parameters(values, buffers=[name for name, _ in model().named_buffers()]) == 0
        assert client.update_parameters(gradients(1)) == 1
        assert same(client.get_parameters(), plain(1))


def test_a_disk_that_lost_what_it_had_taken_gets_a_new_file(tmp_path, monkeypatch):
    fdatasync, fails = os.fdatasync, [True]

    def sync(fd):
        if fails and fails.pop():
            raise OSError(5, "Input/output error")
        fdatasync(fd)

    with make(tmp_path, durable=True) as server, connect(server.url) as client:
        assert client.update_parameters(gradients(1)) == 1
        before = {path.name for path in tmp_path.iterdir()}
        monkeypatch.setattr(os, "fdatasync", sync)
        assert client.update_parameters(gradients(2)) == 2
        assert {path.name for path in tmp_path.iterdir()} - before, "it goes on in others"
        copies = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.undo()
    with make(copied(copies, tmp_path / "killed"), durable=True) as server:
        assert same(server.store.tensors(), plain(2))


# ---- a log that cannot be replayed ----


def killed_after(directory, num_updates, **options):
    """A directory as a durable server left it that was killed after so many updates."""
    with make(directory / "first", durable=True, **options) as server, connect(server.url, worker="w") as client:
        for step in range(1, num_updates + 1):
            client.update_parameters(gradients(step))
        copies = {path.name: path.read_bytes() for path in (directory / "first").iterdir()}
    return copied(copies, directory / "killed")


def poison(directory, number):
    """Make one record such that it cannot be applied, but is whole."""
    (path,) = directory.glob("log-*")
    found = [each.record for each in read(path)]
    found[number - 1][0]["options"] = [{"lr": "x"}]
    path.unlink()
    log = Log(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), sync=False)
    for record in found:
        log.append(record)
    log.close()
    return path


def harm(directory, number):
    """Flip a bit in the middle of a record."""
    (path,) = directory.glob("log-*")
    data = bytearray(path.read_bytes())
    data[[each.offset for each in read(path)][number - 1] + 300] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("spoil", [poison, harm])
@pytest.mark.parametrize("number", [1, 3])
def test_a_log_that_cannot_be_replayed_is_said_with_record_and_remedy(tmp_path, caplog, spoil, number):
    directory = killed_after(tmp_path, 4)
    path = spoil(directory, number)
    before = {each.name: each.read_bytes() for each in directory.iterdir()}
    with pytest.raises(CheckpointError) as error:
        make(directory, durable=True)
    sentence = str(error.value)
    assert f"{path} cannot be replayed: record {number} (" in sentence
    assert ("version 3, by 'w'" if number == 3 else "version 1, by 'w'") in sentence or spoil is harm
    assert f"to go on from version {number - 1} without it and all that follow, start with --set-aside" in sentence
    assert {each.name: each.read_bytes() for each in directory.iterdir()} == before, "nothing was touched"
    with make(directory, durable=True, set_aside=True) as server, connect(server.url, worker="w") as client:
        assert server.store.version == number - 1
        assert same(client.get_parameters(), plain(number - 1))
        assert "going on from version" in caplog.text
        for step in range(number, 6):
            client.update_parameters(gradients(step))
    aside = directory / f"set-aside-{path.name}-{number}"
    assert before[path.name].endswith(aside.read_bytes())
    assert len(aside.read_bytes()) > 3 * 100
    with make(directory, durable=True) as server:
        assert same(server.store.tensors(), plain(5)), "and it goes on as ever"
    assert aside.exists()


def test_set_aside_changes_nothing_where_nothing_is_wrong(tmp_path):
    directory = killed_after(tmp_path, 2)
    with make(directory, durable=True, set_aside=True) as server:
        assert server.store.version == 2
    assert not list(directory.glob("set-aside*"))
    with pytest.raises(ConfigError, match="set_aside=True is for a directory"):
        ParameterServer(nn.Linear(1, 1), set_aside=True)


# ---- the directory ----


def test_files_of_others_are_left_alone(tmp_path):
    others = [
        "state-of-the-art.md",
        "log-2024.txt",
        "log-",
        "state-1.safetensors",
        "notes.partial",
        "log-000000000001.old",
    ]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / "log-000000000000").mkdir()
    (tmp_path / "state-folder").mkdir()
    with make(tmp_path, snapshot_every=1, durable=True) as server, connect(server.url) as client:
        for step in range(1, 4):
            client.update_parameters(gradients(step))
    assert all((tmp_path / name).read_text() == "mine" for name in others)
    assert (tmp_path / "log-000000000000").is_dir()
    assert len(list(tmp_path.iterdir())) == len(others) + 2 + 3


def test_two_servers_do_not_share_a_directory(tmp_path):
    with make(tmp_path) as server:
        with pytest.raises(CheckpointError, match="is used by another server; stop that one"):
            make(tmp_path)
        assert server.store.version == 0
    make(tmp_path).close()


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.pop("log"),
        lambda facts: facts.update(version="x"),
        lambda facts: facts.update(acknowledged=[]),
        lambda facts: facts.pop("checksum"),
        lambda facts: facts.update(version=7),
    ],
)
def test_altered_facts_are_one_sentence(tmp_path, change):
    make(tmp_path).close()
    path = tmp_path / "server.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="was altered, or is of another version; bring back a copy"):
        make(tmp_path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[" * 100_000, b"\xff\xfe", b"7"])
def test_facts_that_are_none_are_one_sentence(tmp_path, content):
    make(tmp_path).close()
    (tmp_path / "server.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read|was altered"):
        make(tmp_path)


@pytest.mark.parametrize("name", ["server.json", "state-000000000000.safetensors", "log-000000000000"])
def test_what_is_no_regular_file_is_not_read(tmp_path, name):
    make(tmp_path, durable=True).close()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        make(tmp_path, durable=True)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["server.json.partial", "state-000000000000.partial", "log-000000000000.partial"])
@pytest.mark.parametrize("thing", ["pipe", "link"])
def test_what_lies_where_a_file_is_begun_is_neither_waited_for_nor_written_through(tmp_path, name, thing):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    directory = tmp_path / "server"
    directory.mkdir()
    os.mkfifo(directory / name) if thing == "pipe" else (directory / name).symlink_to(theirs)
    make(directory, durable=True).close()
    make(directory, durable=True).close()
    assert theirs.read_text() == "theirs"
