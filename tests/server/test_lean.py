"""What is not looked at again because it did not change: and that a change is seen, and nothing else is different."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep.core.errors import ConfigError, RefusedError
from evenstep.server import ParameterServer, connect
from evenstep.server.store.commits import First
from evenstep.server.store.optimizers import Stepper
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.store import Store


@pytest.fixture(params=["http", "tcp", "memory"])
def transport(request):
    return request.param


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def gradients(seed):
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) for name, value in model().named_parameters()}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_a_stepper_ends_on_the_bits_of_the_optimizer(kind):
    ours, theirs = model(), model()
    stepper, plain = Stepper(kind(ours.parameters(), 0.1)), kind(theirs.parameters(), 0.1)
    for n in range(4):
        for net, step in ((ours, stepper.step), (theirs, plain.step)):
            for name, parameter in net.named_parameters():
                parameter.grad = gradients(n)[name]
            with torch.no_grad():
                step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_who_watches_an_optimizer_sees_every_step():
    net, seen = model(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    stepper = Stepper(optimizer)
    stepper.step()
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    stepper.step()
    handle.remove()
    stepper.step()
    every = register_optimizer_step_pre_hook(lambda *_: seen.append("global hook"))
    stepper.step()
    every.remove()
    assert seen == ["hook", "global hook"]
    StepLR(optimizer, 1)
    stepper.step()
    assert optimizer._opt_called, "the schedule knows of the step"


class Momentum(torch.optim.Optimizer):
    """Not torch's: it keeps the gradients that it is given."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if parameter.grad is not None:
                parameter.sub_(parameter.grad + state.get("last", 0.0))
                state["last"] = parameter.grad


def test_an_optimizer_may_keep_the_gradients_that_it_is_given(transport):
    net, expected = model(), model()
    there, last = dict(expected.named_parameters()), {}
    with (
        ParameterServer(net, Momentum(net.parameters()), staleness=None, transports=(transport,)) as server,
        connect(server.url) as client,
        torch.no_grad(),
    ):
        for n in range(4):
            client.update_parameters(gradients(n))
            for name, gradient in gradients(n).items():
                there[name].sub_(gradient + last.get(name, 0.0))
            last = gradients(n)
        found = client.get_parameters()
    assert all(torch.equal(found[name], value) for name, value in there.items())


def test_tensors_that_change_move_or_are_others_are_seen(transport):
    net = model()
    server = ParameterServer(net, torch.optim.SGD(net.parameters(), 1.0), staleness=None, transports=(transport,))
    with server, connect(server.url) as client:
        expected = {name: value.clone() for name, value in client.get_parameters().items()}
        update, out = gradients(0), {name: torch.zeros_like(value) for name, value in expected.items()}
        for n in range(6):
            if n == 2:
                update = gradients(2)  # elsewhere in memory
            if n == 3:
                out = {name: torch.zeros_like(value) for name, value in out.items()}
            if n == 4:
                update = {"1.bias": update["1.bias"]}  # fewer
            if n == 5:
                out["0.weight"].data = torch.zeros(4, 3)  # the same object, with other memory
            update["1.bias"].add_(1)  # where it lay before
            client.update_parameters(update)
            for name, value in update.items():
                expected[name].sub_(value)
            found = client.get_parameters(out=out)
            assert all(found[name] is out[name] and torch.equal(out[name], value) for name, value in expected.items())
        out["0.weight"].data = out["0.weight"].data.view(3, 4)  # the same memory, with another shape
        with pytest.raises(ConfigError, match=r"out\['0.weight'\]"):
            client.get_parameters(out=out)
        wrong = {**gradients(1), "0.weight": torch.zeros(3, 4)}
        with pytest.raises(RefusedError, match=r"'0.weight' came as float32\[3, 4\], expected float32\[4, 3\]"):
            client.update_parameters(wrong)
        assert client.get_parameters(min_version=6).keys() == expected.keys()


def large():
    store = Store(StoreOptions(staleness=None))
    store.put(First({"w": torch.zeros(1 << 20)}, "owner"))
    store.register("w")
    return store


def test_an_update_of_large_parameters_waits_for_readers_and_makes_no_copy():
    store = large()
    view = store.readers.get()
    threading.Timer(0.05, view.close).start()
    store.decider.update("w", 1, "delta", Contribution({"w": torch.full((1 << 20,), -1.0)}))
    assert store.status()["copies"] == 1
    with store.readers.get() as after:
        assert (after.version, float(after.tensors["w"][-1])) == (1, 1.0)
    store.close()


def test_a_reader_that_stays_holds_nobody_back_for_long():
    store = large()
    begin = time.monotonic()
    with store.readers.get() as view:
        store.decider.update("w", 1, "delta", Contribution({"w": torch.full((1 << 20,), -1.0)}))
        with store.readers.get() as after:
            assert (after.version, float(after.tensors["w"][-1])) == (1, 1.0)
        assert (view.version, float(view.tensors["w"][-1])) == (0, 0.0), "what it reads does not change"
    assert time.monotonic() - begin < 10
    assert store.status()["copies"] == 2
    store.close()
