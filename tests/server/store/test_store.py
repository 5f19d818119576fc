"""The store alone: versions, rounds, turns, retries and leases, without any transport."""

import random
import threading
import time

import pytest
import torch
from torch import nn

import processes
from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.plan import tree
from evenstep.plan.placement import cut
from evenstep.server.store import readers
from evenstep.server.store.commits import First
from evenstep.server.store.deciding import Pending
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.store import Store
from evenstep.server.store.workers import Acknowledged


def ones(value=1.0, *, names=("w", "b")):
    shapes = {"w": (2, 3), "b": (3,)}
    return {name: torch.full(shapes[name], float(value)) for name in names}


def make(*workers, optimizer=None, clock=time.monotonic, **options) -> Store:
    store = Store(StoreOptions(**options), optimizer, clock=clock)
    store.put(First(ones(0), "owner"))
    for worker in workers:
        store.register(worker)
    return store


def value(store: Store, name="b") -> float:
    with store.readers.get() as view:
        assert len({float(x) for x in view.tensors[name].flatten()}) == 1, "a torn tensor"
        return float(view.tensors[name][0])


def push(store: Store, worker: str, sequence: int, amount=-1.0, wait_s=0.0, **options):
    part = Contribution(ones(amount, names=options.pop("names", ("w", "b"))), **options)
    return store.decider.update(worker, sequence, "delta", part, wait_s=wait_s)


def test_get_waits_until_the_parameters_were_put():
    store = Store(StoreOptions())
    assert store.readers.get() is None
    found = []
    thread = threading.Thread(target=lambda: found.append(store.readers.get(wait_s=20)))
    thread.start()
    store.put(First(ones(3), "me"))
    thread.join()
    assert float(found[0].tensors["b"][0]) == 3
    assert found[0].version == 0
    store.close()


def test_a_second_put_names_the_owner_and_a_forced_one_replaces():
    store = make()
    with pytest.raises(RefusedError, match="put by 'owner' already; force=True") as refused:
        store.put(First(ones(5), "thief"))
    assert (refused.value.status, value(store), store.version) == (409, 0, 0)
    assert store.put(First(ones(5), "thief"), force=True) == 1
    assert value(store) == 5
    with pytest.raises(RefusedError, match=r"'b' came as float32\[4\], expected float32\[3\]"):
        store.put(First({"w": torch.zeros(2, 3), "b": torch.zeros(4)}, "thief"), force=True)
    assert value(store) == 5
    store.close()


def test_a_parameter_has_the_version_at_which_it_changed_last():
    store = make("a", staleness=None)
    push(store, "a", 1)
    push(store, "a", 2, names=("b",))
    with store.readers.get() as view:
        assert (view.version, view.versions) == (2, {"w": 1, "b": 2})
    with store.readers.get(since=1) as view:
        assert list(view.tensors) == ["b"]
    with store.readers.get(["w"]) as view:
        assert list(view.tensors) == ["w"]
    with pytest.raises(RefusedError, match="there is no parameter 'x'"):
        store.readers.get(["x"])
    assert store.readers.get(min_version=3) is None
    store.close()


def test_a_view_stays_as_it_is_while_updates_go_on(monkeypatch):
    store = make("a", staleness=None)
    monkeypatch.setattr("evenstep.server.store.readers._READERS_S", 0.01)
    views = [store.readers.get()]
    for sequence in range(1, 5):
        push(store, "a", sequence)
        views.append(store.readers.get())
    assert [float(view.tensors["w"][1, 2]) for view in views] == [0, 1, 2, 3, 4]
    assert store.status()["copies"] == 5
    for view in views:
        view.close()
    assert store.status()["copies"] <= 2
    store.close()


def test_a_synchronous_update_waits_for_all_and_weights_by_samples():
    store = make("a", "b", staleness=0)
    assert push(store, "a", 1, amount=4, samples=1) == Pending(0)
    assert value(store) == 0
    assert push(store, "b", 1, amount=8, samples=3) == Acknowledged(1, 1, [None, None])
    assert value(store) == -(4 * 0.25 + 8 * 0.75)
    assert store.decider.wait("a", 1) == Acknowledged(1, 1, [None, None])
    store.close()


