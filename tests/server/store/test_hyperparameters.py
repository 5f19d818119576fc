"""Options that replace others: of the same type, and such that torch steps with them."""

import pytest
import torch
from torch import nn

from evenstep.core.errors import RefusedError
from evenstep.server.store.hyperparameters import check_hyperparameters, set_hyperparameters

KINDS = [
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
                 "Adafactor", "Muon")
    if hasattr(torch.optim, name)
]  # fmt: skip
NEVER = ["x", "", [], {}, [0.1], float("nan"), float("inf"), -float("inf"), 10**400]


def made(kind, dtype=torch.float64):
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2, 2, dtype=dtype))]
    return kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.01}])


def options_of(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_of_every_optimizer_takes_numbers_only(kind):
    optimizer = made(kind)
    before = options_of(optimizer)
    for name, there in before[0].items():
        wrong = [*NEVER, *([True] if not isinstance(there, bool) and there is not None else [3])]
        if isinstance(there, int | float) and not isinstance(there, bool) and there >= 0:
            wrong += [-1, -0.5]
        for value in wrong:
            if there is None and value == 3:
                continue
            for options in ([{name: value}, {}], [{}, {name: value}]):
                with pytest.raises(RefusedError):
                    check_hyperparameters(optimizer, options)
    assert options_of(optimizer) == before


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_options_that_there_are_and_another_rate_are_taken(kind):
    optimizer = made(kind)
    options = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
        for group in options_of(optimizer)
    ]
    check_hyperparameters(optimizer, options)
    options[1]["lr"] = 0.125
    check_hyperparameters(optimizer, options)
    assert optimizer.param_groups[1]["lr"] == 0.01, "to check changes nothing"
    set_hyperparameters(optimizer, options)
    assert optimizer.param_groups[1]["lr"] == 0.125
    assert not optimizer.state or kind is torch.optim.Adagrad


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (torch.optim.SGD, {"lr": -1.0}, "option lr='-1.0', expected one like '0.001'"),
        (torch.optim.SGD, {"lr": 1e300}, "torch.optim.SGD cannot step with these options"),
        (torch.optim.SGD, {"momentum": 1e300}, "torch.optim.SGD steps to infinity"),
        (torch.optim.SGD, {"nesterov": True}, "Nesterov momentum requires a momentum"),
        (torch.optim.SGD, {"colour": 1}, "the server's SGD has no option 'colour'"),
        (torch.optim.SGD, {"params": []}, "the server's SGD has no option 'params'"),
        (torch.optim.Adam, {"betas": [0.9, 1.5]}, "Invalid beta parameter at index 1"),
        (torch.optim.Adam, {"betas": [0.9]}, "option betas='[0.9]', expected one like '(0.9, 0.999)'"),
        (torch.optim.Adam, {"capturable": True}, "torch.optim.Adam cannot step with these options"),
        (torch.optim.Adamax, {"eps": -1}, "option eps='-1', expected one like"),
    ],
)
def test_what_torch_does_not_take_is_said_in_its_words(kind, options, sentence):
    for position in (0, 1):
        both = [{}, {}]
        both[position] = options
        with pytest.raises(RefusedError) as refused:
            check_hyperparameters(made(kind, torch.float32), both)
        assert sentence in str(refused.value) or (position == 1 and "expected one like '0.01'" in str(refused.value))


def test_a_rate_that_is_a_tensor_takes_numbers():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], torch.tensor(0.1), foreach=False)
    check_hyperparameters(optimizer, [{"lr": 0.25}])
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    set_hyperparameters(optimizer, [{"lr": 0.25}])
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    with pytest.raises(RefusedError):
        check_hyperparameters(optimizer, [{"lr": "x"}])


def test_the_options_of_an_optimizer_that_is_not_torchs_have_types_and_signs():
    class Mine(torch.optim.SGD):
        pass

    optimizer = Mine([nn.Parameter(torch.ones(2))], 0.1)
    check_hyperparameters(optimizer, [{"lr": 3}])
    for options in ({"lr": -1}, {"lr": "x"}, {"momentum": True}, {"nesterov": 0.5}):
        with pytest.raises(RefusedError, match="expected one like"):
            check_hyperparameters(optimizer, [options])


def test_without_an_optimizer_there_are_no_options():
    with pytest.raises(RefusedError, match="options of 1 groups came, expected those of 0"):
        check_hyperparameters(None, [{}])
