"""Optimizers as plain values: what they describe is made again, or refused."""

import json

import pytest
import torch
from torch import nn

from evenstep.core.errors import RefusedError, UnsupportedError
from evenstep.server import ParameterServer, connect
from evenstep.server.client.groups import put
from evenstep.server.wire.recipes import build, describe


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def named(model):
    return {id(p): name for name, p in model.named_parameters()}


MAKERS = {
    "groups": lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[1].parameters(), "nesterov": True}], 0.3, momentum=0.9
    ),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01, betas=(0.8, 0.95), amsgrad=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_optimizer_made_from_its_recipe_steps_alike(make):
    here, there = net(), net()
    mine = make(here)
    recipe = json.loads(json.dumps(describe(mine, named(here))))
    theirs = build(recipe, dict(there.named_parameters()))
    for _ in range(3):
        for p, q in zip(here.parameters(), there.parameters(), strict=True):
            p.grad = q.grad = torch.randn_like(p)
        mine.step()
        theirs.step()
    assert all(torch.equal(p, q) for p, q in zip(here.parameters(), there.parameters(), strict=True))


def test_what_is_no_recipe_is_refused():
    model = net()
    used = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    used.step()
    with pytest.raises(UnsupportedError, match=r"brings state along for '0\.weight'"):
        describe(used, named(model))

    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedError, match=r"Mine .* not one of torch\.optim"):
        describe(Mine(model.parameters(), 0.1), named(model))
    with pytest.raises(UnsupportedError, match="not a plain value"):
        describe(torch.optim.Adam(model.parameters(), torch.tensor(0.1)), named(model))
    kinds = [{"class": kind, "groups": []} for kind in ("Optimizer", "__doc__", "LBFGS", "lr_scheduler")]
    for recipe in kinds:
        with pytest.raises(RefusedError, match=r"is not an optimizer of torch\.optim that a server can use"):
            build(recipe, {})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("SGD", {"lr": -1.0}, "Invalid learning rate"),
        ("SGD", {"lr": "x"}, "cannot be made"),
        ("SGD", {"momentum": -1}, "Invalid momentum"),
        ("SGD", {"colour": 1}, "has no option 'colour'"),
        ("Adam", {"betas": [0.9]}, "cannot be made"),
        ("Adam", {"betas": 3}, "cannot be made"),
        ("Adam", {"betas": [0.9, 1.0]}, "Invalid beta parameter at index 1"),
        ("Rprop", {"etas": []}, "cannot be made"),
    ],
)
@pytest.mark.parametrize("position", [0, 1])
def test_a_recipe_that_torch_does_not_take_is_refused_whichever_group_it_is(kind, options, words, position):
    parameters = dict(net().named_parameters())
    groups = [{"names": ["0.weight"]}, {"names": ["1.bias"]}]
    groups[position] |= options
    with pytest.raises(RefusedError, match=words):
        build({"class": kind, "groups": groups}, parameters)


def test_an_optimizer_that_could_not_step_is_refused_before_anything_is_put():
    model = net()
    recipe = {"class": "Adam", "groups": [{"names": ["0.weight"], "capturable": True, "lr": 0.1}]}
    with ParameterServer(staleness=None, transports=("tcp",)) as server, connect(server.url) as client:
        with pytest.raises(RefusedError, match="cannot step with these options"):
            put(client, dict(model.named_parameters()), optimizer=recipe)
        assert client.status()["owner"] is None
        put(client, dict(model.named_parameters()), optimizer={**recipe, "groups": [{"names": ["0.weight"]}]})


def test_a_recipe_comes_with_the_parameters_and_options_with_an_update():
    model = net()
    recipe = describe(torch.optim.SGD(model.parameters(), 0.5), named(model))
    with (
        ParameterServer(staleness=None, transports=("tcp",)) as server,
        connect(server.url) as client,
    ):
        put(client, dict(model.named_parameters()), optimizer=recipe)
        client.update({"1.bias": torch.ones(2)})
        client.update({"1.bias": torch.ones(2)}, options=[{"lr": 0.25}])
        assert torch.equal(client.get_parameters(["1.bias"])["1.bias"], model[1].bias.detach() - 0.75)
        with pytest.raises(RefusedError, match="options of 0 groups came, expected those of 1"):
            client.update({}, options=[])
        with pytest.raises(RefusedError, match="expected a list with the options of each group"):
            client.update({}, options=[{"params": {}}])
    with ParameterServer(None, lambda p: torch.optim.SGD(p, 0.1), transports=("tcp",)) as server:  # noqa: SIM117
        with connect(server.url) as client:
            with pytest.raises(RefusedError, match="takes no recipe"):
                put(client, dict(model.named_parameters()), optimizer=recipe)
