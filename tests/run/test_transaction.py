"""A step commits everything or leaves everything as it was."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import images
from torch import nn

import evenstep
from workers import run_outcomes


class Fault(Exception):
    pass


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))


def loss_of(model, part):
    return F.cross_entropy(model(part[0]), part[1])


def raise_in_forward(engine, monkeypatch):
    calls = iter(range(100))
    return lambda model, part: loss_of(model, part) if next(calls) < 1 else _raise()


def raise_in_backward(engine, monkeypatch):
    def loss(model, part):
        out = loss_of(model, part)
        out.register_hook(lambda _: _raise())
        return out

    return loss


def raise_before_the_update(engine, monkeypatch):
    monkeypatch.setattr(engine._limiting, "clip", lambda *_: _raise())
    return loss_of


def raise_inside_the_update(engine, monkeypatch):
    optimizer = engine.optimizers[0].optimizer
    step = optimizer.step

    def half_a_step():
        step()
        _raise()

    monkeypatch.setattr(optimizer, "step", half_a_step)
    return loss_of


def raise_after_the_update(engine, monkeypatch):
    monkeypatch.setattr(engine.models, "publish_buffers", lambda *_, **__: _raise())
    return loss_of


def raise_at_the_commit(engine, monkeypatch):
    monkeypatch.setattr(engine.ledger.journal, "append", lambda _: _raise())
    return loss_of


def _raise():
    raise Fault("planted")


FAULTS = [
    raise_in_forward,
    raise_in_backward,
    raise_before_the_update,
    raise_inside_the_update,
    raise_after_the_update,
    raise_at_the_commit,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("after", [0, 2])  # the first update creates the optimizer's state
def test_a_step_that_fails_leaves_the_version_untouched_and_can_be_done_again(fault, after):
    batch = images(21).tensors

    def train(planted):
        with evenstep.Run(shards=4, seed=1, quiet=True) as run:
            model = network()
            model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
            seen = []
            for number in range(4):
                if planted and number == after:
                    before, state = run.fingerprint(), {n: t.clone() for n, t in model.state_dict().items()}
                    with pytest.MonkeyPatch.context() as monkeypatch:
                        function = partial(fault(run._engine, monkeypatch), model)
                        with pytest.raises(Fault, match="planted"):
                            run.step(batch, function)
                    assert run.fingerprint() == before
                    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
                    assert run.version == number
                    assert all(p.grad is None for p in model.parameters())
                seen.append(float(run.step(batch, lambda part: loss_of(model, part))))
            return run.fingerprint(), seen

    assert train(planted=True) == train(planted=False)


@pytest.mark.parametrize("fault", FAULTS[:-1])  # once all have come to the commit, it is worker 0's alone
def test_a_worker_that_fails_takes_all_others_to_the_version_before(fault):
    def body(worker):
        found = None
        try:
            with evenstep.Run(shards=4, seed=1, quiet=True) as run, pytest.MonkeyPatch.context() as monkeypatch:
                model = network()
                model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
                run.step(images(21).tensors, lambda part: loss_of(model, part))
                before = run.fingerprint()
                loss = loss_of
                if worker == 1:
                    loss = fault(run._engine, monkeypatch)
                    if fault is raise_after_the_update:  # only worker 0 publishes buffers
                        monkeypatch.setattr(run._engine.optimizers[0].kept, "news", lambda _: _raise())
                try:
                    run.step(images(21).tensors, lambda part: loss(model, part))
                except Exception as error:
                    assert run.version == 1
                    found = type(error).__name__, str(error), before == run.fingerprint()
                    raise
        except (Fault, evenstep.PeerError):
            return found
        raise AssertionError("the step committed")

    outcomes = run_outcomes(2, body)
    assert outcomes[1].value[0] == "Fault"
    name, text, _ = outcomes[0].value
    assert name == "PeerError"
    assert "worker 1 failed at step 1" in text
    assert "planted" in text
    assert "_raise" in text  # its traceback came along
    # Worker 0 learns of the failure after worker 1 has rolled back, so it sees version 1 whole again. Worker 1 may look
    # while worker 0 is still to roll back its own part of an update.
    assert outcomes[0].value[2]
    assert outcomes[1].value[2] or fault not in FAULTS[:2]
