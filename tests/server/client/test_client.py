"""One contract for all transports and for several servers: whatever the client speaks, it sees the same."""

import threading
import time

import pytest
import torch
from torch import nn

import processes
from evenstep.core.errors import ConfigError, RefusedError, UnreachableError
from evenstep.server import Limits, ParameterServer, connect
from evenstep.server.client import connection
from evenstep.server.hosting.config import TRANSPORTS


def model(value=0.0):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)
    return net


def deltas(amount=-1.0):
    return {name: torch.full_like(p, amount) for name, p in model().named_parameters()}


@pytest.fixture(params=[*((name, 1) for name in TRANSPORTS), ("tcp", 2)], ids=lambda p: f"{p[0]}x{p[1]}")
def serve(request):
    """Starts servers, and connects to them by one transport."""
    started, clients = [], []

    class Serving:
        transport, count = request.param

        def __call__(self, *args, **options):
            server = ParameterServer(*args, transports=(self.transport,), servers=self.count, **options)
            started.append(server)
            server.start()
            return server

        def connect(self, server, **options):
            clients.append(connect(server.url, **{"timeout_s": 20, **options}))
            return clients[-1]

        def version(self, server):
            with connect(server.url, register=False, token=server.token) as client:
                return client.status()["version"]

        def each(self, client):
            """The connections to the single servers."""
            return client.servers.connections if self.count > 1 else [client.connection]

    yield Serving()
    for client in clients:
        client.close()
    for server in started:
        server.close()


def test_parameters_come_as_they_are(serve):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3).bfloat16())
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    client = serve.connect(serve(net))
    found = client.get_parameters()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    out = {name: torch.zeros_like(value) for name, value in expected.items()}
    got = client.get_parameters(out=out)
    assert all(got[name].data_ptr() == out[name].data_ptr() for name in out if out[name].numel())
    assert all(torch.equal(out[name], expected[name]) for name in expected)
    assert list(client.get_parameters(["0.bias"])) == ["0.bias"]
    with pytest.raises(ConfigError, match=r"out\['0.bias'\] is"):
        client.get_parameters(["0.bias"], out={"0.bias": torch.zeros(3)})
    assert torch.equal(client.get_parameters(["0.bias"])["0.bias"], expected["0.bias"])


def test_the_optimizer_steps_on_the_server(serve):
    net = model()
    server = serve(net, torch.optim.SGD(net.parameters(), 0.5), staleness=None)
    client = serve.connect(server)
    gradients = {name: torch.full_like(p, 2.0) for name, p in net.named_parameters()}
    assert client.update_parameters(gradients) == 1
    assert client.update_parameters(gradients) == 2
    assert all(bool((value == -2).all()) for value in client.get_parameters(min_version=2).values())
    if serve.count > 1:
        client.close()
        server.close()
    assert all(bool((p == -2).all()) for p in net.parameters()), "the model is the server's, or gets what it had"


def test_get_waits_for_a_version_and_says_when_it_does_not_come(serve):
    server = serve(model(), staleness=None)
    reader, writer = serve.connect(server), serve.connect(server)
    found = []
    thread = threading.Thread(target=lambda: found.append(reader.get_parameters(min_version=2)))
    thread.start()
    writer.update_parameters(deltas(), kind="delta")
    writer.update_parameters({"0.bias": torch.full((2,), -1.0)}, kind="delta")
    thread.join()
    assert (float(found[0]["0.bias"][0]), float(found[0]["1.bias"][0])) == (2, 1)
    assert list(writer.get_parameters(since=1)) == ["0.bias"]
    assert writer.get_parameters(since=2) == {}
    assert writer.wait(2) == 2
    with pytest.raises(UnreachableError, match="version 9 of the parameters did not come in time; the server is at 2"):
        writer.get_parameters(min_version=9, timeout_s=0.05)


def test_the_first_client_may_put(serve):
    server = serve(None, lambda parameters: torch.optim.SGD(parameters, 1.0), staleness=None)
    first, second, third = serve.connect(server, worker="first"), serve.connect(server), serve.connect(server)
    found = []
    thread = threading.Thread(target=lambda: found.append(third.get_parameters()))
    thread.start()
    with pytest.raises(RefusedError, match="nothing was put yet"):
        second.update_parameters(deltas())
    assert first.put_parameters(model(3).state_dict()) == 0
    thread.join()
    assert float(found[0]["1.bias"]) == 3
    with pytest.raises(RefusedError, match="put by 'first' already") as refused:
        second.put_parameters(model(4).state_dict())
    assert refused.value.status == 409
    assert second.put_parameters(model(4).state_dict(), force=True) == 1
    assert first.update_parameters(deltas()) == 2
    assert float(first.get_parameters()["1.bias"]) == 5


