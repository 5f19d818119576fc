"""In a plain run the workers' own optimizer makes the updates, and everything can be done."""

from typing import get_args

import torch
from fakes import together
from torch import nn

from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Work
from evenstep.engine.reports import Report
from evenstep.engine.updates import Feature, OwnUpdates, Updates, share_among


def work(prepared=None, version=5):
    return Work(version, version, {}, [1, 1, 1, 1], "batch 5", lambda part: part, prepared, Clipping())


def test_everything_can_be_done(groups_of):
    updates = OwnUpdates(*groups_of(1))
    for feature in get_args(Feature):
        updates.refuse(feature)
    updates.admit(nn.Linear(1, 1), None)


def test_it_trains_on_all_shards_of_every_batch(groups_of):
    updates = OwnUpdates(*groups_of(1))
    samples = object()
    assert updates.shards is None
    assert updates.begin(samples, Clipping(norm=1.0)) is samples
    assert [updates.number_of(version) for version in range(3)] == [0, 1, 2]


def test_owners_update_by_the_optimizer_that_was_prepared(holdings_of):
    (holdings,) = holdings_of()
    updates = OwnUpdates(holdings.group)
    model = nn.Linear(2, 1, bias=False)
    holdings.models.bind(holdings.models.add(model))
    with torch.no_grad():
        model.weight.fill_(1.0)
    prepared = holdings.add(torch.optim.SGD(model.parameters(), 0.5))
    prepared.gradients.plan, _ = updates.lay_out(prepared, [(0, 4)])
    assert updates.update(work(prepared), {0: torch.tensor([[1.0, 2.0]])}) == []
    assert model.weight.tolist() == [[0.5, 0.0]]


def test_every_worker_gets_the_reports_of_all_in_order(groups_of):
    groups = groups_of(3)

    def body(group):
        return share_among(group, work(), Report(group.worker, {"batch": [4]}, {}, {}, 0.5))

    for reports in together(groups, body):
        assert [report.worker for report in reports] == [0, 1, 2]


def test_recovering_finds_nothing_under_way(groups_of):
    updates = OwnUpdates(*groups_of(1))
    with updates.recovery():
        updates.abandon()
    updates.finish()
    updates.close()


def test_it_is_an_updates():
    verbs = {name for name in vars(Updates) if not name.startswith("_")}
    assert verbs <= vars(OwnUpdates).keys()
