"""Evaluation and prediction: every sample once, whoever has it, with nothing changed afterwards."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from workshop import Worker, network, samples

from evenstep.core.errors import ConfigError
from evenstep.data.batch import Batch
from evenstep.run.evaluation import call_parts, collect_outputs, evaluating, fill, mean_metrics

X, Y = samples(11)


def batches(sizes_of=((2, 2, 1, 1), (2, 1, 1, 1))):
    rows = 0
    for number, sizes in enumerate(sizes_of):
        ends = [rows + sum(sizes[: k + 1]) for k in range(len(sizes))]
        spans = list(zip([rows, *ends], ends, strict=False))
        yield Batch(
            f"batch {number}", list(sizes), lambda k, spans=spans: (X[slice(*spans[k])], Y[slice(*spans[k])]), {}
        )
        rows = ends[-1]


@pytest.fixture
def worker_of(holdings_of):
    """Makes a worker with a model that it has prepared."""
    with ExitStack() as stack:

        def make(model=None):
            model = network() if model is None else model
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            return stack.enter_context(Worker(holdings_of()[0], model, optimizer))

        yield make


def right(model):
    return lambda part: {"right": (model(part[0]).argmax(1) == part[1]).double()}


def test_means_are_over_all_samples(worker_of):
    expected = float((network()(X).argmax(1) == Y).double().mean())
    worker = worker_of()
    found = mean_metrics(worker.engine, batches(), right(worker.model))
    assert found == {"right": pytest.approx(expected, rel=1e-12)}


def test_outputs_come_in_the_order_of_the_data(worker_of):
    worker = worker_of()

    def function(part):
        return {"scores": worker.model(part[0]).detach(), "pair": (part[1], [part[0]])}

    found = fill(*collect_outputs(worker.engine, batches(), function))
    assert torch.allclose(found["scores"], network()(X), rtol=1e-12)
    assert torch.equal(found["pair"][0], Y)
    assert torch.equal(found["pair"][1][0], X)


def test_metrics_must_be_the_same_for_every_part(worker_of):
    worker = worker_of()
    with pytest.raises(ConfigError, match="metrics returned a float; expected a dict"):
        mean_metrics(worker.engine, batches(), lambda part: 0.5)
    names = iter("aaaaabaa")
    with pytest.raises(ConfigError, match=r"gave \['b'\] in batch 1, shard 1, but \['a'\] at first"):
        mean_metrics(worker.engine, batches(), lambda part: {next(names): torch.zeros(len(part[0]))})


def test_every_part_begins_with_the_committed_buffers_and_random_numbers_of_its_own(worker_of):
    worker, drawn = worker_of(network(norm=True)), []

    def function(part):
        worker.model[1].running_mean += 1
        drawn.append((float(worker.model[1].running_mean[0]), float(torch.rand(()))))

    before = torch.get_rng_state()
    call_parts(worker.engine, next(batches()), function)
    call_parts(worker.engine, next(batches()), function)
    assert torch.equal(torch.get_rng_state(), before)
    assert (worker.model[1].running_mean == 0).all()
    assert [mean for mean, _ in drawn] == [1.0] * 8
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) == 4


def test_modules_are_afterwards_in_the_mode_that_they_were_in():
    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1).eval())
    with evaluating(list(model.modules())):
        assert not any(module.training for module in model.modules())
        assert not model[1](torch.zeros(1)).requires_grad
    assert [module.training for module in model.modules()] == [True, True, False]