def test_a_synchronous_update_has_enough_workers_and_one_version():
    store = make("a", staleness=0, workers=2)
    assert push(store, "a", 1) == Pending(0)
    with pytest.raises(RefusedError, match="is in this update already"):
        push(store, "a", 2)
    store.register("b")
    with pytest.raises(RefusedError, match="of version 7 but the parameters are at 0"):
        store.decider.update("b", 1, "delta", Contribution(ones()), base=7)
    with pytest.raises(RefusedError, match="this server has no optimizer; send deltas"):
        store.decider.update("b", 1, "gradient", Contribution(ones()))
    push(store, "b", 1)
    assert value(store) == 1
    store.close()


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_tree_nodes_are_added_in_the_tree_over_shards(num_workers):
    torch.manual_seed(4)
    leaves = [torch.randn(50) * 10 ** random.Random(k).uniform(-3, 3) for k in range(8)]
    expected = tree.reduce(leaves, torch.add)
    store = Store(StoreOptions())
    store.put(First({"w": torch.zeros(50)}, "owner"))
    spans = cut(8, num_workers)
    order = list(range(num_workers))
    random.Random(num_workers).shuffle(order)
    for worker in order:
        store.register(str(worker))
        nodes = [
            (node, {"w": _node(leaves, node)} if node != (2, 3) or num_workers < 5 else {"w": leaves[2].clone()})
            for node in tree.cover(spans[worker], 8)
        ]
        store.decider.update(str(worker), 1, "delta", Contribution(nodes=nodes, num_shards=8, note=worker))
    with store.readers.get(min_version=1) as view:
        assert torch.equal(view.tensors["w"], -expected)
    assert store.decider.wait("0", 1).notes == list(range(num_workers)), "in the order of the shards"
    store.close()


def _node(leaves, span):
    if span[1] - span[0] == 1:
        return leaves[span[0]].clone()
    inside = [n for n in tree.tree_nodes(len(leaves)) if span[0] <= n[0] and n[1] <= span[1] and n != span]
    left = max((n for n in inside if n[0] == span[0]), key=lambda n: n[1])
    return _node(leaves, left) + _node(leaves, (left[1], span[1]))


def test_shards_belong_to_one_worker_and_one_tree():
    store = make("a", "b")

    def send(worker, nodes, shards=4):
        return store.decider.update(
            worker, 1, "delta", Contribution(nodes=[(n, ones()) for n in nodes], num_shards=shards)
        )

    assert send("a", [(0, 2)]) == Pending(0)
    with pytest.raises(RefusedError, match="sends shards 1 to 1, of which some are here already"):
        send("b", [(1, 2), (2, 4)])
    with pytest.raises(RefusedError, match="nodes of a tree over 8 shards but this update is made of"):
        send("b", [(4, 8)], 8)
    with pytest.raises(RefusedError, match="sends means but"):
        push(store, "b", 1)
    assert isinstance(send("b", [(2, 4)]), Acknowledged)
    store.close()


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_any_optimizer_steps_as_it_does_alone(name):
    torch.manual_seed(1)
    model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    make_optimizer = lambda p: getattr(torch.optim, name)(p, lr=0.1)  # noqa: E731
    store = Store(StoreOptions(staleness=None), make_optimizer)
    store.put(First(dict(model.named_parameters()), "owner"))
    store.register("a")
    plain = make_optimizer(alone.parameters())
    for sequence in range(1, 4):
        gradients = {n: torch.randn_like(p) for n, p in alone.named_parameters()}
        for n, p in alone.named_parameters():
            p.grad = gradients[n].clone()
        plain.step()
        store.decider.update("a", sequence, "gradient", Contribution(gradients))
    with store.readers.get() as view:
        for n, p in alone.named_parameters():
            assert torch.equal(view.tensors[n], p)
    store.close()


def test_a_retry_is_applied_once_and_answered_as_the_first_time():
    store = make("a", "b", staleness=None)
    assert push(store, "a", 1) == Acknowledged(1, 1, [None])
    push(store, "b", 1)
    assert push(store, "a", 1) == Acknowledged(1, 1, [None])
    assert value(store) == 2
    push(store, "a", 5)
    with pytest.raises(RefusedError, match="sends update 4 after 5"):
        push(store, "a", 4)
    store.leave("a")
    assert push(store, "a", 5).version == 3, "a retry is known even when the worker is not any more"
    assert value(store) == 3
    store.close()