def test_a_synchronous_update_is_made_of_all(serve):
    server = serve(model(), workers=3)
    clients = [serve.connect(server, worker=name) for name in "abc"]
    versions = []

    def work(number, client):
        for _ in range(3):
            version = client.update_parameters(deltas(-float(number)), kind="delta", samples=number + 1)
            versions.append(version)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    value = float(clients[0].get_parameters()["1.bias"])
    assert value == pytest.approx(3 * (0 * 1 + 1 * 2 + 2 * 3) / 6)


def test_nobody_gets_too_far_ahead(serve):
    server = serve(model(), staleness=2)
    fast, slow = serve.connect(server, worker="fast"), serve.connect(server, worker="slow")
    for _ in range(2):
        fast.update_parameters(deltas(), kind="delta")
    with pytest.raises(UnreachableError, match="'fast' gave up waiting for slower workers"):
        fast.update_parameters(deltas(), kind="delta", timeout_s=0.05)
    thread = threading.Thread(target=lambda: fast.update_parameters(deltas(), kind="delta"))
    thread.start()
    slow.update_parameters(deltas(), kind="delta")
    thread.join()
    assert serve.version(server) == 4


@pytest.mark.parametrize(
    ("update", "kind", "words", "status"),
    [
        ({"x": torch.zeros(2)}, "delta", "there is no parameter 'x'", 404),
        ({"0.bias": torch.zeros(3)}, "delta", r"'0.bias' came as float32\[3\], expected float32\[2\]", 400),
        ({"0.bias": torch.zeros(2).double()}, "delta", r"'0.bias' came as float64\[2\], expected float32\[2\]", 400),
        ({"0.bias": torch.full((2,), torch.inf)}, "delta", "a number that is not finite", 422),
        ({"0.bias": torch.zeros(2)}, "gradient", "this server has no optimizer; send deltas", 409),
        ({"0.bias": torch.zeros(2)}, "wish", "kind='wish', expected one of gradient, delta", 400),
        ({"0.bias#values": torch.zeros(2)}, "delta", "came without its indices", 400),
        ({"0.bias#indices": torch.tensor([1, 0]), "0.bias#values": torch.zeros(2)}, "delta", "do not grow", 400),
        ({"0.bias#indices": torch.tensor([0, 2]), "0.bias#values": torch.zeros(2)}, "delta", "do not grow", 400),
    ],
)
def test_a_wrong_update_is_one_sentence_and_changes_nothing(serve, update, kind, words, status):
    server = serve(model(), staleness=None, reject_nonfinite=True)
    client = serve.connect(server)
    with pytest.raises(RefusedError, match=words) as refused:
        client.update_parameters(update, kind=kind)
    assert refused.value.status == status
    assert "\n" not in str(refused.value)
    assert serve.version(server) == 0
    assert client.update_parameters(deltas(), kind="delta") == 1, "the connection goes on"


def test_what_is_too_large_is_refused_before_it_is_read(serve):
    server = serve(None, limits=Limits(body_bytes=1000))
    client = serve.connect(server)
    with pytest.raises(RefusedError, match=r"expected (at most|a whole number from 0 to) 1000") as refused:
        client.put_parameters({"w": torch.zeros(1000)})
    assert refused.value.status in (400, 413)
    assert client.put_parameters({"w": torch.zeros(10)}) == 0


def test_a_token_keeps_others_out(serve):
    server = serve(model(), token="open-sesame", staleness=None)
    for wrong in (None, "", "open-sesam", "öpen-sesame"):
        with pytest.raises(
            (RefusedError, ConfigError, UnicodeEncodeError), match=r"the token is missing or wrong|codec"
        ):
            serve.connect(server, token=wrong, timeout_s=2)
    assert serve.connect(server, token="open-sesame").update_parameters(deltas(), kind="delta") == 1
    assert serve.version(server) == 1


def test_concurrent_updates_move_the_model_by_their_number_with_readers_and_a_restart(serve):
    server = serve(model(), staleness=None)
    num_workers, num_updates = 4, 25
    over = threading.Event()
    problems = []

    def read():
        client = serve.connect(server)
        while not over.is_set():
            values = {float(x) for tensor in client.get_parameters().values() for x in tensor.flatten()}
            if len(values) != 1:
                problems.append(f"a mixture: {values}")

    def work(n):
        client = serve.connect(server, worker=f"w{n}")
        for _ in range(num_updates):
            client.update_parameters(deltas(), kind="delta")

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=work, args=(n,)) for n in range(num_workers)]
    for thread in readers + writers:
        thread.start()
    with connect(server.url, register=False) as client:
        client.wait(30, timeout_s=60)
    server.stop()
    server.start()
    for thread in writers:
        thread.join()
    over.set()
    for thread in readers:
        thread.join()
    assert not problems
    assert serve.version(server) == num_workers * num_updates
    assert float(serve.connect(server).get_parameters()["1.bias"]) == num_workers * num_updates


def lose_the_next_answer(channel):
    push = channel.push

    def push_and_lose(*args):
        push(*args)
        channel.push = push
        raise ConnectionResetError("the cable")

    channel.push = push_and_lose


