"""Every batch is an update of its own: tree nodes to a server that waits for all, a mean to one that does not."""

import pytest
import torch
from clients import FakeServer
from test_apart import environment_of
from workshop import Batch, Worker, network, samples

from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.loss import Loss
from evenstep.engine.reports import Report
from evenstep.run.apart import Apart
from evenstep.run.served import ServedUpdates


def loss_of(model):
    return lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])


def served(holdings, server, worker=0, num_workers=1, model=None):
    apart = Apart(holdings, server, environment_of(worker, num_workers))
    model = network() if model is None else model
    return Worker(holdings, model, torch.optim.SGD(model.parameters(), server.rate), ServedUpdates(holdings, apart))


def plain_step(model, batch, rate):
    gradients = torch.autograd.grad(loss_of(model)(batch), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.sub_(rate * g)


@pytest.mark.parametrize("staleness", [0, None])
def test_alone_it_is_plain_descent(holdings_of, staleness):
    (holdings,) = holdings_of()
    server, (x, y), plain = FakeServer(staleness), samples(), network()
    with served(holdings, server) as here:
        for _ in range(3):
            outcome = here.step(Batch(x, y), loss_of(here.model))
            assert outcome.loss.item() == pytest.approx(loss_of(plain)((x, y)).item(), rel=1e-12)
            plain_step(plain, (x, y), server.rate)
        for name, value in plain.state_dict().items():
            assert torch.allclose(here.model.state_dict()[name], value, rtol=1e-12)
    assert server.open == 0


def test_a_server_that_waits_gets_the_nodes_that_cover_the_shards(holdings_of):
    (holdings,) = holdings_of(shards=6)
    server, batch = FakeServer(values=network().state_dict()), Batch(*samples(12), shards=6)
    with served(holdings, server, worker=0, num_workers=2) as here:
        here.step(batch, loss_of(here.model))
        assert server.last["spans"] == [[0, 2], [2, 3]]
        assert server.last["shards"] == 6
        update = server.last["update"]
        assert sorted(update) == sorted(f"{node}/{name}" for node in ("0-2", "2-3") for name in plain_names())
        plain = network()
        part = batch.part(2)
        expected = torch.autograd.grad(loss_of(plain)(part) * (2 / 12), plain[0].weight)[0]
        assert torch.equal(update["2-3/0.weight"], expected)


def plain_names():
    return list(network().state_dict())


def test_one_that_does_not_gets_the_mean_over_the_samples_here(holdings_of):
    (holdings,) = holdings_of()
    server, batch, plain = FakeServer(None, values=network().state_dict()), Batch(*samples(9)), network()
    with served(holdings, server, worker=1, num_workers=2) as here:
        outcome = here.step(batch, loss_of(here.model))
    mine = [torch.cat(both) for both in zip(batch.part(2), batch.part(3), strict=True)]
    assert server.last["samples"] == len(mine[0]) == 5
    assert outcome.loss.item() == pytest.approx(loss_of(plain)(mine).item(), rel=1e-12)
    expected = torch.autograd.grad(loss_of(plain)(mine), plain[0].weight)[0]
    assert torch.allclose(server.last["update"]["0.weight"], expected, rtol=1e-12)


def test_a_short_batch_may_leave_it_nothing_and_the_update_is_counted_all_the_same(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(None, values=network().state_dict())
    with served(holdings, server, worker=0, num_workers=4) as here:
        before = here.step(Batch(*samples(9)), loss_of(here.model))
        outcome = here.step(Batch(*samples(1)), lambda part: pytest.fail("it has no sample of it"))
        assert server.last["samples"] == 0
        assert server.last["update"] == {}
        assert torch.equal(outcome.loss, before.loss), "the results are those of the last step"
        assert Report.unpack(server.last["note"]).results == Report.unpack(server.told[-2]["note"]).results


def test_losses_of_all_workers_come_back_with_the_update(holdings_of):
    (holdings,) = holdings_of()
    server, batch, plain = FakeServer(values=network().state_dict()), Batch(*samples(9)), network()
    with served(holdings, server, worker=0, num_workers=2) as here:
        update = here.engine.updates._apart.client.update

        def with_another(*args, note, **more):
            reply = update(*args, note=note, **more)
            mine = Report.unpack(note)
            shard = next(iter(mine.results.values()))
            theirs = Report(1, mine.facts, {}, {2: shard, 3: shard}, 0.1)
            return {**reply, "notes": [note, theirs.pack()]}

        here.engine.updates._apart.client.update = with_another
        outcome = here.step(batch, loss_of(here.model))
        results = Report.unpack(server.last["note"]).results
        total = results[0].loss.total + results[1].loss.total + 2 * results[0].loss.total
        weight = results[0].loss.weight + results[1].loss.weight + 2 * results[0].loss.weight
        assert outcome.loss.item() == pytest.approx(total / weight, rel=1e-12)
    assert plain is not None


def test_workers_that_send_different_batches_hear_of_it(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(values=network().state_dict())
    with served(holdings, server, worker=0, num_workers=2) as here:
        update = here.engine.updates._apart.client.update

        def with_another(*args, note, **more):
            theirs = Report(1, {**Report.unpack(note).facts, "samples": "another"}, {}, {}, 0.1)
            return {**update(*args, note=note, **more), "notes": [note, theirs.pack()]}

        here.engine.updates._apart.client.update = with_another
        with pytest.raises(MismatchError, match="worker 1 has samples another but worker 0 has a batch"):
            here.step(Batch(*samples()), loss_of(here.model))


def test_gradients_that_are_added_up_elsewhere_cannot_be_clipped_or_weighted_here(holdings_of):
    (holdings,) = holdings_of()
    with served(holdings, FakeServer()) as here:
        with pytest.raises(UnsupportedError, match=r"they cannot be clipped here; use Server\(..., aggregate=True\)"):
            here.step(Batch(*samples()), loss_of(here.model), clip_norm=1.0)
        with pytest.raises(UnsupportedError, match=r"returned an evenstep\.Loss"):
            here.step(Batch(*samples()), lambda part: Loss(loss_of(here.model)(part), weight=1))
        assert [each for each in here.engine.updates._apart.client.server.told if "kind" in each] == [], "nothing sent"


@pytest.mark.parametrize("worker", [0, 1])
def test_buffers_are_those_of_the_worker_with_the_first_shard(holdings_of, worker):
    (holdings,) = holdings_of()
    model = network(norm=True)
    server = FakeServer(None, values={name: t.clone() for name, t in model.state_dict().items()})
    with served(holdings, server, worker, 2, model) as here:
        here.step(Batch(*samples()), loss_of(model))
    assert bool(server.last["buffers"]) == (worker == 0)


def test_what_an_earlier_life_has_sent_is_not_computed_again(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(None)
    with served(holdings, server) as here:
        apart = here.engine.updates._apart
        apart._left_out, before = 2, server.version
        apart.leave_out = lambda: setattr(apart, "_left_out", apart._left_out - 1)
        for _ in range(2):
            here.step(Batch(*samples()), lambda part: pytest.fail("it was computed"))
        assert server.version == before
        here.step(Batch(*samples()), loss_of(here.model))
        assert server.version == before + 1
        assert here.engine.version == 3
