"""A group makes its updates on servers: sums go there once each, the step counts when they are there, values come back.

The servers are a dict of values and plain gradient descent.
"""

import threading

import pytest
import torch
from workshop import Batch, Worker, network, samples

from evenstep.core.errors import UnreachableError, UnsupportedError
from evenstep.plan.groups import Standing
from evenstep.run import grouped as module
from evenstep.run.grouped import GroupedUpdates

RATE = 0.5


class Servers:
    """One server group, as `run/servers.py` has it; keeps what it was told, in order."""

    def __init__(self, values=None):
        self.values, self.told, self.done, self.fails = values or {}, [], set(), None
        self._lock = threading.Lock()

    def opened(self, standing, bundles, server_of, buffers, timeout_s, look):
        self.bundles = bundles
        return self

    def put(self, state, recipe):
        self.told.append(("put", recipe and recipe["groups"][0]["lr"]))
        self.values = {name: tensor.clone() for name, tensor in state.items()}

    def compare_models(self, state):
        self.told.append("compare")

    def everything(self, group):
        return {name: tensor.clone() for name, tensor in self.values.items()}

    def send(self, bundle, version, update, options):
        with self._lock:
            if self.fails is not None:
                raise UnreachableError(self.fails)
            self.told.append(("send", bundle, version, sorted(update)))
            if (bundle, version) not in self.done:
                self.done.add((bundle, version))
                rate = 1.0 if options is None else options[0]["lr"]
                for name, tensor in update.items():
                    self.values[name] = self.values[name] - rate * tensor

    def fetch(self, bundle):
        with self._lock:
            return {name: self.values[name].clone() for name in self.bundles[bundle]}

    def optimizer_state(self):
        self.told.append("optimizer state")
        return {}, {}

    def close(self):
        self.told.append("close")

    def leave(self):
        self.told.append("leave")

    def sent(self):
        return [each[1:3] for each in self.told if each[0] == "send"]


@pytest.fixture
def servers(monkeypatch):
    servers = Servers()
    monkeypatch.setattr(module, "Servers", lambda *args: servers.opened(*args))
    return servers


def standing(group=0, lock=True, staleness=None):
    return Standing(group, 1 if group == 0 else 2, 0, [[{}]], staleness, lock, "secret")


def loss_of(model):
    return lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])


def worker(holdings, model=None, **where):
    model = network() if model is None else model
    updates = GroupedUpdates(holdings, standing(**where))
    try:
        return Worker(holdings, model, torch.optim.SGD(model.parameters(), RATE), updates)
    except BaseException:
        updates.close()
        raise


