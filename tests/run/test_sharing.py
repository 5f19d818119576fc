"""What one worker does for all, what every part gives, what parts note, and epochs that the script counts."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_outcomes, run_workers

DATA = TensorDataset(torch.arange(11.0).unsqueeze(1))


def prepared(run):
    model = nn.Linear(1, 1)
    return run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


# ---- once ----


def test_once_is_done_by_one_worker_and_its_result_is_everyones(tmp_path):
    def body(worker):
        with evenstep.Run(shards=3, quiet=True) as run:
            found = run.once(lambda: (tmp_path / "calls").open("a").write(f"{worker} ") and {"who": worker})
            return found, (tmp_path / "calls").read_text()

    assert run_workers(3, body) == [({"who": 0}, "0 ")] * 3


def test_what_is_drawn_in_once_and_in_an_exchange_does_not_depend_on_the_number_of_workers():
    def body(_):
        with evenstep.Run(shards=3, quiet=True) as run:
            once = [run.once(lambda: [torch.rand(1).item(), random.random()]) for _ in range(2)]
            sums = [run.exchange("drawn", lambda shard: torch.rand(2)).tolist() for _ in range(2)]
            return once, sums, torch.rand(1).item(), random.random()

    (alone,) = run_workers(1, body)
    assert run_workers(2, body) == [alone, alone]
    assert alone[0][0] != alone[0][1]
    assert alone[1][0] != alone[1][1]


def test_an_error_of_once_reaches_all_workers():
    def body(_):
        with evenstep.Run(shards=2, quiet=True) as run:
            run.once(lambda: 1 / 0)

    outcomes = run_outcomes(2, body)
    assert {outcome.kind for outcome in outcomes} == {"ZeroDivisionError", "PeerError"}


REPLAYED = """
    import time
    from pathlib import Path
    import torch
    from torch.utils.data import TensorDataset
    import evenstep

    here = Path(__file__).parent
    with evenstep.Run(shards=4) as run:
        model, optimizer = torch.nn.Linear(1, 1), None
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        data = TensorDataset(torch.arange(11.0).unsqueeze(1))
        seen = []
        train, test = run.batches(data, 4), run.batches(data, 6, shuffle=False, train=False)
        for epoch in range(3):
            for batch in train.at(epoch):
                note = lambda part: {"ids": evenstep.Note(part[0].tolist())}
                _, found = run.step(batch, lambda part: (model(part[0]).mean(), note(part)))
                seen.append(found["ids"])
            at = run.once(lambda: (here / "log").open("a").write(f"{epoch}") and time.monotonic())
            seen.append([run.collect(batch, lambda part: {"out": model(part[0]).mean()}) for batch in test])
        run.print(epoch, at > 0, seen)