def test_concurrent_updates_move_the_model_by_their_number():
    store = make(staleness=None)
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            with store.readers.get() as view:
                values = {float(x) for tensor in view.tensors.values() for x in tensor.flatten()}
                assert len(values) == 1, "a mixture of versions"
                seen.append(values.pop() == view.version)

    def write(worker):
        store.register(worker)
        for sequence in range(1, 51):
            push(store, worker, sequence)
            push(store, worker, sequence)  # a retry

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(str(n),)) for n in range(4)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert (value(store), store.version) == (200, 200)
    assert all(seen)
    store.close()


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_nobody_runs_further_ahead_than_allowed_under_random_delays(staleness):
    store = make(*"abc", staleness=staleness)
    widest = []
    commit = store.commits.after_update

    def watch():
        commit()
        counts = [worker.updates for worker in store.attendance.workers.registered.values()]
        widest.append(max(counts) - min(counts))

    store.commits.after_update = watch

    def work(worker):
        delays = random.Random(worker)
        for sequence in range(1 + (worker == "b") * staleness, 31):
            time.sleep(delays.random() * (0.004 if worker == "c" else 0.0005))
            assert store.decider.wait_turn(worker, wait_s=30)
            push(store, worker, sequence)
        store.leave(worker)

    for sequence in range(1, staleness + 1):
        push(store, "b", sequence)
    assert widest[-1] == staleness, "the bound is made use of"
    threads = [threading.Thread(target=work, args=(worker,)) for worker in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.version == 90
    assert max(widest) == staleness
    store.close()


def test_an_update_too_far_ahead_is_refused():
    store = make("a", "b", staleness=1)
    push(store, "a", 1)
    assert not store.decider.wait_turn("a")
    with pytest.raises(RefusedError, match="more than 1 ahead of the slowest"):
        push(store, "a", 2)
    push(store, "b", 1)
    assert store.decider.wait_turn("a")
    push(store, "a", 2)
    store.register("new")
    push(store, "new", 1)
    assert not store.decider.wait_turn("a"), "whoever comes later starts level with the slowest"
    store.close()


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_that_vanishes_no_longer_holds_back_the_others(staleness):
    clock = Clock()
    store = Store(StoreOptions(staleness=staleness, lease_s=10), clock=clock)
    store.put(First(ones(0), "owner"))
    store.register("gone")
    clock.now_s = 8
    store.register("here")
    if staleness == 0:
        assert isinstance(push(store, "here", 1), Pending)
    else:
        push(store, "here", 1)
        assert not store.decider.wait_turn("here")
    clock.now_s = 10.5
    if staleness == 0:
        assert isinstance(store.decider.wait("here", 1), Acknowledged)
    assert store.decider.wait_turn("here")
    with pytest.raises(RefusedError, match="'gone' is not registered, or was dropped after 10 s"):
        push(store, "gone", 1)
    store.register("gone")
    assert [event for _, event in store.status()["events"]][-2:] == [
        "worker 'gone' was dropped: no sign of life for 10 s", "worker 'gone' registered"
    ]  # fmt: skip
    store.close()


def test_whoever_waits_lives():
    clock = Clock()
    store = make("a", "b", staleness=0, lease_s=10, clock=clock)
    done = []
    thread = threading.Thread(target=lambda: done.append(push(store, "a", 1, wait_s=60)))
    thread.start()
    assert processes.until(lambda: store.attendance.workers.registered["a"].waiting)
    for clock.now_s in range(0, 100, 9):
        store.register("b")
        assert {worker["name"] for worker in store.status()["workers"]} == {"a", "b"}
    push(store, "b", 1)
    thread.join()
    assert done == [Acknowledged(1, 1, [None, None])]
    store.close()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"x": torch.zeros(3)}, "there is no parameter 'x'"),
        ({"b": torch.zeros(4)}, r"'b' came as float32\[4\], expected float32\[3\]"),
        ({"b": torch.zeros(3, dtype=torch.float64)}, r"'b' came as float64\[3\]"),
        ({"b": torch.tensor([1.0, float("nan"), 0])}, "the update of 'b' holds a number that is not finite"),
    ],
)
def test_a_wrong_update_changes_nothing(tensors, words):
    store = make("a", staleness=None, reject_nonfinite=True)
    with pytest.raises(RefusedError, match=words):
        store.decider.update("a", 1, "delta", Contribution(tensors))
    assert (value(store), store.version) == (0, 0)
    assert push(store, "a", 1).version == 1
    store.close()