def plain(x, y, steps):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model)((x, y)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("lock", [True, False])
def test_steps_are_those_of_plain_torch_and_the_servers_have_the_result(holdings_of, servers, lock):
    (holdings,), (x, y) = holdings_of(), samples()
    with worker(holdings, lock=lock) as here:
        for _ in range(3):
            here.step(Batch(x, y), loss_of(here.model))
        here.engine.updates.finish()
        expected = plain(x, y, 3)
        for name, value in here.model.state_dict().items():
            assert torch.allclose(value, expected[name], rtol=1e-12)
            assert torch.allclose(value, servers.values[f"model.{name}"], rtol=1e-12)
    assert servers.sent() == [(bundle, version) for version in range(3) for bundle in (1, 0)], "last layer first"
    assert servers.told[0] == ("put", RATE if lock else None), "without a lock no server needs an optimizer"
    assert ("optimizer state" in servers.told) == lock
    assert servers.told[-2:] == ["close", "leave"]


def test_only_the_first_group_puts_its_values_and_all_take_those_of_the_servers(holdings_of, servers):
    (holdings,) = holdings_of()
    servers.values = {f"model.{name}": value + 1 for name, value in network().state_dict().items()}
    with worker(holdings, group=1) as here:
        assert servers.told == ["compare"]
        for name, value in here.model.state_dict().items():
            assert torch.equal(value, servers.values[f"model.{name}"])
        assert [here.engine.updates.number_of(version) for version in range(3)] == [1, 3, 5], "of all groups' steps"


def test_sums_leave_while_backward_runs_unless_a_norm_is_wanted(holdings_of, servers):
    (holdings,), batch = holdings_of(), Batch(*samples())
    with worker(holdings) as here:
        update, sent_before = here.engine.updates.update, []

        def looks(work, sums):
            here.engine.updates.traffic.courier.wait_sent()
            sent_before.append(len(servers.sent()))
            return update(work, sums)

        here.engine.updates.update = looks
        here.step(batch, loss_of(here.model))
        here.step(batch, loss_of(here.model), clip_norm=1.0)
    assert sent_before == [2, 2], "two before the first update, none more before the second"
    assert servers.sent() == [(1, 0), (0, 0), (1, 1), (0, 1)]


def test_a_step_does_not_count_before_the_servers_have_it_and_is_sent_again(holdings_of, servers):
    (holdings,), (x, y) = holdings_of(), samples()
    with worker(holdings) as here:
        publish = here.holdings.models.publish_buffers

        def dies_once(*_, **__):
            here.holdings.models.publish_buffers = publish
            raise LookupError("after the servers had it")

        here.holdings.models.publish_buffers = dies_once
        with pytest.raises(LookupError):
            here.step(Batch(x, y), loss_of(here.model))
        assert here.engine.version == 0
        here.step(Batch(x, y), loss_of(here.model))
        here.engine.updates.others.collect()
        for name, value in plain(x, y, 1).items():
            assert torch.allclose(here.model.state_dict()[name], value, rtol=1e-12)
    assert servers.sent() == [(1, 0), (0, 0)] * 2


def test_a_server_that_is_gone_ends_the_step(holdings_of, servers):
    (holdings,) = holdings_of()
    with worker(holdings) as here:
        servers.fails = "nobody is there"
        with pytest.raises(UnreachableError, match="nobody is there"):
            here.step(Batch(*samples()), loss_of(here.model))
        assert here.engine.version == 0


def test_what_a_lost_owner_did_not_put_in_place_is_fetched_again(holdings_of, servers):
    (holdings,), batch = holdings_of(), Batch(*samples())
    with worker(holdings) as here:
        here.step(batch, loss_of(here.model))
        arrivals, courier = here.engine.updates.traffic.arrivals, here.engine.updates.traffic.courier
        courier.finish()
        fetches, fetch = [], courier.fetch
        courier.fetch = lambda bundle, version: (fetches.append((bundle, version)), fetch(bundle, version))
        with here.engine.updates.recovery():
            assert fetches == []
        assert fetches == [], "everything is there"
        arrivals.write(1, {}, 0)  # as if its owner had died before
        with here.engine.updates.recovery():
            pass
        assert fetches == [(1, 1)]
        here.engine.updates.others.collect()
        assert arrivals.version_of(1) == 1


def test_a_parameter_that_was_kept_outside_of_the_model_is_refused(holdings_of, servers):
    (holdings,), batch = holdings_of(), Batch(*samples())
    with worker(holdings) as here:
        kept = here.model[2].weight
        here.step(batch, loss_of(here.model))

        def around(part):
            return torch.nn.functional.cross_entropy(torch.tanh(here.model[0](part[0])) @ kept.t(), part[1])

        with pytest.raises(UnsupportedError, match=r"used parameter 'model.2.weight' through a reference kept outside"):
            here.step(batch, around)


def test_one_model_with_one_optimizer_for_all_runs_of_a_script(holdings_of, servers):
    (holdings,) = holdings_of()
    model = network()
    with pytest.raises(UnsupportedError, match=r"pass both to one run\.prepare"):
        GroupedUpdates(holdings, standing()).admit(model, None)
    updates = GroupedUpdates(holdings, standing())
    updates.admit(model, torch.optim.SGD(model.parameters(), RATE))
    with pytest.raises(UnsupportedError, match="one model with one optimizer"):
        updates.admit(model, torch.optim.SGD(model.parameters(), RATE))
    with pytest.raises(UnsupportedError, match="an earlier run of this script has put its own"):
        GroupedUpdates(holdings, standing()).admit(model, torch.optim.SGD(model.parameters(), RATE))
    updates.close()
    assert type(model[0]._parameters) is dict, "as it was before"


@pytest.mark.parametrize("what", ["load", "checkpoint", "edit", "exchange", "recheck", "carry", "scaled loss"])
def test_what_would_see_one_group_only_is_refused(holdings_of, servers, what):
    (holdings,) = holdings_of()
    with pytest.raises(UnsupportedError, match="servers"):
        GroupedUpdates(holdings, standing()).refuse(what)
