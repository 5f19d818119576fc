"""Steps are those of plain torch; each asks its updates in order, and is committed as a whole or not at all."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from workshop import Batch, Worker, network, samples

from evenstep.core import points
from evenstep.core.errors import MismatchError
from evenstep.engine.loss import Loss
from evenstep.engine.reports import Report
from evenstep.engine.results import Results
from evenstep.engine.updates import OwnUpdates


class Noting(OwnUpdates):
    """Notes the order of things; a test may make a verb do something else."""

    def __init__(self, group):
        super().__init__(group)
        self.asked = []

    def refuse(self, what):
        self.asked.append(f"refuse {what}")

    def begin(self, samples, clipping):
        self.asked.append("begin")
        return super().begin(samples, clipping)

    def share(self, work, report):
        self.asked.append("share")
        return super().share(work, report)

    def update(self, work, sums):
        self.asked.append("update")
        return super().update(work, sums)

    def settle(self, prepared, samples):
        self.asked.append(f"settle {samples.is_last}")

    def abandon(self):
        self.asked.append("abandon")

    @contextmanager
    def recovery(self):
        self.asked.append("recovery begins")
        yield
        self.asked.append("recovery ends")

    def close(self):
        self.asked.append("close")


@pytest.fixture
def worker(holdings_of):
    """Makes a worker with a small model; `worker.engine.updates.asked` says what its updates were asked."""

    @contextmanager
    def make(optimizer=torch.optim.Adam, norm=False, **options):
        (holdings,) = holdings_of(**options)
        model = network(norm=norm)
        with Worker(holdings, model, optimizer(model.parameters(), 0.05), Noting(holdings.group)) as made:
            made.engine.updates.asked.clear()
            yield made

    return make


def loss_of(model):
    return lambda part: F.cross_entropy(model(part[0]), part[1])


def test_steps_are_those_of_plain_torch_to_the_bit_with_one_shard(worker):
    x, y = samples()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    with worker(shards=1) as here:
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model)((x, y))
            loss.backward()
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2, foreach=False)
            optimizer.step()
            outcome = here.step(Batch(x, y, shards=1), loss_of(here.model), clip_norm=0.2)
            assert (outcome.loss.item(), outcome.grad_norm) == (loss.item(), total.item())
        assert all(torch.equal(p, q) for p, q in zip(here.model.parameters(), model.parameters(), strict=True))
        assert here.engine.version == 5


def test_a_step_is_told_to_its_updates_in_this_order(worker):
    with worker() as here:
        here.step(Batch(*samples(), is_last=True), loss_of(here.model))
        assert here.engine.updates.asked == ["begin", "share", "update", "settle True"]
        here.engine.updates.asked.clear()
    assert here.engine.updates.asked == ["close"]


def test_points_are_reached_in_their_order(worker):
    seen = []
    with worker() as here:
        points.arm(seen.append)
        try:
            here.step(Batch(*samples(4), shards=4), loss_of(here.model))
        finally:
            points.arm(None)
    kept = [point for point in seen if point != "exchange"]
    assert kept == [
        "step begins", *["forward", "backward"] * 4, "before update", "inside update", "after update", "before commit",
        "inside commit", "after commit",
    ]  # fmt: skip


def test_metrics_are_means_over_all_samples(worker):
    x, y = samples()
    with worker() as here:

        def function(part):
            return loss_of(here.model)(part), {"first": part[0][:, 0]}

        outcome = here.step(Batch(x, y), function)
        assert outcome.metrics["first"] == pytest.approx(x[:, 0].mean().item(), rel=1e-12)


def test_what_is_known_already_is_not_computed(worker):
    with worker() as here:
        before = here.holdings.state.fingerprint()
        here.engine.updates.begin = lambda samples, clipping: Results(0.75, {"a": 1.0}, None)
        outcome = here.step(Batch(*samples()), lambda part: pytest.fail("it was computed"))
        assert (outcome.loss.item(), outcome.metrics, outcome.grad_norm) == (0.75, {"a": 1.0}, None)
        assert here.engine.updates.asked == ["settle False"]
        assert here.holdings.state.fingerprint() == before
        assert here.engine.version == 1


def test_random_numbers_are_those_of_the_number_that_updates_give_the_step(worker):
    drawn = []

    def function(part):
        drawn.append(torch.rand(1).item())
        return loss_of(here.model)(part)

    with worker() as here:
        here.engine.updates.number_of = lambda version: version * 3 + 2
        here.step(Batch(*samples()), function)
        seeds = [here.engine.context.seed_of(2, k) for k in range(4)]
    assert drawn == [torch.rand(1, generator=torch.Generator().manual_seed(seed)).item() for seed in seeds]


def test_a_weighted_loss_may_be_refused(worker):
    with worker() as here:
        here.step(Batch(*samples()), lambda part: Loss(loss_of(here.model)(part), weight=2.0))
        assert here.engine.updates.asked == ["begin", "share", "refuse weighted loss", "update", "settle False"]


def test_who_reports_another_step_ends_it_and_nothing_is_changed(worker):
    def share(work, report):
        other = Report(1, {**report.facts, "samples": "another batch"}, {}, {}, 0.0)
        return [report, other]

    with worker() as here:
        before = here.holdings.state.fingerprint()
        here.engine.updates.share = share
        with pytest.raises(MismatchError, match="worker 1 has samples another batch"):
            here.step(Batch(*samples()), loss_of(here.model))
        assert here.engine.updates.asked == ["begin", "abandon"]
        assert here.holdings.state.fingerprint() == before
        assert here.engine.version == 0


@pytest.mark.parametrize("point", ["forward", "before update", "inside update", "after update", "before commit"])
@pytest.mark.parametrize("after", [0, 2])  # the first update makes the optimizer's state
def test_a_step_that_fails_anywhere_leaves_everything_as_it_was_and_can_be_done_again(worker, point, after):
    def fail(reached):
        if reached == point:
            raise LookupError(point)

    def train(planted):
        with worker(norm=True) as here:
            for number in range(4):
                if planted and number == after:
                    before = here.holdings.state.fingerprint()
                    points.arm(fail)
                    try:
                        with pytest.raises(LookupError):
                            here.step(Batch(*samples()), loss_of(here.model))
                    finally:
                        points.arm(None)
                    assert here.holdings.state.fingerprint() == before
                    assert here.engine.version == number
                here.step(Batch(*samples()), loss_of(here.model))
            return here.holdings.state.fingerprint()

    assert train(planted=True) == train(planted=False)


def test_a_new_generation_brings_back_what_is_committed_while_updates_hold_still(worker):
    with worker() as here:
        here.step(Batch(*samples()), loss_of(here.model))
        before, state = here.holdings.state.fingerprint(), here.holdings.state
        here.engine.begin(7)
        here.holdings.replace({"model.0.bias": torch.full((5,), 9.0, dtype=torch.float64)})
        here.engine.updates.asked.clear()
        here.engine.recover()
        assert here.engine.updates.asked == ["recovery begins", "recovery ends"]
        assert state.fingerprint() == before


def test_the_process_and_the_model_are_the_user_s_again_at_the_end(worker):
    enabled = torch.are_deterministic_algorithms_enabled()
    with worker() as here:
        here.step(Batch(*samples()), loss_of(here.model))
        shared = {entry.live.data_ptr() for entry in here.holdings.state.entries.values()}
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == enabled
    assert not shared & {p.data_ptr() for p in here.model.parameters()}
    loss_of(here.model)(samples()).backward()
    assert here.model[0].weight.grad is not None, "no hook takes gradients away"
