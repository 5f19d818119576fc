"""Steps that are computed twice: which ones, what is found, and that nothing else changes. One worker, one process."""

from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from torch import nn
from workshop import Batch, Worker, network, samples

import evenstep
from evenstep.core import points
from evenstep.core.errors import NondeterminismError, WrongError
from evenstep.testing.faults import flip


@pytest.fixture
def spoil():
    """Alters what passes by: a function of what it is and how often it has come."""
    visits = {}

    def arm(rule):
        def spoiler(what, tensor):
            visits[what] = visits.get(what, 0) + 1
            if rule(what, visits[what]):
                flip(tensor, 9)

        points.arm(None, spoiler)

    yield arm
    points.arm(None)


@pytest.fixture
def worker_of(holdings_of):
    """Makes a worker with a model that it has prepared."""
    with ExitStack() as stack:

        def make(norm=False, **changes):
            model = network(norm=norm)
            (holdings,) = holdings_of(**changes)
            return stack.enter_context(Worker(holdings, model, torch.optim.Adam(model.parameters(), 0.1)))

        yield make


def loss_of(model):
    return lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])


def trained(worker, steps=3):
    for step in range(steps):
        worker.step(Batch(*samples(seed=step)), loss_of(worker.model))
    return worker.engine.state.fingerprint()


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_one_of_every_so_many_steps_is_due_and_only_the_seed_says_which(worker_of, every):
    chosen = {}
    for seed in (3, 4):
        recheck = worker_of(recheck=every, seed=seed).engine.recheck
        due = chosen[seed] = [version for version in range(20 * every) if recheck.is_due(version)]
        assert [version // every for version in due] == list(range(20))
        gaps = [b - a for a, b in pairwise(due)]
        assert max(gaps) < 2 * every
    assert (chosen[3] == chosen[4]) == (every == 1)
    assert not any(worker_of(recheck=0).engine.recheck.is_due(version) for version in range(100))


@pytest.mark.parametrize("norm", [False, True])
def test_a_healthy_run_ends_on_the_same_bits_and_calls_the_function_twice(worker_of, norm):
    calls = []
    worker = worker_of(norm, recheck=1)
    function = loss_of(worker.model)
    worker.step(Batch(*samples()), lambda part: calls.append(1) or function(part))
    assert len(calls) == 2 * 4
    assert trained(worker_of(norm, recheck=1)) == trained(worker_of(norm))


def test_samples_that_lie_across_the_words_of_the_processor_give_the_same_bits():
    """Kernels go other ways for other alignments, so what a step computes twice must lie as the samples do."""
    inputs, targets = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3

    def train(recheck):
        with evenstep.Run(shards=4, quiet=True, recheck=recheck) as run:
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
            for _ in range(3):
                run.step((inputs, targets), lambda part: nn.functional.cross_entropy(model(part[0]), part[1]))
            return run.fingerprint()

    assert train(recheck=1) == train(recheck=0)


@pytest.mark.parametrize(("what", "visit", "shard"), [("gradient", 2, 0), ("gradient", 20, 3), ("buffer", 3, 0)])
def test_a_worker_that_is_wrong_once_is_named_and_the_step_is_right_if_that_is_tolerated(
    worker_of, spoil, capfd, what, visit, shard
):
    expected = trained(worker_of(norm=True))
    spoil(lambda passing, count: (passing, count) == (what, visit))
    assert trained(worker_of(norm=True, recheck=1, tolerate_wrong=1)) == expected
    said = capfd.readouterr().err
    assert "worker 0 (machine " in said
    assert f"computed wrong in step 0, shard {shard}, {what}" in said
    assert "tolerated, 1 of 1: it is done again" in said


def test_else_nothing_of_the_step_is_committed(worker_of, spoil):
    worker = worker_of(recheck=1)
    before = trained(worker, 1)
    spoil(lambda passing, count: (passing, count) == ("gradient", 7))
    with pytest.raises(
        WrongError, match=r"computed wrong in step 1, shard 1, gradient of .*: element \[.*bits 0x.*not"
    ):
        worker.step(Batch(*samples(seed=1)), loss_of(worker.model))
    assert worker.engine.state.fingerprint() == before
    assert worker.engine.version == 1


def test_without_recheck_nobody_notices(worker_of, spoil):
    expected = trained(worker_of())
    spoil(lambda passing, count: (passing, count) == ("gradient", 2))
    assert trained(worker_of()) != expected


@pytest.mark.parametrize("what", ["a generator of its own", "a counter", "samples"])
def test_code_that_is_not_deterministic_is_named_as_such_on_a_single_worker(worker_of, what):
    worker, generator, calls = worker_of(recheck=1), torch.Generator().manual_seed(1), []
    inner = loss_of(worker.model)

    def function(part):
        calls.append(1)
        if what == "samples":
            return inner(part)
        noise = torch.rand((), generator=generator).double() if what == "a generator of its own" else len(calls)
        return inner(part) * noise

    batch = Batch(*samples())
    if what == "samples":
        batch.part = lambda shard: [torch.rand(2, 3, generator=generator).double(), torch.zeros(2, dtype=torch.int64)]
    item = r"samples\[0\]" if what == "samples" else "gradient of"
    with pytest.raises(NondeterminismError, match=f"not deterministic.* First seen in step 0, shard 0, {item}"):
        worker.step(batch, function)


def test_a_step_function_may_change_its_samples(worker_of):
    worker = worker_of(recheck=1)
    function = loss_of(worker.model)
    worker.step(Batch(*samples()), lambda part: function([part[0].mul_(2), part[1]]))
    assert worker.engine.version == 1
