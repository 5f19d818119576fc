"""A crew carries out what its roster decides: every decision reaches the machines, and the user is told why."""

import re
import time

import pytest

from crews import FakeConsole, FakeMachines, crew_of, killed
from evenstep.exchange.board import Asks
from evenstep.launch.crew import RunCrew, listed
from evenstep.launch.job import Job
from evenstep.launch.machine import End
from evenstep.launch.roster import Ending, LastWord, Script
from evenstep.page.seen import Seen


def test_the_first_workers_start_once_and_only_when_all_machines_are_there():
    job = Job("train.py", (), 2, keeper=True)
    machines = FakeMachines(job)
    machines.are_enough = False
    crew = RunCrew(job, FakeConsole(), machines, Seen())
    crew.begin()
    assert not crew.is_there
    machines.are_enough = True
    crew.begin()
    crew.begin()
    assert machines.took("start") == [("start", 0, 1), ("start", 1, 1)], "the keeper is not counted"
    assert (crew.began_with, crew.num_wanted) == (1, 1)


def test_a_generation_begins_when_all_wait_and_its_weights_follow_the_places():
    crew, machines, *_ = crew_of(3, stepping=False, weights=(2.0, 0.5))
    for place in range(3):
        assert not machines.took("announce")
        crew.roster = crew.roster.speaks(place, Script.INSIDE)
        crew.turn(crew.roster.waits(place))
    ((_, generation),) = machines.took("announce")
    assert (generation.members, generation.weights) == ([0, 1, 2], [2.0, 0.5, 1.0])


def test_a_lost_worker_frees_the_others_is_replaced_and_the_next_commit_says_how_long_it_took():
    crew, machines, console, seen = crew_of(2)
    crew.ended(1, killed(1), 3)
    assert machines.took("abort") == [("abort", 1, "worker 1 (pid 1) was killed by SIGKILL")]
    assert console.sentences == ["worker 1 (pid 1) was killed by SIGKILL at step 3; it is replaced"]
    assert crew.next_look(), "its successor is due"
    crew.look_after(time.monotonic())
    assert machines.took("start") == [("start", 1, 2)]
    crew.committed(4)
    assert re.fullmatch(r"step 4 is committed, \d+\.\d{3} s after a worker was lost", console.sentences[-1])
    assert seen.described([])["faults"][0][2] is not None
    crew.committed(5)
    assert len(console.sentences) == 2, "said once"


def test_a_worker_that_fails_for_good_ends_the_run_after_a_grace():
    crew, machines, *_ = crew_of(2)
    crew.roster = crew.roster.faults(1, LastWord.MISTAKE)
    crew.ended(1, End(2, "worker 1 ended with exit code 2", None, False, 3), 3)
    assert crew.failed is crew.seats[1]
    assert machines.took("abort")
    crew.look_after(crew.deadline - 0.1)
    assert not machines.took("signal"), "the others may end by themselves"
    crew.look_after(crew.deadline)
    assert machines.took("signal") == [("signal", 0, 15)]
    crew.look_after(crew.deadline)
    assert machines.took("signal") == [("signal", 0, 9)]


def test_a_stop_reaches_the_workers_and_nobody_is_started_any_more():
    crew, machines, *_ = crew_of(2)
    crew.ended(1, killed(1), 3)
    machines.calls.clear()
    crew.stop(60.0)
    assert ("ask", Asks.STOP, 1) in machines.calls
    assert crew.roster.ending is Ending.STOPS
    crew.look_after(time.monotonic())
    assert not machines.took("start")


def test_workers_of_a_lost_machine_are_lost_with_it_and_those_due_there_are_not_started():
    crew, machines, *_ = crew_of(3)
    crew.lose_machine([1, 2], "machine 1 is lost")
    assert machines.took("abort") == [("abort", 1, "machine 1 is lost")]
    assert [worker.place for worker in crew.roster.alive] == [0]


@pytest.mark.parametrize("timeout_s", [None, 2.0])
def test_a_worker_that_catches_up_has_a_steps_time_after_the_others_have_ended(timeout_s):
    crew, machines, *_ = crew_of(2)
    crew.limit(4, timeout_s)
    crew.ended(1, killed(1), 3)
    crew.look_after(time.monotonic())  # a successor starts, which still has to catch up
    crew.roster = crew.roster.speaks(0, Script.CLOSED)
    crew.ended(0, End(0, "worker 0 ended", None, False, 3), 3)
    machines.calls.clear()
    now = time.monotonic()
    crew.look_after(now)
    crew.look_after(now + 1.9)
    assert not machines.took("give_up")
    crew.look_after(now + 2.5)
    crew.look_after(now + 3.0)
    expected = [("give_up", 1, "has not caught up 2.5 s after the others ended", True)]
    assert machines.took("give_up") == ([] if timeout_s is None else expected)


def test_machines_are_told_of_a_limit_only_when_it_changes():
    crew, machines, *_ = crew_of(1)
    crew.limit(4, 30.0)
    crew.limit(4, 30.0)
    assert machines.took("limit") == [("limit", 30.0)]
    assert crew.shards == 4


def test_places_are_listed():
    assert listed([0, 3]) == "0, 3"
