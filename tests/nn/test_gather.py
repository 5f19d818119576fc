"""Losses over the whole batch: those of plain torch, and the same bits on every number of workers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_outcomes, run_workers


class Pair(nn.Module):
    """Two encoders whose outputs shall agree, as in CLIP."""

    def __init__(self, norm=False):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 5))
        self.text = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, part):
        return F.normalize(self.image(part[0])), F.normalize(self.text(part[1]))


def contrast(model, a, b, all_a, all_b, rows):
    labels = torch.arange(rows.start, rows.stop)
    one, two = model.scale * a @ all_b.T, model.scale * b @ all_a.T
    return (F.cross_entropy(one, labels) + F.cross_entropy(two, labels)) / 2


def data(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 6, generator=generator).double(), torch.randn(count, 4, generator=generator).double()


def train(sizes=(13, 13, 5), shards=4, *, norm=False, steps=None):
    with evenstep.Run(shards=shards, seed=1, quiet=True) as run:
        model = Pair(norm).double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))

        def function(part):
            a, b = model(part)
            return contrast(model, a, b, run.gather(a), run.gather(b), run.rows)

        losses = [float(run.step(data(size), function)) for size in sizes]
        return run.fingerprint(), losses, {name: t.clone() for name, t in model.state_dict().items()}


def plain(sizes=(13, 13, 5), *, norm=False):
    torch.manual_seed(1)
    model = Pair(norm).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    losses = []
    for size in sizes:
        optimizer.zero_grad()
        a, b = model(data(size))
        loss = contrast(model, a, b, a, b, range(size))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "beside batch norm"])
@pytest.mark.parametrize("shards", [1, 4, 7])
def test_a_contrastive_loss_is_that_of_plain_torch_over_the_whole_batch(shards, norm):
    _, losses, found = train(shards=shards, norm=norm)
    expected, state = plain(norm=norm)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-11)
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "beside batch norm"])
def test_every_number_of_workers_ends_on_the_same_bits(norm):
    alone = train(shards=5, norm=norm)[:2]
    for count in (2, 3, 5):
        assert [found[:2] for found in run_workers(count, lambda _: train(shards=5, norm=norm))] == [alone] * count


def test_rows_come_in_order_and_gradients_go_back_to_whoever_gave_them():
    seen = []
    with evenstep.Run(shards=4, quiet=True) as run:
        model = nn.Linear(1, 1, bias=False)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        before = model.weight.item()

        def function(part):
            whole = run.gather(part)
            seen.append((run.rows, whole[:, 0].tolist()))
            with torch.no_grad():
                assert not run.gather(part).requires_grad
            mine = model.weight[0] * part
            # only the last shard uses the rows of the first: the gradient comes back from there
            everyone = run.gather(mine)
            used = everyone[0, 0] if run.rows.start == 8 else 0 * mine.sum()
            return used * 10 / len(part)

        run.step(torch.arange(10.0).reshape(10, 1) + 1, function)
        assert [rows for rows, _ in seen[-4:]] == [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
        assert all(values == [float(n + 1) for n in range(10)] for _, values in seen)
        assert model.weight.item() == pytest.approx(before - 1.0)


def test_a_step_function_begins_again_when_it_is_first_seen_to_meet_others():
    calls = []
    with evenstep.Run(shards=2, quiet=True) as run:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

        def function(part):
            drawn = torch.rand(())
            calls.append((run.rows.start, float(drawn)))
            return run.gather(model(part)).square().mean()

        for _ in range(2):
            run.step(torch.ones(4, 2), function)
    assert [start for start, _ in calls] == [0, 0, 2, 0, 2]
    assert calls[0] == calls[1], "with the same random numbers"


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            lambda run, part: run.gather(part[:, : 1 + run.rows.start]),
            r"torch.float32 \(4, 5\) in shard 1 but .* \(4, 1\)",
        ),
        (lambda run, part: run.gather(3.0), r"run.gather got 3.0; expected a tensor"),
        (lambda run, part: run.gather(part.sum()), r"expected a tensor with a row for each sample"),
        (
            lambda run, part: run.gather(part) if run.rows.start else part,
            r"shard 1 wants|but shard 0 ended without that",
        ),
    ],
)
def test_mistakes_are_one_sentence(act, said):
    with evenstep.Run(shards=2, quiet=True) as run:
        model = nn.Linear(6, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(evenstep.EvenstepError, match=said):
            run.step(torch.ones(8, 6), lambda part: model(part).mean() + act(run, part).mean())
        with pytest.raises(evenstep.ConfigError, match="outside a step function"):
            run.gather(torch.ones(2))
        with pytest.raises(evenstep.ConfigError, match="outside a step function"):
            _ = run.rows


def test_shards_that_gather_differently_are_told_so():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = nn.Linear(6, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            again = (lambda x: run.gather(x)) if worker else (lambda x: x)
            run.step(torch.ones(8, 6), lambda part: again(run.gather(model(part))).mean())

    outcomes = run_outcomes(2, body)
    assert {o.kind for o in outcomes} <= {"MismatchError", "PeerError"}
    assert all("gather call 1" in o.text for o in outcomes)


CLIP = """
    import torch
    import torch.nn.functional as F
    import evenstep

    with evenstep.Run(shards=4) as run:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 5))
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 0.01))

        def function(part):
            a = F.normalize(model(part))
            return F.cross_entropy(a @ run.gather(a).T / 0.1, torch.tensor(list(run.rows)))

        for _ in range(8):
            run.step(torch.arange(66.0).reshape(11, 6).sin(), function)
"""


def test_a_worker_that_dies_in_between_changes_nothing(script, tmp_path):
    path = script(CLIP)
    undisturbed = cli_run("run", "-n", "1", path)
    assert undisturbed.code == 0, undisturbed.stderr
    for count, place in (("3", "backward"), ("2", "exchange")):
        faults = tmp_path / place
        killed = cli_run("run", "-n", count, path, variables=plant([Fault("kill", place, 4)], faults))
        assert struck(faults) == [0]
        assert killed.stdout == undisturbed.stdout


def test_a_function_that_begins_once_more_finds_its_samples_as_they_were():
    def fingerprint(twice):
        with evenstep.Run(shards=4, seed=1, quiet=True) as run:
            model = nn.Linear(6, 5).double()
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.3))

            def function(part):
                found = model(twice(part[0]))
                return F.cross_entropy(found @ run.gather(found).T, torch.arange(run.rows.start, run.rows.stop))

            run.step(next(iter(run.batches(torch.utils.data.TensorDataset(data(12)[0]), 12, shuffle=False))), function)
            return run.fingerprint()

    assert fingerprint(lambda x: x.mul_(2)) == fingerprint(lambda x: x * 2)