def test_buffers_take_new_values_and_no_gradients():
    store = Store(StoreOptions(), lambda p: torch.optim.SGD(p, 0.5))
    store.put(First({"w": torch.zeros(2), "mean": torch.zeros(2)}, "owner", ["mean"]))
    store.register("a")
    with pytest.raises(RefusedError, match="'mean' is a buffer"):
        store.decider.update("a", 1, "gradient", Contribution({"mean": torch.ones(2)}))
    store.decider.update(
        "a", 1, "gradient", Contribution({"w": torch.ones(2)}, buffers={"mean": torch.full((2,), 7.0)})
    )
    with store.readers.get() as view:
        assert view.tensors["w"].tolist() == [-0.5, -0.5]
        assert view.tensors["mean"].tolist() == [7.0, 7.0]
    store.close()


class Moody(torch.optim.SGD):
    """Changes a parameter, and fails in some of its steps."""

    def __init__(self, parameters, fails_at):
        super().__init__(parameters, 0.1, momentum=0.9)
        self.fails_at, self.steps = fails_at, 0

    def step(self, closure=None):
        self.steps += 1
        super().step(closure)
        if self.steps in self.fails_at:
            raise ValueError("no luck")


@pytest.mark.parametrize("staleness", [None, 0])
def test_a_first_step_that_fails_is_taken_back_and_refused(staleness):
    store = make("a", optimizer=lambda p: Moody(p, [1]), staleness=staleness)
    before = {name: tensor.clone() for name, tensor in store.tensors().items()}
    with pytest.raises(RefusedError, match="the optimizer cannot make this update: no luck") as refused:
        store.decider.update("a", 1, "gradient", Contribution(ones()))
    assert refused.value.status == 422
    assert all(torch.equal(tensor, before[name]) for name, tensor in store.tensors().items())
    assert (store.version, set(store.state.versions.values()), len(store.state.optimizer.state)) == (0, {0}, 0)
    expected = make("a", optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), staleness=staleness)
    for each in (store, expected):
        for sequence in (1, 2):
            assert each.decider.update("a", sequence, "gradient", Contribution(ones())).version == sequence
    assert all(torch.equal(tensor, expected.tensors()[name]) for name, tensor in store.tensors().items())
    store.close()
    expected.close()


def test_all_who_took_part_in_an_update_that_fails_hear_of_it():
    store = make("a", "b", optimizer=lambda p: Moody(p, [1]), staleness=0, workers=2)
    assert isinstance(store.decider.update("a", 1, "gradient", Contribution(ones())), Pending)
    for ask in (
        lambda: store.decider.update("b", 1, "gradient", Contribution(ones())),
        lambda: store.decider.wait("a", 1),
    ):
        with pytest.raises(RefusedError, match="cannot make this update: no luck"):
            ask()
    assert isinstance(store.decider.update("a", 2, "gradient", Contribution(ones())), Pending)
    assert store.decider.update("b", 2, "gradient", Contribution(ones())).version == 1
    store.close()


def test_a_later_step_that_fails_stops_the_server_with_its_reason():
    store = make("a", optimizer=lambda p: Moody(p, [2]), staleness=None)
    store.decider.update("a", 1, "gradient", Contribution(ones()))
    with pytest.raises(ServerError, match="the optimizer failed at version 1: no luck"):
        store.decider.update("a", 2, "gradient", Contribution(ones()))
    with pytest.raises(ServerError, match="cannot continue"):
        store.decider.update("a", 3, "gradient", Contribution(ones()))
    store.close()


@pytest.mark.parametrize(
    "options", [{"staleness": -1}, {"staleness": 1.5}, {"workers": 0}, {"lease_s": 0}, {"lock": 0}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        StoreOptions(**options)


def test_an_update_waits_for_a_reader_rather_than_making_a_third_copy(monkeypatch):
    monkeypatch.setattr(readers, "_READERS_S", 60.0)
    store = make("a", staleness=None)
    first = store.readers.get()
    push(store, "a", 1)
    second = store.readers.get()
    closing = threading.Timer(0.1, first.close)
    closing.start()
    push(store, "a", 2)
    closing.join()
    assert store.status()["copies"] == 2
    assert float(second.tensors["b"][0]) == 1
    second.close()
    store.close()