"""


def test_whoever_is_replaced_gets_what_was_done_once_and_collected_then(script, tmp_path):
    path = script(REPLAYED)
    undisturbed = cli_run("run", "-n", "1", path)
    assert undisturbed.code == 0, undisturbed.stderr
    assert (tmp_path / "log").read_text() == "012"
    for worker in (0, 1):
        folder = tmp_path / f"faults{worker}"
        (tmp_path / "log").write_text("")
        killed = cli_run("run", "-n", "3", path, variables=plant([Fault("kill", "step begins", 5, worker)], folder))
        assert struck(folder) == [0], killed.stderr
        assert killed.stdout == undisturbed.stdout, killed.stderr
        assert (tmp_path / "log").read_text() == "012", "what was done stays done"


# ---- collect ----


def collected(_=0):
    with evenstep.Run(shards=4, quiet=True) as run:
        model, _ = prepared(run)
        model.train()
        found = []
        for batch in run.batches(DATA, 6, shuffle=False, train=False):
            found += run.collect(batch, lambda part: (len(part[0]), part[0], model.training, torch.is_grad_enabled()))
        return [[size, rows.flatten().tolist(), *rest] for size, rows, *rest in found]


def test_every_part_is_collected_in_order_on_every_number_of_workers():
    expected = collected()
    assert [row for _, rows, *_ in expected for row in rows] == list(range(11))
    assert [size for size, *_ in expected] == [2, 2, 1, 1, 2, 1, 1, 1]
    assert all(rest == [False, False] for *_, rest in ([0, row[2:]] for row in expected))
    for num_workers in (2, 3):
        assert run_workers(num_workers, collected) == [expected] * num_workers


def test_a_whole_batch_is_collected_too_and_compared():
    def body(worker):
        with evenstep.Run(shards=2, quiet=True) as run:
            same = run.collect(torch.arange(4), lambda part: part)
            run.collect(torch.arange(4) + worker, lambda part: part)
            return same

    outcomes = run_outcomes(2, body)
    assert {outcome.kind for outcome in outcomes} == {"MismatchError"}
    assert "came with another batch" in outcomes[0].text


def test_workers_that_collect_from_different_batches_are_told_so():
    def body(worker):
        with evenstep.Run(shards=2, quiet=True) as run:
            prepared(run)
            batches = list(run.batches(DATA, 6, shuffle=False, train=False))
            run.collect(batches[worker], lambda part: part)

    text = run_outcomes(2, body)[0].text
    assert "worker 1 collects from epoch 0 batch 1" in text
    assert "parts of [3, 2] samples" in text


def test_batches_that_are_not_trained_on_are_no_epochs_of_the_run():
    with evenstep.Run(shards=2, quiet=True) as run:
        prepared(run)
        train, test = run.batches(DATA, 6), run.batches(DATA, 6, train=False)
        assert len(test) == 2
        assert [batch.position.epoch for batch in test] == [0, 0]
        assert [batch.position.epoch for batch in test] == [1, 1]
        assert [batch.position.epoch for batch in train] == [0, 0]


# ---- notes ----


def test_notes_of_all_parts_come_to_every_worker_in_their_order():
    def body(_):
        with evenstep.Run(shards=4, quiet=True) as run:
            model, _ = prepared(run)
            batch = torch.arange(6.0).unsqueeze(1)
            _, metrics = run.step(
                batch, lambda part: (model(part).mean(), {"rows": evenstep.Note(part.flatten().tolist()), "one": 1.0})
            )
            return metrics, run.metrics()

    expected = {"one": 1.0, "rows": [[0, 1], [2, 3], [4], [5]]}
    for found, means in [*run_workers(1, body), *run_workers(3, body)]:
        assert found == expected
        assert means.keys() == {"loss", "one"}, "a note has no mean"


def step_noting(value):
    with evenstep.Run(shards=2, quiet=True) as run:
        model, _ = prepared(run)
        run.step(torch.ones(4, 1), lambda part: (model(part).mean(), value(part)))


def test_a_note_that_is_not_plain_is_refused():
    with pytest.raises(evenstep.ConfigError, match=r"note 'x' cannot be sent .* such as tensor\.tolist\(\)"):
        step_noting(lambda part: {"x": evenstep.Note(part)})


def test_a_note_in_some_parts_only_is_refused():
    calls = []

    def sometimes(_):
        calls.append(0)
        return {"x": evenstep.Note(1)} if len(calls) == 1 else {"x": 1.0}

    with pytest.raises(evenstep.ConfigError, match=r"metrics \['x'\] in shard 1 but \['x \(a note\)'\] in shard 0"):
        step_noting(sometimes)


# ---- epochs and steps that the script counts ----


def samples_of(batches):
    return [batch.part(shard)[0].flatten().tolist() for batch in batches for shard in range(2)]


def test_an_epoch_can_be_gone_through_from_the_middle():
    with evenstep.Run(shards=2, quiet=True) as run:
        prepared(run)
        batches = run.batches(DATA, 4)
        epochs = [samples_of(batches) for _ in range(3)]
        assert samples_of(batches.at(1)) == epochs[1]
        assert samples_of(batches.at(2, 1)) == epochs[2][2:]
        assert samples_of(batches) == samples_of(batches.at(3))


def test_steps_can_be_counted_on_from_a_checkpoint_of_the_scripts_own():
    def drawn(first, count):
        with evenstep.Run(shards=2, quiet=True) as run:
            model, _ = prepared(run)
            run.count_from(first)
            batch = torch.ones(4, 1)
            found = [run.step(batch, lambda part: model(part).mean() * 0 + torch.rand(())) for _ in range(count)]
            assert run.version == first + count
            return [float(loss) for loss in found]

    assert drawn(0, 4)[2:] == drawn(2, 2)


def test_steps_are_counted_from_a_number_before_the_first_only():
    with evenstep.Run(shards=2, quiet=True) as run:
        model, _ = prepared(run)
        run.step(torch.ones(4, 1), lambda part: model(part).mean())
        with pytest.raises(evenstep.ConfigError, match=r"count_from\(7\) after 1 steps"):
            run.count_from(7)


# ---- a weighted loss whose part is the whole batch ----


@pytest.mark.parametrize("kind", ["mean", "total"])
def test_the_weighted_loss_of_one_part_trains_as_plain_torch_to_the_bit(kind):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(7, 3, generator=generator), torch.randn(7, 1, generator=generator)
    weight = 5.0

    def total(model):
        return ((model(inputs) - targets)[:5] ** 2).sum()

    def train(step, model):
        for _ in range(4):
            step(model)
        return model.weight.detach().clone()

    torch.manual_seed(0)
    plain = nn.Linear(3, 1)
    twin = nn.Linear(3, 1)
    twin.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), 0.05)

    def plainly(model):
        optimizer.zero_grad()
        (total(model) / weight).backward()
        optimizer.step()

    expected = train(plainly, plain)
    with evenstep.Run(shards=1, quiet=True) as run:
        run.prepare(twin, torch.optim.SGD(twin.parameters(), 0.05))

        def loss(_):
            if kind == "total":
                return evenstep.Loss(total=total(twin), weight=weight)
            return evenstep.Loss(total(twin) / weight, weight=torch.tensor(weight))

        assert torch.equal(train(lambda _: run.step(inputs, loss), twin), expected)
