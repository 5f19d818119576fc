"""A loss that is a sum over the batch trains as in plain torch, whatever the parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from workers import run_workers


def batch(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 4, generator=generator).double(), torch.randn(count, 2, generator=generator).double()


def train(_=None, shards=4, **options):
    with evenstep.Run(shards=shards, seed=2, quiet=True) as run:
        model = nn.Linear(4, 2).double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))

        def function(part):
            error = F.mse_loss(model(part[0]), part[1], reduction="sum")
            return error, {"error": error.detach() / len(part[0])}

        seen = [run.step(batch(count), function, reduction="sum", **options) for count in (13, 5, 3)]
        values = {name: t.clone() for name, t in model.state_dict().items()}
        return run.fingerprint(), [(float(loss), metrics["error"]) for loss, metrics in seen], values


def test_a_sum_is_that_of_plain_torch():
    _, seen, found = train(clip_norm=3.0)
    torch.manual_seed(2)
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for count, (loss, error) in zip((13, 5, 3), seen, strict=True):
        optimizer.zero_grad()
        x, y = batch(count)
        expected = F.mse_loss(model(x), y, reduction="sum")
        expected.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert error == pytest.approx(expected.item() / count, rel=1e-12)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_sum_is_the_same_on_every_number_of_workers():
    assert run_workers(3, lambda _: train()[:2]) == [train()[:2]] * 3


@pytest.mark.parametrize(
    ("reduction", "function", "said"),
    [
        ("sum", lambda out: evenstep.Loss(out.mean(), weight=2), r"returned an evenstep.Loss.*leave one of them out"),
        ("max", lambda out: out.mean(), r"reduction='max', expected 'mean' or 'sum'"),
        ("sum", lambda out: out, r"expected the mean loss of its part"),
    ],
)
def test_what_contradicts_itself_is_said(reduction, function, said):
    with evenstep.Run(shards=2, quiet=True) as run:
        model = nn.Linear(4, 2).double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(evenstep.ConfigError, match=said):
            run.step(batch(4), lambda part: function(model(part[0])), reduction=reduction)
