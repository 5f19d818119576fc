"""The batches of a run: how many there are, and which come when one goes through them again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, WeightedRandomSampler
from tqdm import tqdm

import evenstep
from evenstep.data.order import Order
from evenstep.run.feed import _compared
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_outcomes, run_workers


def data(count=22):
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.arange(count))


def samples_of(batches):
    return [sorted(i for k in range(4) if b.sizes[k] for i in b.part(k)[1].tolist()) for b in batches]


def test_a_run_says_how_many_batches_there_are_and_a_bar_knows_it(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # else it starts a thread
    with evenstep.Run(shards=4, quiet=True) as run:
        batches = run.batches(data(), batch_size=5, epochs=3)
        assert len(batches) == 15
        assert len(list(batches)) == 15
        assert len(run.batches(data(), batch_size=5, drop_last=True)) == 4
        assert len(run.batches(data(), sampler=[[1, 2], [3]])) == 2
        with tqdm(run.batches(data(), batch_size=5), disable=True) as bar:
            assert bar.total == 5
        with pytest.raises(TypeError):
            len(run.batches(data(), 5, sampler=lambda epoch: [epoch]))


def test_going_through_batches_again_goes_on_with_the_next_epoch():
    def orders(again):
        with evenstep.Run(shards=4, quiet=True) as run:
            batches = run.batches(data(), batch_size=5)
            return [samples_of(batches if again else run.batches(data(), batch_size=5)) for _ in range(3)]

    found = orders(again=True)
    assert found == orders(again=False)
    assert all(sorted(i for batch in epoch for i in batch) == list(range(22)) for epoch in found)
    assert found[0] != found[1] != found[2]


def test_what_a_checkpoint_had_seen_is_left_out_of_the_count(tmp_path):
    def train(stop=None, load=False):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = nn.Linear(3, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            if load:
                run.load(tmp_path)
            batches = run.batches(data(), batch_size=5, epochs=2)
            expected, seen = len(batches), 0
            for seen, batch in enumerate(batches, start=1):
                run.step(batch, lambda part: model(part[0]).square().mean())
                if seen == stop:
                    run.save(tmp_path)
            return expected, seen

    assert train(stop=7) == (10, 10)
    assert train(load=True) == (3, 3)


def by_length(epoch):
    """Buckets: neighbours of one length, and batches of many short or few long ones."""
    order = torch.randperm(22).tolist()
    buckets = [[i for i in order if i % 3 == length] for length in range(3)]
    return [
        bucket[n : n + 3 + length] for length, bucket in enumerate(buckets) for n in range(0, len(bucket), 3 + length)
    ]


SAMPLERS = {
    "weighted": ({"batch_size": 6}, lambda: WeightedRandomSampler([1.0 + i for i in range(22)], 20)),
    "list": ({"batch_size": 6}, lambda: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]),
    "buckets": ({}, lambda: by_length),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_the_same_weights_on_every_number_of_workers(name):
    options, make = SAMPLERS[name]

    def train(_):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            torch.manual_seed(run.worker)  # a script's own random numbers are none of the sampler's
            for batch in run.batches(data(), epochs=2, sampler=make(), **options):
                run.step(batch, lambda part: F.mse_loss(model(part[0])[:, 0], part[1].float()))
            return run.fingerprint(), run.version

    alone = train(0)
    assert alone[1] > 3
    assert run_workers(3, train) == [alone] * 3


def test_workers_whose_samplers_differ_are_told_so():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = nn.Linear(3, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for batch in run.batches(data(), 4, sampler=[0, 1, 2, 3 + worker]):
                run.step(batch, lambda part: model(part[0]).square().mean())

    outcomes = run_outcomes(2, body)
    assert {o.kind for o in outcomes} == {"MismatchError"}
    assert all("has samples epoch 0 batch 0 (order " in o.text for o in outcomes)


SAMPLED = """
    import torch
    from torch.utils.data import TensorDataset, WeightedRandomSampler
    import evenstep

    data = TensorDataset(torch.arange(40.0).reshape(40, 1))
    with evenstep.Run(shards=4) as run:
        model = torch.nn.Linear(1, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-4))
        batches = run.batches(data, 8, sampler=WeightedRandomSampler(torch.ones(40), 32, generator=torch.Generator()))
        for epoch in range(3):
            for batch in batches:
                run.step(batch, lambda part: model(part[0]).square().mean())
