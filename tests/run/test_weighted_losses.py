"""Means over something else than rows: as plain torch on the whole batch, however it is cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.engine.results import Mean
from workers import run_workers

IGNORED = -100


def language_model(*, norm: bool = False) -> nn.Module:
    middle = nn.BatchNorm1d(5) if norm else nn.Identity()
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), middle, nn.Tanh(), nn.Linear(6, 11)).double()


def batch(rows: int = 13, *, labelled: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randint(0, 11, (rows, 5), generator=generator)
    targets = torch.randint(0, 11, (rows, 5), generator=generator)
    targets[torch.rand(rows, 5, generator=generator) > labelled] = IGNORED
    targets[:3] = IGNORED  # whole parts without a label
    return inputs, targets


def mean_loss(model, part):
    inputs, targets = part
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def of_tokens(model, part):
    return evenstep.Loss(mean_loss(model, part), weight=(part[1] != IGNORED).sum())


def total_of_tokens(model, part):
    inputs, targets = part
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return evenstep.Loss(total=total, weight=int((targets != IGNORED).sum()))


def trained(function, shards, steps=3, *, norm=False, clip_norm=None):
    with evenstep.Run(shards=shards, quiet=True) as run:
        torch.manual_seed(1)
        model = language_model(norm=norm)
        model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        seen = [
            float(run.step(batch(13 + n), lambda part: function(model, part), clip_norm=clip_norm))
            for n in range(steps)
        ]
        return seen, run.fingerprint(), torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def plain(steps=3, *, norm=False, clip_norm=None):
    torch.manual_seed(1)
    model, seen = language_model(norm=norm), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for n in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(model, batch(13 + n))
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        seen.append(loss.item())
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("function", [of_tokens, total_of_tokens])
@pytest.mark.parametrize("options", [{}, {"norm": True}, {"clip_norm": 0.1}], ids=["plain", "norm", "clipped"])
def test_it_is_the_masked_mean_of_plain_torch(function, options):
    losses, _, weights = trained(function, 8, **options)
    expected, theirs = plain(**options)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(weights, theirs, rtol=1e-10, atol=1e-12)


def test_every_number_of_workers_ends_on_the_same_bits():
    def body(worker):
        return trained(of_tokens, 8, norm=True)[:2]

    alone = trained(of_tokens, 8, norm=True)[:2]
    assert run_workers(3, body) == [alone] * 3


def test_weights_by_rows_are_what_a_plain_loss_has():
    weighted = trained(lambda model, part: evenstep.Loss(_of_rows(model, part), weight=len(part[0])), 4)
    assert weighted[0] == pytest.approx(trained(_of_rows, 4)[0], rel=1e-12)


def _of_rows(model, part):
    return model(part[0]).square().mean()


def test_a_bare_mean_over_no_labels_says_what_to_do_once():
    with pytest.warns(UserWarning, match=r"in step 0 the loss of shard 0 is not a number.*evenstep\.Loss") as said:
        losses = trained(mean_loss, 8)[0]
    assert all(loss != loss for loss in losses)
    assert len(said) == 1


def test_a_batch_without_any_label_changes_nothing():
    with evenstep.Run(shards=4, quiet=True) as run:
        model = language_model()
        model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1))
        before = run.fingerprint()
        for function in (of_tokens, total_of_tokens):
            loss = run.step(batch(labelled=0.0), lambda part, function=function: function(model, part))
            assert torch.isnan(loss)
        assert run.fingerprint() == before


def test_metrics_may_be_weighted_too_in_steps_and_evaluation():
    inputs, targets = batch(17)

    def metrics(part):
        labelled = part[1] != IGNORED
        hits = (part[0] == part[1])[labelled].sum()
        return {"hits": evenstep.Loss(total=hits, weight=labelled.sum()), "rows": part[0][:, 0]}

    with evenstep.Run(shards=4, quiet=True) as run:
        model = language_model()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        _, seen = run.step((inputs, targets), lambda part: (of_tokens(model, part), metrics(part)))
        scores = run.evaluate(torch.utils.data.TensorDataset(inputs, targets), batch_size=5, metrics=metrics)
    labelled = targets != IGNORED
    expected = {
        "hits": float((inputs == targets)[labelled].double().mean()),
        "rows": float(inputs[:, 0].double().mean()),
    }
    assert seen == pytest.approx(expected)
    assert scores == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: evenstep.Loss(weight=1), "a mean or a total"),
        (lambda: evenstep.Loss(1.0, total=2.0, weight=1), "a mean or a total"),
        (lambda: Mean.of("a", evenstep.Loss(1.0, weight=-1), 1), "at least 0"),
        (lambda: Mean.of("a", evenstep.Loss(1.0, weight=float("nan")), 1), "at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, sentence):
    with pytest.raises(evenstep.ConfigError, match=sentence):
        make()


def test_parts_must_agree_whether_they_are_weighted():
    with evenstep.Run(shards=8, quiet=True) as run:
        model = language_model()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def sometimes(part):
            return of_tokens(model, part) if (part[1] != IGNORED).any() else model(part[0]).mean()

        with pytest.raises(evenstep.ConfigError, match=r"an evenstep\.Loss in shard \d but a plain loss in shard 0"):
            run.step(batch(), sometimes)
