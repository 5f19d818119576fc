"""Figures come out of the journal: every committed step once, and none that an earlier process has shown."""

import torch

import evenstep
from evenstep.exchange.figures import LOGGED, Figures, StepFigures
from evenstep.exchange.journal import Entry, Journal


def step(number, loss, **logged):
    return Entry(f"step {number}", [loss, {"hits": 0.5}, None, [], [], False], aside={"samples": 22, "logged": logged})


def found(run, number, loss, **logged):
    return StepFigures(run, number, loss, {"hits": 0.5}, 22, None, logged)


def test_steps_are_read_once_as_they_are_committed(new_segment):
    segment = new_segment(1)
    journal, figures = Journal(segment), Figures(segment)
    for entry in (Entry("join", {}), step(0, 2.0), Entry("evaluate", {"step 1": 3}), step(1, 1.0, lr=0.1)):
        journal.append(entry)
    assert list(figures.news(3)) == [found(1, 1, 2.0)]
    assert list(figures.news()) == [found(1, 2, 1.0, lr=0.1)]
    assert list(figures.news()) == []
    journal.append(Entry(LOGGED, [2, {"accuracy": 0.9}]))
    journal.append(Entry("join", {}))
    journal.append(step(0, 5.0))
    assert list(figures.news()) == [StepFigures(1, 2, None, {}, 0, None, {"accuracy": 0.9}), found(2, 1, 5.0)]


def test_what_a_checkpoint_brings_was_shown_when_it_was_done(new_segment):
    segment = new_segment(1)
    journal = Journal(segment)
    journal.append(Entry("join", {}))
    past = [step(0, 2.0), Entry("checkpoint", {"run": "x", "from": None}), step(1, 1.0)]
    journal.append(Entry("checkpoint", {"run": "x", "from": {"entries": len(past)}}, followers=past))
    journal.append(step(2, 0.5))
    assert list(Figures(segment).news()) == [found(1, 3, 0.5)]


def test_a_run_writes_what_its_steps_gave(tmp_path):
    def train(directory, steps, *, resume):
        with evenstep.Run(shards=2, quiet=True) as run:
            net = torch.nn.Linear(3, 1)
            net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
            run.checkpoint(directory, every=2, resume=resume)
            figures, losses = Figures(run._ledger.group.segment), []
            for number in range(steps):
                run.log("number", number)
                run.log("number", number + 1)
                loss, metrics = run.step(
                    torch.ones(4, 3) * number,
                    lambda part: (net(part).pow(2).mean(), {"sum": part.sum(1)}),
                    clip_norm=1.0,
                )
                losses.append((1, number + 1, float(loss), metrics, 4, run.grad_norm, {"number": number + 0.5}))
            return list(figures.news()), losses

    seen, losses = train(tmp_path, 4, resume=False)
    assert seen == losses
    seen, losses = train(tmp_path, 6, resume=True)
    assert seen == losses[4:], "the first four were seen then"
