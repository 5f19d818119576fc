"""Workers that share a machine are one worker to the server: one update for all, sent once, whoever sends it."""

import pytest
import torch
from clients import FakeServer
from workshop import Batch, Worker, network, samples

from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.editing import edit
from evenstep.run.aggregated import AggregatedUpdates


def loss_of(model):
    return lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])


def worker(holdings, server, model=None):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), server.rate)
    return Worker(holdings, model, optimizer, AggregatedUpdates(holdings, server))


def test_the_first_worker_puts_the_model_there_and_steps_are_the_server_s(holdings_of):
    (holdings,) = holdings_of()
    server, (x, y), plain = FakeServer(), samples(), network()
    optimizer = torch.optim.SGD(plain.parameters(), server.rate)
    with worker(holdings, server) as here:
        assert server.told[0]["put"] == sorted(network().state_dict())
        for _ in range(3):
            here.step(Batch(x, y), loss_of(here.model))
            optimizer.zero_grad()
            loss_of(plain)((x, y)).backward()
            optimizer.step()
        for name, value in plain.state_dict().items():
            assert torch.allclose(here.model.state_dict()[name], value, rtol=1e-12)
            assert torch.equal(here.model.state_dict()[name], server.values[name])
        assert server.last["spans"] == [[0, 4]]
        assert server.last["base"] == server.version - 1
        assert sorted(server.last["update"]) == sorted(f"0-4/{name}" for name in plain.state_dict())
    assert server.open == 0


def test_values_that_the_server_has_are_taken_over(holdings_of):
    (holdings,) = holdings_of()
    theirs = {name: t + 1 for name, t in network().state_dict().items()}
    server = FakeServer(values=theirs, version=9)
    with worker(holdings, server) as here:
        assert all(torch.equal(value, theirs[name]) for name, value in here.model.state_dict().items())
        assert server.told == []


def test_another_model_there_is_an_error_and_nothing_stays_open(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(values={"0.weight": torch.zeros(1)})
    with pytest.raises(MismatchError, match="on the server but"):
        worker(holdings, server)
    assert server.open == 0


def test_an_update_that_is_sent_again_counts_once(holdings_of):
    (holdings,) = holdings_of()
    server, batch = FakeServer(), Batch(*samples())
    with worker(holdings, server) as here:
        publish = here.holdings.models.publish_buffers

        def dies_once(*_, **__):
            here.holdings.models.publish_buffers = publish
            raise LookupError("after the server had it")

        here.holdings.models.publish_buffers = dies_once
        with pytest.raises(LookupError):
            here.step(batch, loss_of(here.model))
        version, values = server.version, {n: t.clone() for n, t in server.values.items()}
        here.step(batch, loss_of(here.model))
        assert server.version == version
        assert all(torch.equal(value, values[name]) for name, value in here.model.state_dict().items())
        here.step(batch, loss_of(here.model))
        assert server.version == version + 1


def test_numbers_only_grow_also_over_an_edit_and_a_second_job(holdings_of):
    server, batch = FakeServer(), Batch(*samples())
    for _ in range(2):
        (holdings,) = holdings_of()
        with worker(holdings, server) as here:
            here.step(batch, loss_of(here.model))
            edit(here.engine.holdings, here.engine.updates, lambda model=here.model: model[0].bias.zero_(), 3)
            assert (server.values["0.bias"] == 0).all()
            here.step(batch, loss_of(here.model))
    numbers = [each["sequence"] for each in server.told if each.get("sequence") is not None]
    assert numbers == sorted(set(numbers))


def test_learning_rates_are_told_when_they_change(holdings_of):
    (holdings,) = holdings_of()
    server, batch = FakeServer(), Batch(*samples())
    with worker(holdings, server) as here:
        here.step(batch, loss_of(here.model))
        assert "options" not in server.last
        here.prepared.optimizer.param_groups[0]["lr"] = 0.25
        here.step(batch, loss_of(here.model))
        assert server.last["options"][0]["lr"] == 0.25
        here.step(batch, loss_of(here.model))
        assert "options" not in server.last


def test_a_server_that_does_not_wait_gets_plain_names_and_how_many_samples(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(staleness=None)
    with worker(holdings, server) as here:
        here.step(Batch(*samples(9)), loss_of(here.model))
        assert server.last["samples"] == 9
        assert "spans" not in server.last
        assert sorted(server.last["update"]) == sorted(here.model.state_dict())


def test_buffers_go_there_too(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer()
    with worker(holdings, server, network(norm=True)) as here:
        here.step(Batch(*samples()), loss_of(here.model))
        assert set(server.last["buffers"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert torch.equal(server.values["1.running_mean"], here.model[1].running_mean)


def test_who_is_not_the_first_any_more_lets_go_of_the_server(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer()
    with worker(holdings, server) as here:
        assert server.open == 1
        here.holdings.group.rank = 1
        with here.engine.updates.recovery():
            assert server.open == 0, "before anybody else comes under the same name"


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ("load", "run.load in a run with a server"),
        ("checkpoint", "run.checkpoint in a run"),
        ("added parameters", "add them before run.prepare"),
        ("edited optimizer", "the server's"),
        ("stream", "a stream"),
    ],
)
def test_what_the_server_has_instead_is_refused(holdings_of, feature, message):
    updates = AggregatedUpdates(holdings_of()[0], FakeServer())
    with pytest.raises(UnsupportedError, match=message):
        updates.refuse(feature)
    for allowed in ("edit", "exchange", "weighted loss"):
        updates.refuse(allowed)
    updates.close()


def test_one_model_with_one_optimizer(holdings_of):
    (holdings,) = holdings_of()
    with worker(holdings, FakeServer()) as here:
        with pytest.raises(UnsupportedError, match="one model with one optimizer"):
            here.engine.intake.prepare(network(), torch.optim.SGD(network().parameters(), 0.1))
        assert len(here.holdings.optimizers) == 1