"""


def test_a_sampler_draws_the_same_for_a_worker_that_replaces_another(script, tmp_path):
    path = script(SAMPLED)
    undisturbed = cli_run("run", "-n", "1", path)
    killed = cli_run("run", "-n", "2", path, variables=plant([Fault("kill", "forward", 7)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert killed.stdout == undisturbed.stdout
    assert "fingerprint" in killed.stdout


STREAMED = """
    import random
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    import evenstep

    LENGTHS = [5, 9, 12, 3]  # the first shard ends before the others

    def read(epoch, shard):
        for number in range(LENGTHS[shard]):
            yield torch.randn(3) + random.random(), torch.tensor([float(shard + number)])

    with evenstep.Run(shards=4) as run:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
        run.checkpoint(CHECKPOINTS, every=3)
        for epoch in range(2):
            for batch in run.batches(evenstep.data.stream(read), batch_size=8):
                loss = run.step(batch, lambda part: F.mse_loss(model(part[0]), part[1]))
                if run.version == STOP:
                    sys.exit(5)
            run.print(f"loss {float(loss):.17g} in step {run.version}", run.metrics())
"""


def streamed(tmp_path, stop=-1):
    return STREAMED.replace("STOP", str(stop)).replace("CHECKPOINTS", repr(str(tmp_path / "checkpoints")))


def test_a_stream_ends_on_the_same_weights_whoever_reads_it(script, tmp_path):
    path = script(streamed(tmp_path))
    undisturbed = cli_run("run", "-n", "1", path)
    assert undisturbed.code == 0, undisturbed.stderr
    assert "in step 12" in undisturbed.stdout
    assert "epoch 1/1  6 steps" in undisturbed.stderr
    for count, kill in (("3", ("forward", 4)), ("2", ("inside update", 9))):
        faults = tmp_path / f"faults {count}"
        done = cli_run("run", "-n", count, path, variables=plant([Fault("kill", *kill)], faults))
        assert struck(faults) == [0]
        assert done.stdout == undisturbed.stdout, done.stderr


def test_a_stream_goes_on_from_a_checkpoint(script, tmp_path):
    undisturbed = cli_run("run", "-n", "1", script(streamed(tmp_path / "other")))
    assert cli_run("run", "-n", "2", "--max-restarts", "0", script(streamed(tmp_path, stop=8))).code == 5
    resumed = cli_run("run", "-n", "3", "--resume", script(streamed(tmp_path)))
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == undisturbed.stdout.splitlines()[-1]


def test_a_stream_goes_on_from_what_was_loaded(tmp_path):
    def read(epoch, shard):
        return (torch.full((3,), float(epoch + n)) for n in range(5 + shard))

    def train(stop=None, load=False):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = nn.Linear(3, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
            if load:
                run.load(tmp_path)
            for batch in run.batches(evenstep.data.stream(read), 8, epochs=2):
                run.step(batch, lambda part: model(part).square().mean())
                if run.version == stop:
                    run.save(tmp_path)
            return run.fingerprint(), run.version

    for stop in (2, 4, 5):  # 4 is the last one of an epoch
        whole = train(stop)
        assert whole[1] == 8
        assert train(load=True) == whole


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"drop_last": True}, {"sampler": [1]}, {"deal": "round-robin"}, {"loaders": 1}]
)
def test_what_needs_an_index_is_refused_for_a_stream(options):
    with evenstep.Run(shards=4, quiet=True) as run:
        stream = evenstep.data.stream(lambda epoch, shard: [])
        with pytest.raises(evenstep.ConfigError, match="a stream"):
            run.batches(stream, 8, **options)
        with pytest.raises(TypeError, match="known when it has ended"):
            len(run.batches(stream, 8))


def differing(worker):
    """A data set that is another one on worker 2."""
    return TensorDataset(torch.randn(22, 3, generator=torch.Generator().manual_seed(worker // 2)), torch.zeros(22, 1))


def train_on_differing(worker, on_nondeterminism="error", evaluate=False):
    with evenstep.Run(shards=4, quiet=True, on_nondeterminism=on_nondeterminism) as run:
        model = nn.Linear(3, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if evaluate:
            run.evaluate(differing(worker), 5, lambda part: {"mean": model(part[0]).flatten()})
        for batch in run.batches(differing(worker), batch_size=5):
            run.step(batch, lambda part: F.mse_loss(model(part[0]), part[1]))


@pytest.mark.parametrize("evaluate", [False, True])
def test_workers_that_have_different_data_are_told_so(evaluate):
    outcomes = run_outcomes(3, lambda worker: train_on_differing(worker, evaluate=evaluate))
    assert all("workers 0 and 2 have different data: samples[0] is float32" in outcome.text for outcome in outcomes)


def test_whoever_wants_different_data_is_warned_and_goes_on():
    def train(worker):
        with pytest.warns(UserWarning, match="workers 0 and 2 have different data"):
            train_on_differing(worker, on_nondeterminism="warn")

    run_workers(3, train)


def compared_in(epochs, first=0):
    order = Order(22, 5, 4, 0, shuffle=True, drop_last=False)
    requests = (r for epoch in range(epochs) for r in order.requests(epoch, first if epoch == 0 else 0))
    return [(r.position.epoch, r.position.number) for r in _compared(requests, is_first=first > 0) if r.is_compared]


def test_data_are_compared_when_a_run_begins_and_ever_more_seldom():
    assert compared_in(10) == [(0, 0), (1, 0), (2, 0), (4, 0), (8, 0)]
    assert compared_in(2, first=3) == [(0, 3), (1, 0)]


LATE = """
import os, pathlib, time, torch, evenstep
lives, told = pathlib.Path({lives!r}), pathlib.Path({told!r})
with lives.open("a") as file:
    file.write("x")
