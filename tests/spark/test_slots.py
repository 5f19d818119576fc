"""Waiting for slots: what the user is told, when the run begins with fewer workers, and when it is given up."""

from types import SimpleNamespace

import pytest

pytest.importorskip("pyspark", reason="Spark is not there: pip install 'evenstep[spark]'")
from evenstep.core.errors import ConfigError, SilenceError
from evenstep.spark import slots


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(slots, "time", found := Clock())
    return found


def waiting(least, awaited, running, timeout_s=60.0):
    """Who looks, and what comes of it: the sentences, and how many workers the head was told to wait for."""
    said, told = [], []
    head = SimpleNamespace(has_begun=False, wait_for=lambda count: told.append(count) or len(told) > 1)
    stage = SimpleNamespace(running=lambda: running)
    view = SimpleNamespace(warn=said.append)
    return slots.FirstWorkers(head, stage, least, awaited, timeout_s, view), head, said, told


def look_for(clock, first, seconds):
    for _ in range(int(seconds / 0.25)):
        clock.sleep(0.25)
        first.look()


def test_slots_that_others_have_are_one_sentence_and_in_the_end_an_error(clock):
    first, _, said, told = waiting(2, 2, (1, 3))
    look_for(clock, first, 4.0)
    assert said == [], "at first, everybody waits"
    look_for(clock, first, 50.0)
    lack = "workers asked for: 2, with a task slot: 1, slots that other jobs of the application have: 3"
    assert said == [f"{lack}; waiting for up to 60 s"]
    assert told == []
    with pytest.raises(SilenceError, match=f"the first workers did not start within 60 s: {lack}; wait for other"):
        look_for(clock, first, 10.0)


def test_a_run_that_has_enough_begins_without_those_who_have_no_slot(clock):
    first, head, said, told = waiting(1, 4, (2, 2))
    look_for(clock, first, 8.0)
    assert (said, told) == ([], [2, 2]), "said again to a head that has not heard it"
    head.has_begun = True
    look_for(clock, first, 200.0)


def test_a_task_that_has_its_slot_may_take_its_time_but_not_for_ever(clock):
    first, _, said, told = waiting(2, 2, (2, 0), timeout_s=20.0)
    look_for(clock, first, 19.0)
    assert (said, told) == ([], [])
    with pytest.raises(SilenceError, match="did not start within 20 s"):
        look_for(clock, first, 3.0)


def application(num_slots, **options):
    inner = SimpleNamespace(
        maxNumConcurrentTasks=lambda profile: num_slots,
        resourceProfileManager=lambda: SimpleNamespace(defaultResourceProfile=lambda: None),
    )
    conf = {f"spark.{name.replace('_', '.')}": value for name, value in options.items()}
    return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: inner), getConf=lambda: conf)


def test_too_few_slots_are_refused_when_no_more_appear(clock):
    with pytest.raises(ConfigError, match="3 workers, but the application has 2 task slots; expected one for each"):
        slots.await_slots(application(2), 3, 3, 60.0)
    assert 10 < clock.now < 11
    assert slots.await_slots(application(2), 1, 8, 60.0) == 2, "as many as there are"


def test_dynamic_allocation_has_slots_that_are_not_there_yet(clock):
    dynamic = {"dynamicAllocation_enabled": "true"}
    assert slots.await_slots(application(0, **dynamic), 3, 8, 60.0) == 3
    assert slots.await_slots(application(4, **dynamic), 3, 8, 60.0) == 4
    few = {**dynamic, "dynamicAllocation_maxExecutors": "2", "executor_cores": "2", "task_cpus": "2"}
    with pytest.raises(ConfigError, match="3 workers, but the application has 2 task slots"):
        slots.await_slots(application(0, **few), 3, 8, 60.0)
