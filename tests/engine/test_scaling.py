"""Loss scaling is that of `torch.amp.GradScaler`, and a step is skipped on all workers or on none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler

import evenstep
from evenstep.engine.scaling import Scaling
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_workers

LARGE = {"init_scale": 2.0**126, "growth_interval": 2}  # overflows at first, and grows until it does again


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(14, 6, generator=generator) * 8, torch.randint(0, 3, (14,), generator=generator)


def loss_of(model, part):
    return 50 * F.cross_entropy(model(part[0]), part[1])


def train(_=None, shards=4, steps=12, **options):
    with evenstep.Run(shards=shards, seed=2, quiet=True) as run:
        model = network()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.002, momentum=0.9))
        scaler, seen = GradScaler("cpu", **LARGE), []
        for number in range(steps):
            found = run.step(batch(number), lambda part: loss_of(model, part), scaler=scaler, **options)
            seen.append((float(found), scaler.get_scale(), run.grad_norm))
        return run.fingerprint(), seen, {name: t.clone() for name, t in model.state_dict().items()}


def test_it_is_the_scaler_of_torch_to_the_bit():
    _, seen, found = train(shards=1, clip_norm=0.5)
    torch.manual_seed(2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.002, momentum=0.9)
    scaler = GradScaler("cpu", **LARGE)
    skipped = 0
    for number, (loss, scale, norm) in enumerate(seen):
        optimizer.zero_grad()
        expected = loss_of(model, batch(number))
        scaler.scale(expected).backward()
        scaler.unscale_(optimizer)
        before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        assert (loss, scale) == (expected.item(), scaler.get_scale())
        if norm == float("inf"):
            skipped += 1
        else:
            assert norm == before
    assert 2 <= skipped <= 8
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor)


def test_every_number_of_workers_skips_the_same_steps():
    alone = train()[:2]
    assert len({scale for _, scale, _ in alone[1]}) > 2
    for count in (2, 4):
        assert run_workers(count, lambda _: train()[:2]) == [alone] * count


def test_a_skipped_step_changes_no_parameter_but_counts():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = nn.Sequential(nn.BatchNorm1d(6), network())
        model, _ = run.prepare(model, torch.optim.Adam(model.parameters()))
        scaler = GradScaler("cpu", init_scale=2.0**127)
        before = [p.clone() for p in model.parameters()]
        run.step(batch(0), lambda part: F.cross_entropy(model(part[0]), part[1]) * 100, scaler=scaler)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert (run.version, scaler.get_scale()) == (1, 2.0**126)
        assert model[0].num_batches_tracked == 1, "as in plain torch, the forward counts"


def test_float16_trains_under_autocast():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        scaler = GradScaler("cpu")

        def function(part):
            with torch.autocast("cpu", torch.float16):
                return F.cross_entropy(model(part[0]), part[1])

        losses = [float(run.step(batch(0), function, scaler=scaler)) for _ in range(20)]
        assert losses[-1] < losses[0]


def test_a_scaler_that_is_off_scales_nothing():
    assert Scaling(GradScaler("cpu", enabled=False)).scale is None
    Scaling(GradScaler("cpu", enabled=False)).settle(skipped=False)
    assert Scaling().scale is None


@pytest.mark.parametrize("start", [2.0**127, 3.0, 1e-3])
def test_the_scale_moves_as_torch_moves_it(start):
    ours, theirs = (GradScaler("cpu", init_scale=start, growth_interval=2, growth_factor=1.7) for _ in range(2))
    theirs.scale(torch.zeros(()))
    for bad in (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0):
        Scaling(ours).settle(skipped=bool(bad))
        torch._amp_update_scale_(theirs._scale, theirs._growth_tracker, torch.tensor(float(bad)), 1.7, 0.5, 2)
        assert ours.state_dict() == theirs.state_dict()


def test_mistakes_are_one_sentence():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network().half()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(evenstep.ConfigError, match=r"scaler is a int; expected a torch\.amp\.GradScaler"):
            run.step(batch(0), lambda part: model(part[0].half()).mean(), scaler=3)
        with pytest.raises(evenstep.UnsupportedError, match=r"parameters in float16.*torch\.autocast"):
            run.step(batch(0), lambda part: model(part[0].half()).mean(), scaler=GradScaler("cpu"))


SCRIPT = """
    import torch
    import evenstep

    with evenstep.Run(shards=4) as run:
        model = torch.nn.Linear(6, 3)
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
        for _ in range(8):
            run.step(torch.arange(66.0).reshape(11, 6), lambda part: model(part).square().mean(), scaler=scaler)
        run.print("scale", scaler.state_dict())
"""


def test_whoever_takes_over_has_the_scale_too(script, tmp_path):
    path = script(SCRIPT)
    undisturbed = cli_run("run", "-n", "1", path)
    assert undisturbed.code == 0, undisturbed.stderr
    killed = cli_run("run", "-n", "3", path, variables=plant([Fault("kill", "forward", 5)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert killed.stdout == undisturbed.stdout
