"""The time of a step is cut into computing, waiting and updating, and recorded only for steps that this worker did."""

from types import SimpleNamespace

import pytest

from evenstep.engine import stopwatch
from evenstep.engine.stopwatch import Stopwatch
from evenstep.exchange.board import Spent


class Board:
    def __init__(self):
        self.spent = []

    def spend(self, worker, spent):
        self.spent.append((worker, spent))


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def group(clock):
    def passes(seconds, *, waiting=False):
        clock.now += seconds
        group.waited_s += seconds if waiting else 0.0

    group = SimpleNamespace(worker=3, waited_s=7.0, board=Board(), passes=passes)
    return group


def test_waits_are_no_part_of_computing_and_what_is_computed_twice_counts_twice(group):
    watch = Stopwatch(group)
    with watch.step(lambda: True):
        group.passes(1.0)
        for _ in range(2):
            with watch.computing() as lap:
                group.passes(2.0)
                group.passes(0.5, waiting=True)
            assert lap.seconds == 2.0
        group.passes(0.25, waiting=True)
        with watch.updating():
            group.passes(3.0)
    assert group.board.spent == [(3, Spent(compute_s=4.0, wait_s=1.25, update_s=3.0, steps_s=9.25))]


def test_a_step_begins_from_nothing(group):
    watch = Stopwatch(group)
    for seconds in (5.0, 1.0):
        with watch.step(lambda: True), watch.computing():
            group.passes(seconds)
    assert [spent.compute_s for _, spent in group.board.spent] == [5.0, 1.0]


def test_a_step_that_others_did_is_not_recorded(group):
    watch = Stopwatch(group)
    with watch.step(lambda: False), watch.computing():
        group.passes(1.0)
    assert group.board.spent == []


def test_a_step_that_fails_is_not_recorded(group):
    watch = Stopwatch(group)

    def step():
        with watch.step(lambda: True), watch.computing():
            group.passes(1.0)
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        step()
    assert group.board.spent == []
