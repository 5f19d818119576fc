"""Forward and backward of shards give the gradients that plain torch gives, shard by shard or side by side."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workshop import Batch, Worker, network, samples

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.exchange.surroundings import current


def worker(holdings_of, model=None, **options):
    (holdings,) = holdings_of(**options)
    model = network() if model is None else model
    return Worker(holdings, model, torch.optim.SGD(model.parameters(), 0.1))


def loss_of(model):
    return lambda part: F.cross_entropy(model(part[0]), part[1])


def computed(worker, batch, function):
    """Results of all shards, and the summed gradients."""
    gradients, work = worker.prepared.gradients, worker.work(batch, function)
    gradients.begin(1 + worker.engine.group.exchanges, [0], list(work.parts))
    results = worker.engine.compute.run(work)()
    gradients.end_backward()
    return results, gradients.finish()


def meeting(function):
    """The same function, which also meets the other shards."""

    def met(part):
        current().meet("test", 1, lambda values: values)
        return function(part)

    return met


@pytest.mark.parametrize("wrap", [lambda function: function, meeting])
@pytest.mark.parametrize("count", [9, 3])  # the second leaves a shard without samples
def test_gradients_are_those_of_the_whole_batch(holdings_of, wrap, count):
    x, y = samples(count)
    with worker(holdings_of) as here:
        results, sums = computed(here, Batch(x, y), wrap(loss_of(here.model)))
        loss = loss_of(here.model)((x, y))
        expected = torch.autograd.grad(loss, list(here.model.parameters()))
        assert all(torch.allclose(sums[i], g, rtol=1e-12, atol=0) for i, g in enumerate(expected))
        total = sum(r.loss.total for r in results.values())
        assert total / count == pytest.approx(loss.item(), rel=1e-12)
        assert all(p.grad is None for p in here.model.parameters())


def test_side_by_side_gives_the_bits_of_one_after_the_other(holdings_of):
    batch = Batch(*samples())
    with worker(holdings_of) as here:
        function = loss_of(here.model)
        alone, together = computed(here, batch, function), computed(here, batch, meeting(function))
        assert alone[0] == together[0]
        assert all(torch.equal(alone[1][i], together[1][i]) for i in alone[1])


@pytest.mark.parametrize("wrap", [lambda function: function, meeting])
def test_each_shard_draws_its_own_numbers_whatever_was_drawn_before(holdings_of, wrap):
    batch, found = Batch(*samples()), []
    with worker(holdings_of) as here:
        for _ in range(2):
            drawn = []

            def function(part, drawn=drawn):
                drawn.append(torch.rand(2).tolist())
                return loss_of(here.model)(part)

            before = torch.get_rng_state()
            computed(here, batch, wrap(function))
            assert torch.equal(torch.get_rng_state(), before), "the caller's are as they were"
            torch.rand(5)
            found.append(drawn)
        seeds = [here.engine.context.seed_of(0, k) for k in range(4)]
    assert found[0] == found[1]
    assert found[0] == [torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]


@pytest.mark.parametrize("wrap", [lambda function: function, meeting])
def test_buffers_are_those_that_the_first_shard_leaves(holdings_of, wrap):
    x, y = samples()
    model = network(norm=True)
    with worker(holdings_of, model) as here:
        before = model[1].running_mean.clone()
        batch = Batch(x, y)
        computed(here, batch, wrap(loss_of(model)))
        kept = here.holdings.models.kept_buffers["model.1.running_mean"]
        here.holdings.models.restore_buffers()
        assert torch.equal(model[1].running_mean, before)
        model[1](model[0](batch.part(0)[0]))
        assert torch.equal(model[1].running_mean, kept)
        here.holdings.models.restore_buffers()


def test_a_frozen_parameter_has_no_gradient_and_may_thaw(holdings_of):
    batch = Batch(*samples())
    with worker(holdings_of) as here:
        here.model[0].weight.requires_grad_(False)
        assert computed(here, batch, loss_of(here.model))[1][0] is None
        here.model[0].weight.requires_grad_(True)
        assert computed(here, batch, loss_of(here.model))[1][0] is not None


def test_an_error_of_user_code_names_worker_shard_and_step(holdings_of):
    def fails(part):
        raise LookupError("data")

    with worker(holdings_of) as here:
        with pytest.raises(LookupError) as caught:
            computed(here, Batch(*samples()), fails)
        assert caught.value.__notes__ == ["in shard 0 of worker 0, step 0"]
        with pytest.raises(LookupError) as caught:
            computed(here, Batch(*samples()), meeting(fails))
        assert caught.value.__notes__ == ["in shard 0", "in worker 0, step 0"]


def test_a_step_function_that_goes_backward_by_itself_is_told_so(holdings_of):
    with worker(holdings_of) as here:

        def function(part):
            loss = loss_of(here.model)(part)
            loss.backward()
            return loss

        with pytest.raises(ConfigError, match="called backward"):
            computed(here, Batch(*samples()), function)
        assert all(p.grad is None for p in here.model.parameters())


def test_a_parameter_that_was_kept_outside_of_the_model_is_refused_where_lanes_have_their_own(holdings_of):
    with worker(holdings_of) as here:
        weight = here.model[2].weight

        def function(part):
            return (here.model[1](here.model[0](part[0])) @ weight.t()).square().mean()

        computed(here, Batch(*samples()), function)
        with pytest.raises(UnsupportedError, match=r"'model.2.weight' through a reference kept outside"):
            computed(here, Batch(*samples()), meeting(function))


@pytest.mark.parametrize("wrap", [lambda function: function, meeting])
def test_what_a_hook_makes_of_a_gradient_counts(holdings_of, wrap):
    batch = Batch(*samples())
    with worker(holdings_of) as here:
        function, weight = wrap(loss_of(here.model)), here.prepared.parameters[0]
        _, plain = computed(here, batch, function)
        handle = weight.register_hook(lambda gradient: gradient * 2)
        _, doubled = computed(here, batch, function)
        handle.remove()
        _, after = computed(here, batch, function)
    assert torch.equal(doubled[0], plain[0] * 2)
    assert torch.equal(doubled[1], plain[1])
    assert torch.equal(after[0], plain[0])


@pytest.mark.parametrize("wrap", [lambda function: function, meeting])
def test_a_hook_that_takes_gradients_as_they_come_is_refused(holdings_of, wrap):
    with worker(holdings_of) as here:
        here.prepared.parameters[1].register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(UnsupportedError, match=r"has a post-accumulate-grad hook.*register_hook"):
            computed(here, Batch(*samples()), wrap(loss_of(here.model)))


def test_a_parameter_of_no_model_is_found(holdings_of):
    stranger = nn.Parameter(torch.ones((), dtype=torch.float64))
    with worker(holdings_of) as here, pytest.raises(UnsupportedError, match="in no prepared model"):
        computed(here, Batch(*samples()), lambda part: here.model(part[0]).mean() * stranger)


def test_what_user_code_left_in_grad_counts_for_nothing(holdings_of):
    batch = Batch(*samples())
    with worker(holdings_of) as here:
        expected = computed(here, batch, loss_of(here.model))[1][0].clone()
        here.model[0].weight.grad = torch.full_like(here.model[0].weight, 1e6)
        assert torch.equal(computed(here, batch, loss_of(here.model))[1][0], expected)


def test_a_shard_that_meets_others_when_an_earlier_one_did_not_is_told_so(holdings_of):
    calls = []

    def function(part):
        calls.append(1)
        if len(calls) > 1:
            current().meet("test", 1, lambda values: values)
        return loss_of(here.model)(part)

    with worker(holdings_of) as here, pytest.raises(UnsupportedError, match="but shard 0 ended without that"):
        computed(here, Batch(*samples()), function)
