"""Shards are shared out evenly, or as the user says, or away from who is slow; all workers decide alike."""

import pytest
import torch
from fakes import FakeFixed, FakeRounds, Table
from torch import nn

from evenstep.engine.context import Context
from evenstep.engine.pace import _WINDOW
from evenstep.engine.sharing import Sharing
from evenstep.engine.updates import OwnUpdates
from evenstep.exchange.generations import Generation
from evenstep.exchange.group import Group


class Some(OwnUpdates):
    """Others train on the shards that are not here."""

    shards = (1, 3)


def shared(holdings, updates=OwnUpdates):
    context = Context(holdings.group, 0)
    return Sharing(holdings, updates(holdings.group), context), context


def test_every_worker_has_its_part_and_all_know_all(holdings_of):
    for rank, holdings in enumerate(holdings_of(3)):
        sharing, context = shared(holdings)
        assert sharing.spans == sharing.evaluated == context.spans == [(0, 2), (2, 3), (3, 4)]
        assert sharing.mine == range(*sharing.spans[rank])


def test_a_worker_that_trains_on_some_shards_evaluates_all(holdings_of):
    (holdings,) = holdings_of()
    sharing, _ = shared(holdings, Some)
    assert sharing.spans == [(1, 3)]
    assert sharing.mine == range(1, 3)
    assert sharing.evaluated == [(0, 4)]
    sharing.keep_pace([1.0])
    assert sharing.spans == [(1, 3)]


def test_gradients_are_laid_out_anew_for_everyone(holdings_of):
    first, _ = holdings_of(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first.models.add(model)
    prepared = first.add(torch.optim.SGD(model.parameters(), 0.1))
    sharing, _ = shared(first)
    assert prepared.gradients.plan.leaves.shards == range(0, 2)
    sharing.replan([(0, 1), (1, 4)])
    assert prepared.gradients.plan.leaves.shards == range(0, 1)
    assert sharing.mine == range(0, 1)


def test_shards_move_away_from_a_worker_that_is_clearly_slower_and_one_line_says_so(holdings_of):
    workers = holdings_of(2, shards=8)
    told = []
    for holdings in workers:
        holdings.group.tell = told.append
        sharing, _ = shared(holdings)
        for _ in range(_WINDOW):
            assert sharing.spans == [(0, 4), (4, 8)]
            sharing.keep_pace([0.4, 1.6])
        assert sharing.spans == [(0, 6), (6, 8)]
    assert [event["slow"] for event in told] == [
        "shards move to faster workers: worker 0: 0.400 s for 4 shards, now 6; worker 1: 1.600 s for 4 shards, now 2"
    ]


def test_who_left_and_what_the_user_shared_out_stays_as_it_is(holdings_of):
    holdings = holdings_of(2, shards=8)[0]
    sharing, _ = shared(holdings)
    holdings.group.left = True
    for _ in range(_WINDOW):
        sharing.keep_pace([0.4, 1.6])
    assert sharing.spans == [(0, 4), (4, 8)]


@pytest.mark.parametrize(("weights", "spans"), [([3.0, 1.0], [(0, 3), (3, 4)]), ([1.0, 1.0], [(0, 2), (2, 4)])])
def test_weights_of_the_user_decide(holdings_of, weights, spans):
    (holdings,) = holdings_of(1)
    membership = FakeFixed(2)
    membership.first = Generation(1, 0, [0, 1], weights)
    holdings.group = Group(holdings.group.segment, FakeRounds(Table(), 0), membership)
    sharing, _ = shared(holdings)
    assert sharing.spans == spans
    for _ in range(_WINDOW):
        sharing.keep_pace([0.4, 1.6])
    assert sharing.spans == spans


def test_a_keeper_has_no_shard_unless_it_is_alone_and_paces_are_those_of_the_others(holdings_of):
    (holdings,) = holdings_of(1, shards=8)
    for members, machines, spans in (
        ([0, 3, 4], [0, 1, 2], [(0, 0), (0, 4), (4, 8)]),
        ([0, 1, 4], [0, 0, 2], [(0, 0), (0, 4), (4, 8)]),
        ([0], [0], [(0, 8)]),
    ):
        membership = FakeFixed(len(members))
        membership.first = Generation(1, 0, members, None, machines=machines, keeper=True)
        holdings.group = Group(holdings.group.segment, FakeRounds(Table(), 0), membership)
        holdings.group.tell = lambda event: None
        sharing, _ = shared(holdings)
        assert sharing.spans == spans
        for _ in range(_WINDOW):
            sharing.keep_pace([0.0, 0.4, 1.6][: len(members)])
        assert sharing.spans == ([(0, 0), (0, 6), (6, 8)] if len(members) > 1 else spans)


@pytest.mark.parametrize("machines", [[0, 0, 0], [0, 0, 1]])
def test_what_is_prepared_by_a_worker_that_was_let_in_but_has_to_catch_up_is_laid_out_later(holdings_of, machines):
    (holdings,) = holdings_of(1)
    sharing, _ = shared(holdings)
    model = nn.Linear(3, 3)
    holdings.models.add(model)
    prepared = holdings.add(torch.optim.SGD(model.parameters(), 0.1))
    group = holdings.group
    group.worker = 2
    group._take(Generation(2, 0, [0, 1, 2], None, machines=machines))
    sharing.lay_out(prepared)
    holdings.settle()
    assert sharing.mine == range(0)
    if machines == [0, 0, 0]:  # beyond that, there is no way to another machine here
        sharing.replan()
        assert prepared.gradients.plan.leaves.shards == range(3, 4)
