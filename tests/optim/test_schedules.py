"""Every learning-rate policy of Caffe and SINGA by its formula, as the table in docs/scaling.md maps it."""

import math
from bisect import bisect_right

import pytest
import torch
from torch.optim import lr_scheduler

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.optim import inv, sigmoid

BASE = 0.3
POLICIES = {
    "step": (lambda t: BASE * 0.5 ** (t // 7), lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
    "multistep": (
        lambda t: BASE * 0.1 ** bisect_right([5, 6, 20], t),
        lambda o: lr_scheduler.MultiStepLR(o, [5, 6, 20], 0.1),
    ),
    "exp": (lambda t: BASE * 0.97**t, lambda o: lr_scheduler.ExponentialLR(o, 0.97)),
    "inv": (lambda t: BASE * (1 + 0.01 * t) ** -0.75, lambda o: inv(o, 0.01, 0.75)),
    "poly": (lambda t: BASE * (1 - t / 40) ** 2, lambda o: lr_scheduler.PolynomialLR(o, 40, 2.0)),
    "sigmoid": (lambda t: BASE / (1 + math.exp(0.4 * (t - 20))), lambda o: sigmoid(o, -0.4, 20)),
    "linear": (
        lambda t: (1 - t / 40) * BASE + t / 40 * 0.03,
        lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.03 / BASE, total_iters=40),
    ),
    "exponential of SINGA": (lambda t: BASE / 2 ** (t / 10), lambda o: lr_scheduler.ExponentialLR(o, 2 ** (-1 / 10))),
    "inverse-t of SINGA": (lambda t: BASE / (1 + t / 8), lambda o: inv(o, 1 / 8, 1.0)),
    "fixed step of SINGA": (
        lambda t: [BASE, 0.2, 0.1][bisect_right([4, 9], t)],
        lambda o: lr_scheduler.LambdaLR(o, lambda t: [BASE, 0.2, 0.1][bisect_right([4, 9], t)] / BASE),
    ),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], BASE)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_its_formula_at_every_step(name):
    formula, make = POLICIES[name]
    target = optimizer()
    scheduler = make(target)
    for step in range(41):
        assert target.param_groups[0]["lr"] == pytest.approx(formula(step), rel=1e-9, abs=1e-12)
        target.step()
        scheduler.step()


def test_a_line_upwards_begins_at_its_base():
    target = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.9)
    scheduler = lr_scheduler.LinearLR(target, BASE / 0.9, 1.0, total_iters=40)
    for step in range(41):
        assert target.param_groups[0]["lr"] == pytest.approx((1 - step / 40) * BASE + step / 40 * 0.9, rel=1e-9)
        target.step()
        scheduler.step()


@pytest.mark.parametrize(("gamma", "ends"), [(-50.0, (1.0, 0.0)), (50.0, (0.0, 1.0))])
def test_a_steep_sigmoid_does_not_overflow(gamma, ends):
    scheduler = sigmoid(optimizer(), gamma, 1e5)
    (factor,) = scheduler.lr_lambdas
    assert (factor(0), factor(200_000), factor(100_000)) == (*ends, 0.5)


def test_a_rate_that_would_become_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"gamma=-0\.1, expected a number of at least 0"):
        inv(optimizer(), -0.1, 0.75)


def test_a_policy_is_saved_and_loaded_with_a_run(tmp_path):
    def train(steps: int, *, load: bool) -> float:
        with evenstep.Run(shards=2, quiet=True) as run:
            model = torch.nn.Linear(2, 1)
            model, sgd = run.prepare(model, torch.optim.SGD(model.parameters(), BASE))
            scheduler = inv(sgd, 0.01, 0.75)
            run.track("rate", scheduler)
            if load:
                run.load(tmp_path)
            for _ in range(steps):
                run.step(torch.ones(4, 2), lambda part: model(part).mean())
                scheduler.step()
            run.save(tmp_path)
            return sgd.param_groups[0]["lr"]

    train(3, load=False)
    assert train(4, load=True) == pytest.approx(BASE * (1 + 0.01 * 7) ** -0.75, rel=1e-12)
