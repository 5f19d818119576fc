"""Several optimizers that step on one backward: what plain torch does, the same on every number of workers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_workers


def network(norm=True):
    return nn.Sequential(nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 3))


def make(model):
    """Muon for matrices, AdamW for all else."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)


def batch(count=14):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def train(_=None, shards=4, *, norm=True, **options):
    with evenstep.Run(shards=shards, seed=2, quiet=True) as run:
        model = network(norm)
        first, second = make(model)
        model, first = run.prepare(model, first)
        model, second = run.prepare(model, second)
        losses = []
        for _ in range(4):
            loss = run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]), [first, second], **options)
            losses.append(float(loss))
        return run.fingerprint(), losses, run.grad_norm, {n: t.clone() for n, t in model.state_dict().items()}


def test_one_shard_is_plain_torch():
    _, losses, norm, found = train(shards=1, norm=False, clip_norm=0.2)
    torch.manual_seed(2)
    model = network(norm=False)
    optimizers = make(model)
    for loss in losses:
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.cross_entropy(model(batch()[0]), batch()[1])
        expected.backward()
        before = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        for optimizer in optimizers:
            optimizer.step()
        assert loss == expected.item()
    assert norm == before.item()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def norms(order):
    """The norms of the gradients of some batches, ours and torch's, where the optimizer has the biases first."""
    with evenstep.Run(shards=1, seed=2, quiet=True) as run:
        model, plain = (nn.Sequential(nn.Linear(6, 40), *(nn.Linear(40, 40) for _ in range(4))) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        groups = [{"params": [p for p in model.parameters() if p.ndim == dims]} for dims in (1, 2)]
        run.prepare(model, torch.optim.SGD(groups, lr=0.0))
        rows = sorted(plain.parameters(), key=lambda p: p.ndim if order == "optimizer" else 0)
        ours, theirs = [], []
        for count in range(4, 14):
            run.step(batch(count), lambda part: model(part[0]).square().mean(), clip_norm=math.inf, clip_order=order)
            ours.append(run.grad_norm)
            gradients = torch.autograd.grad(plain(batch(count)[0]).square().mean(), rows)
            theirs.append(torch.nn.utils.get_total_norm(gradients).item())
    return ours, theirs


def test_norms_are_added_up_in_the_order_that_is_asked_for():
    (ours, theirs), (grouped, by_group) = norms("model"), norms("optimizer")
    assert (ours, grouped) == (theirs, by_group)
    assert theirs != by_group, "or this would show nothing"


def test_every_number_of_workers_ends_on_the_same_bits():
    alone = train(clip_norm=0.3)[:3]
    for count in (2, 4):
        assert run_workers(count, lambda _: train(clip_norm=0.3)[:3]) == [alone] * count


def test_parameters_added_later_are_trained_too():
    def body(_):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = network()
            model, first = run.prepare(model, torch.optim.SGD(model[0].parameters(), 0.1))
            model, second = run.prepare(model, torch.optim.Adam(model[3].parameters(), 0.1))
            before = model[1].weight.detach().clone()
            for number in range(3):
                if number == 1:
                    second.add_param_group({"params": model[1].parameters(), "lr": 0.01})
                run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]), [first, second])
                assert torch.equal(model[1].weight, before) == (number == 0)
            return run.fingerprint()

    assert len({body(0), *run_workers(3, body)}) == 1


def test_what_makes_no_sense_is_said():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, first = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        model, second = run.prepare(model, torch.optim.SGD(model[0].parameters(), 0.1))
        stranger = torch.optim.SGD(model.parameters(), 0.1)
        for optimizers, said in (
            ([first, second], r"'model.0.weight' is in more than one of the optimizers of this step"),
            ([first, first], "an optimizer was passed twice"),
            ([first, stranger], "this optimizer was not prepared"),
            ([], "no optimizer in its list"),
        ):
            with pytest.raises(evenstep.ConfigError, match=said):
                run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]), optimizers)
        run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]), (second,))


def test_a_step_that_fails_leaves_both_as_they_were():
    def fingerprint(fail):
        with evenstep.Run(shards=2, seed=1, quiet=True) as run:
            model = network()
            first, second = make(model)
            model, first = run.prepare(model, first)
            model, second = run.prepare(model, second)
            for number in range(3):
                if fail and number == 1:
                    before, step = run.fingerprint(), second.step
                    second.step = lambda: 1 / 0
                    with pytest.raises(ZeroDivisionError):
                        run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]), [first, second])
                    second.step = step
                    assert run.fingerprint() == before
                run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]), [first, second])
            return run.fingerprint()

    assert fingerprint(fail=True) == fingerprint(fail=False)


SCRIPT = """
    import torch
    import torch.nn.functional as F
    import evenstep

    with evenstep.Run(shards=4) as run:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        model, muon = run.prepare(model, torch.optim.Muon(matrices, lr=0.02))
        model, adamw = run.prepare(model, torch.optim.AdamW(rest, lr=0.01))
        for _ in range(8):
            run.step(torch.arange(66.0).reshape(11, 6).sin(), lambda part: model(part).square().mean(), [muon, adamw])
"""


def test_a_worker_that_dies_in_the_update_changes_nothing(script, tmp_path):
    path = script(SCRIPT)
    undisturbed = cli_run("run", "-n", "1", path)
    assert undisturbed.code == 0, undisturbed.stderr
    killed = cli_run("run", "-n", "3", path, variables=plant([Fault("kill", "inside update", 4)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert killed.stdout == undisturbed.stdout
