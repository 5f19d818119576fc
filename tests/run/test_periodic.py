"""In between a worker trains by itself, then sends what that changed: every so many batches, or once an epoch."""

import pytest
import torch
from clients import FakeServer
from test_apart import environment_of
from workshop import Batch, Worker, network, samples

from evenstep.engine.reports import Report
from evenstep.run.apart import Apart
from evenstep.run.periodic import PeriodicUpdates


def loss_of(model):
    return lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])


def periodic(holdings, server, every, worker=0, num_workers=1):
    apart = Apart(holdings, server, environment_of(worker, num_workers))
    model = network(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    return Worker(holdings, model, optimizer, PeriodicUpdates(holdings, apart, every))


def updates_of(server):
    return [each for each in server.told if "kind" in each]


@pytest.mark.parametrize(("every", "due"), [(2, [2, 4]), (3, [3, 6]), ("epoch", [3, 6])])
def test_changes_are_sent_when_they_are_due(holdings_of, every, due):
    (holdings,) = holdings_of()
    server, sent = FakeServer(None), []
    with periodic(holdings, server, every) as here:
        for number in range(1, 7):
            before = len(updates_of(server))
            here.step(Batch(*samples(), is_last=number % 3 == 0), loss_of(here.model))
            if len(updates_of(server)) > before:
                sent.append(number)
    assert [number for number in sent if number <= due[-1]][: len(due)] == due


def test_alone_the_server_ends_where_training_does(holdings_of):
    (holdings,) = holdings_of()
    server, model = FakeServer(None), network(norm=True)
    with periodic(holdings, server, 2) as here:
        start = {name: value.clone() for name, value in here.model.state_dict().items()}
        for _ in range(4):
            here.step(Batch(*samples()), loss_of(here.model), clip_norm=1.0)
        for name, p in model.named_parameters():
            assert torch.allclose(server.values[name], here.model.state_dict()[name], rtol=1e-12), name
            assert torch.equal(start[name], p)
            assert not torch.equal(start[name], server.values[name])
        assert updates_of(server)[-1]["kind"] == "delta"
        assert "1.running_mean" in updates_of(server)[-1]["buffers"]


def test_changes_of_others_are_taken_over_and_count_once(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(None)
    with periodic(holdings, server, 1) as here:
        here.step(Batch(*samples()), loss_of(here.model))
        server.values["0.bias"].add_(5.0)  # somebody else's
        before = server.values["0.bias"].clone()
        mine = here.model[0].bias.detach().clone()
        here.step(Batch(*samples()), loss_of(here.model))
        change = updates_of(server)[-1]["update"]["0.bias"]
        assert torch.allclose(server.values["0.bias"], before - change, rtol=1e-12)
        assert torch.equal(here.model[0].bias, server.values["0.bias"])
        assert (change.abs() < 1.0).all()
        assert not torch.equal(mine, here.model[0].bias)


def test_what_is_frozen_is_not_sent(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(None)
    with periodic(holdings, server, 1) as here:
        here.model[2].bias.requires_grad_(False)
        here.step(Batch(*samples()), loss_of(here.model))
        assert "2.bias" not in updates_of(server)[-1]["update"]


def test_a_batch_without_samples_here_changes_nothing_and_is_counted(holdings_of):
    (holdings,) = holdings_of()
    model = network(norm=True)
    server = FakeServer(None, values={name: t.clone() for name, t in model.state_dict().items()})
    with periodic(holdings, server, 2, worker=0, num_workers=4) as here:
        before = here.step(Batch(*samples(9)), loss_of(here.model))
        outcome = here.step(Batch(*samples(1)), lambda part: pytest.fail("it has no sample of it"))
        assert torch.equal(outcome.loss, before.loss)
        assert len(updates_of(server)) == 1
        assert set(Report.unpack(updates_of(server)[0]["note"]).results) == {0}


def test_what_an_earlier_life_has_sent_is_left_out(holdings_of):
    (holdings,) = holdings_of()
    server = FakeServer(None)
    with periodic(holdings, server, 2) as here:
        apart = here.engine.updates._apart
        apart._left_out = 1
        apart.leave_out = lambda: setattr(apart, "_left_out", 0)
        for _ in range(2):
            here.step(Batch(*samples()), lambda part: pytest.fail("it was computed"))
        assert updates_of(server) == []
        for _ in range(2):
            here.step(Batch(*samples()), loss_of(here.model))
        assert len(updates_of(server)) == 1