def test_an_update_whose_answer_is_lost_is_applied_once(serve):
    server = serve(model(), staleness=None)
    client = serve.connect(server)
    client.update_parameters(deltas(), kind="delta")
    for each in serve.each(client):
        lose_the_next_answer(each._channel)
    assert client.update_parameters(deltas(), kind="delta") == 2
    assert float(client.get_parameters()["1.bias"]) == 2


def test_a_client_says_that_the_server_is_gone_and_gives_up(serve, caplog):
    server = serve(model(), staleness=None)
    client = serve.connect(server)
    server.stop()
    with pytest.raises(UnreachableError, match="cannot be reached"):
        client.update_parameters(deltas(), kind="delta", timeout_s=0.3)
    assert "lost the server" in caplog.text
    with pytest.raises(UnreachableError, match="cannot be reached"):
        connect(client.url, timeout_s=0.1)
    server.start()
    assert client.update_parameters(deltas(), kind="delta") >= 1
    assert "is back" in caplog.text


def test_a_worker_that_vanishes_is_dropped_and_one_that_lives_is_not(serve):
    server = serve(model(), lease_s=0.4)
    here, gone = serve.connect(server, worker="here"), serve.connect(server, worker="gone")
    for each in serve.each(gone):  # no sign of life any more
        each._over.set()
        each._beat.join()
    assert here.update_parameters(deltas(), kind="delta") == 1
    events = [text for _, text in here.status()["events"]]
    assert "worker 'gone' was dropped: no sign of life for 0.4 s" in events
    time.sleep(0.6)
    names = lambda: [worker["name"] for worker in here.status()["workers"]]  # noqa: E731  # short
    assert processes.until(lambda: names() == ["here"]), "a machine that stood still may have dropped it for a moment"


def test_bfloat16_on_the_wire_is_rounded_once(serve):
    torch.manual_seed(0)
    net = model()
    server = serve(net, torch.optim.SGD(net.parameters(), 1.0), staleness=None)
    exact, short = serve.connect(server), serve.connect(server, bfloat16=True)
    gradients = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    short.update_parameters(gradients)
    for name, value in exact.get_parameters().items():
        assert torch.equal(value, -gradients[name].bfloat16().float())
    got = short.get_parameters(out={name: torch.empty_like(p) for name, p in net.named_parameters()})
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, -gradients[name].bfloat16().float())


@pytest.mark.parametrize("bfloat16", [False, True])
def test_what_top_k_sent_and_what_it_holds_back_is_what_there_was(serve, bfloat16):
    torch.manual_seed(0)
    server = serve(nn.Linear(40, 5), staleness=None)
    client = serve.connect(server, top_k=0.1, bfloat16=bfloat16)
    start = serve.connect(server).get_parameters()
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    for _ in range(5):
        update = {name: torch.randint(-8, 9, value.shape).float() for name, value in start.items()}
        client.update_parameters(update, kind="delta")
        for name in total:
            total[name] += update[name]
    end = serve.connect(server).get_parameters()
    for name in total:
        held = client._compressor.residual[name].view(total[name].shape)
        assert torch.allclose(start[name] - end[name] + held, total[name], atol=1e-5)
        assert int((held == 0).sum()) >= held.numel() // 10


def test_a_name_that_comes_back_goes_on_with_its_numbers(serve):
    server = serve(model(), staleness=None)
    with connect(server.url, worker="w") as client:
        assert client.update_parameters(deltas(), kind="delta") == 1
    with connect(server.url, worker="w") as client:
        assert client.update_parameters(deltas(), kind="delta") == 2
    assert serve.version(server) == 2


def test_status_shows_versions_and_workers(serve):
    server = serve(model(), staleness=None)
    client = serve.connect(server, worker="me")
    client.get_parameters()
    client.update_parameters(deltas(), kind="delta")
    status = client.status()
    assert (status["version"], status["num_bytes"]) == (1, 44)
    assert min(status["sent_bytes"] - 44, status["received_bytes"] - 44) >= 0, (
        "also what nobody sends, in shared memory"
    )
    assert status["parameters"]["0.bias"] == {"dtype": "float32", "shape": [2], "version": 1, "buffer": False}
    assert [worker["name"] for worker in status["workers"]] == ["me"]
    assert [version for _, version in status["history"]] == [0, 1]


def test_stopping_waits_for_nobody_who_waits(serve, monkeypatch):
    monkeypatch.setattr(connection, "_ASK_AGAIN_S", 60.0)
    server = serve(model(), staleness=None, limits=Limits(wait_s=60.0))
    client = serve.connect(server)
    thread = threading.Thread(target=lambda: client.get_parameters(min_version=1))
    thread.start()
    time.sleep(0.1)
    begin = time.monotonic()
    server.stop()
    assert time.monotonic() - begin < 15
    server.start()
    serve.connect(server).update_parameters(deltas(), kind="delta")
    thread.join()
    if serve.count == 1:
        with server.store.readers.get() as view:
            assert processes.until(lambda: view.image.readers == 1), "what the lost request held was let go"
