"""Optimizers on servers: stepped without ceremony, and cut up, to the same bits."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep.core.errors import UnsupportedError
from evenstep.server import ParameterServer, connect
from evenstep.server.store.optimizers import Stepper, can_split, sliced
from evenstep.server.wire.slices import Slices
from evenstep.server.wire.tensors import ParameterLayout, Spec


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


def layout_of(tensors):
    return ParameterLayout({name: Spec.of(tensor) for name, tensor in tensors.items()})


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_on_pieces_steps_to_the_bits_of_one_on_the_whole(name):
    torch.manual_seed(4)
    shapes = {"w": (61, 37), "b": (37,), "v": (3, 517)}
    start = {key: torch.randn(shape) for key, shape in shapes.items()}
    whole = {key: nn.Parameter(value.clone()) for key, value in start.items()}
    groups = [{"params": [whole["w"], whole["b"]]}, {"params": [whole["v"]], "lr": 0.003}]
    optimizer = OPTIMIZERS[name](groups)
    assert can_split(optimizer)
    slices = Slices(layout_of(start), 3, split=True)
    steps = [{key: torch.randn(shape) for key, shape in shapes.items()} for _ in range(6)]

    def step(gradients, parameters, by):
        for key, parameter in parameters.items():
            parameter.grad = gradients[key].clone()
        by.step()

    for gradients in steps[:3]:
        step(gradients, whole, optimizer)
    servers = []
    for server in range(3):  # they begin with the state that there is
        own = {p.name: nn.Parameter(p.of(whole[p.parameter].detach()).clone()) for p in slices.pieces[server]}
        names = {parameter: key for key, parameter in whole.items()}
        servers.append((own, sliced(optimizer, names, slices.pieces[server], own)))
    for gradients in steps[3:]:
        step(gradients, whole, optimizer)
        for (own, by), part in zip(servers, slices.cut(gradients), strict=True):
            step(part, own, by)
    for server, (own, _) in enumerate(servers):
        for piece in slices.pieces[server]:
            assert torch.equal(own[piece.name], piece.of(whole[piece.parameter])), piece


def test_an_optimizer_that_looks_at_whole_parameters_gets_them_whole():
    weights = [nn.Parameter(torch.zeros(8, 8))]

    class Mine(torch.optim.SGD):
        pass

    assert not can_split(torch.optim.Adafactor(weights))
    assert not can_split(torch.optim.Muon(weights))
    assert not can_split(torch.optim.Muon), "a function that a single number does not please"
    assert can_split(torch.optim.Adam)
    assert can_split(None)
    with pytest.warns(UserWarning, match="Mine is not from torch.optim"):
        assert not can_split(Mine(weights, 0.1))
    with pytest.raises(UnsupportedError, match="LBFGS sees all parameters at once"):
        can_split(torch.optim.LBFGS(weights))
