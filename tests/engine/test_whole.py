"""Optimizers that look at all parameters at once: one worker steps them, and the result is the same for any number."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_workers


class Lamb(torch.optim.Optimizer):
    """Adam's direction, divided by the norm of all gradients, with a trust ratio for each parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in held]).sum().sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad / (norm + 1e-6), 0.1)
                ratio = p.norm() / (state["mean"].norm() + 1e-6)
                p.add_(state["mean"], alpha=-group["lr"] * min(float(ratio), 10.0))


class Adapting(Lamb):
    """Finds its learning rate by itself, as Prodigy does."""

    def step(self, closure=None):
        for group in self.param_groups:
            norm = sum(float(p.grad.square().sum()) for p in group["params"] if p.grad is not None)
            group["lr"] = 0.9 * group["lr"] + 0.001 * norm
        super().step()


class Global(Lamb):
    def step(self, closure=None):
        self.state["all"] = {"step": 1}
        super().step()


class Counting(Lamb):
    count = 0

    def step(self, closure=None):
        self.count = self.count + 1
        super().step()


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(count=14):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def train(kind, whole=True, steps=4):
    with evenstep.Run(shards=4, seed=2, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, kind(model.parameters(), 0.05), whole=whole)
        for _ in range(steps):
            run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
        return run.fingerprint(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", [Lamb, Adapting])
def test_one_worker_steps_all_and_everyone_has_the_result(kind):
    alone = train(kind)
    for count in (2, 4):
        assert run_workers(count, lambda _: train(kind)) == [alone] * count
    if kind is Adapting:
        assert alone[1] != 0.05


def test_without_it_a_warning_offers_it_and_options_that_change_are_refused():
    with pytest.warns(UserWarning, match=r"Lamb is not from torch.optim.*prepare\(model, optimizer, whole=True\)"):
        train(Lamb, whole=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(evenstep.UnsupportedError, match=r"Adapting changes the options"):
            train(Adapting, whole=False)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Global, r"Global keeps state under 'all'"), (Counting, r"Counting changes its attribute 'count'")],
)
def test_state_that_cannot_be_shared_is_refused(kind, said):
    with pytest.raises(evenstep.UnsupportedError, match=said):
        train(kind, steps=2)


def test_a_step_that_fails_leaves_options_as_they_were():
    def fingerprint(fail):
        with evenstep.Run(shards=2, seed=1, quiet=True) as run:
            model = network()
            model, optimizer = run.prepare(model, Adapting(model.parameters(), torch.tensor(0.05)), whole=True)
            for number in range(3):
                if fail and number == 1:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(run._engine.models, "publish_buffers", lambda *_, **__: 1 / 0)
                        with pytest.raises(ZeroDivisionError):
                            run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
                run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
            return run.fingerprint(), float(optimizer.param_groups[0]["lr"])

    assert fingerprint(fail=True) == fingerprint(fail=False)


SCRIPT = """
    import torch
    import evenstep
    from test_whole import Adapting

    with evenstep.Run(shards=4) as run:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        model, optimizer = run.prepare(model, Adapting(model.parameters(), 0.05), whole=True)
        for _ in range(8):
            run.step(torch.arange(66.0).reshape(11, 6).sin(), lambda part: model(part).square().mean())
        run.print("rate", optimizer.param_groups[0]["lr"])
"""


def test_whoever_takes_over_has_the_options_too(script, tmp_path):
    path = script(SCRIPT)
    undisturbed = cli_run("run", "-n", "1", path)
    assert undisturbed.code == 0, undisturbed.stderr
    faults = [Fault("kill", "inside update", 3, worker=0), Fault("kill", "forward", 5, worker=1)]
    killed = cli_run("run", "-n", "3", path, variables=plant(faults, tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0, 1]
    assert killed.stdout == undisturbed.stdout