is_third_life = len(lives.read_text()) > 2

def third_has_ended():
    pid = told.read_text() if told.exists() else ""
    return pid.endswith(".") and not pathlib.Path("/proc", pid[:-1]).exists()

def loss(part):
    deadline = time.monotonic() + 60
    while run.version == 4 and not third_has_ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    return model(part[0]).square().mean()

with evenstep.Run(shards=4, seed=0) as run:
    model = torch.nn.Linear(3, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    try:
        data = torch.utils.data.TensorDataset(torch.full((22, 3), 1.0 + is_third_life))
        for batch in run.batches(data, batch_size=5):
            run.step(batch, loss)
    except evenstep.NondeterminismError:
        told.write_text(f"{{os.getpid()}}.")
        raise
"""


def test_a_worker_that_comes_later_with_other_data_is_left_out(script, tmp_path):
    path = script(LATE.format(lives=str(tmp_path / "lives"), told=str(tmp_path / "told")))
    done = cli_run("run", "-n", "2", path, variables=plant([Fault("kill", "forward", 3)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert done.code == 0, done.stderr
    assert "have different data: samples[0] is float32 (5, 3)" in done.stderr
    assert "the others go on without it" in done.stderr


def test_what_was_saved_between_loops_that_take_turns_does_not_say_where_each_goes_on(tmp_path):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))

    def prepared(run):
        run.prepare(nn.Linear(1, 1))
        return run.batches(data, 4, epochs=2), run.batches(data, 4, epochs=2)

    with evenstep.Run(shards=2, quiet=True) as run:
        one, other = map(iter, prepared(run))
        next(one), next(other)
        run.save(tmp_path / "apart")
        next(one)
        run.save(tmp_path / "turns")
    with evenstep.Run(shards=2, quiet=True) as run:
        one, other = prepared(run)
        run.load(tmp_path / "apart")
        assert [len(list(each)) for each in (one, other)] == [0, 3], "the first was begun, and is over"
    with evenstep.Run(shards=2, quiet=True) as run:
        one, other = prepared(run)
        run.load(tmp_path / "turns")
        with pytest.raises(evenstep.ConfigError, match=r"has the position of only one.*\.at\(epoch, batch\)"):
            next(iter(one))
        assert len(list(one.at(0, 1))) == 1
