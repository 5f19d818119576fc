"""What is decided when workers come, speak and end. All orders of events are gone through in `tests/model`."""

import signal

import pytest

from evenstep.core.errors import ConfigError, Stopped
from evenstep.launch.roster import (
    Announce,
    Ending,
    Fail,
    LastWord,
    LeaveOut,
    Lose,
    Regroup,
    Roster,
    Script,
    Signal,
    Stage,
    Start,
)

KILLED = -signal.SIGKILL


def begun(count, **options):
    """A roster of so many workers that were just started."""
    roster = Roster(count, **options)
    for place in range(count):
        roster = roster.started(place)
    return roster


def working(count, **options):
    """A roster whose workers are in the first generation, inside a run, and have committed a step."""
    roster = begun(count, **options)
    for place in range(count):
        roster = roster.speaks(place, Script.INSIDE)
        roster, decisions = roster.waits(place)
    assert decisions == [Announce(1, tuple(range(count)), ())]
    return roster.committed()


def stages(roster):
    return [worker.stage for worker in roster.workers]


# ---- generations ----


def test_the_first_generation_begins_when_all_wait():
    roster = begun(2)
    assert stages(roster) == [Stage.BEGINS] * 2
    roster, decisions = roster.waits(1)
    assert decisions == []
    roster, decisions = roster.waits(0)
    assert decisions == [Announce(1, (0, 1), ())]
    assert stages(roster) == [Stage.WORKS] * 2


def test_a_newcomer_is_let_in_when_the_others_have_come_to_wait():
    roster, decisions = working(1).scale(2, 8)
    assert decisions == [Start(1, 0.0)]
    roster = roster.started(1)
    assert stages(roster) == [Stage.WORKS, Stage.CATCHES_UP]
    roster, decisions = roster.waits(1)
    assert (stages(roster)[1], decisions) == (Stage.READY, [Regroup(2)])
    roster, decisions = roster.waits(0)
    assert decisions == [Announce(2, (0, 1), ())]


def test_when_there_are_to_be_fewer_the_last_are_told_to_go():
    roster, decisions = working(3).scale(1, 8)
    assert decisions == [Regroup(2)]
    for place in range(3):
        roster, decisions = roster.waits(place)
    assert decisions == [Announce(2, (0,), (1, 2))]
    assert stages(roster) == [Stage.WORKS, Stage.LEAVES, Stage.LEAVES]
    roster, decisions = roster.ended(2, 0, 5)
    assert (stages(roster)[2], decisions) == (Stage.LEFT, [])


def test_a_place_is_free_only_when_its_process_has_ended():
    roster, _ = working(2).scale(1, 8)
    for place in range(2):
        roster, _ = roster.waits(place)
    roster, decisions = roster.scale(2, 8)
    assert decisions == [Start(2, 0.0)], "the one in place 1 was told to go, and may still be there"


# ---- losing one ----


def test_a_worker_that_is_killed_is_replaced_at_once_and_the_next_time_later():
    roster = working(2)
    for number, delay_s in enumerate([0.0, 0.1, 0.2, 0.4]):
        roster, decisions = roster.ended(1, KILLED, 5)
        assert decisions[:2] == [Lose(1, number == 0, delay_s, 1), Start(1, delay_s)]
        roster = roster.started(1)
    assert roster.restarts == 4
    roster, decisions = roster.committed().ended(1, KILLED, 6)
    assert Start(1, 0.0) in decisions, "the run gets on, so whatever it was is over"


def test_the_wait_before_a_replacement_has_a_limit():
    roster = working(2)
    for _ in range(20):
        roster, decisions = roster.ended(1, KILLED, 5)
        roster = roster.started(1)
    assert decisions[-1] == Start(1, 30.0)


def test_the_others_form_a_generation_without_it():
    roster, _ = working(3).ended(1, KILLED, 5)
    roster, decisions = roster.waits(0)
    assert decisions == []
    roster, decisions = roster.waits(2)
    assert decisions == [Announce(2, (0, 2), ())]


def test_nobody_is_replaced_once_the_limit_is_reached():
    roster, decisions = working(3, max_restarts=1).ended(1, KILLED, 5)
    assert Start(1, 0.0) in decisions
    roster, decisions = roster.ended(2, KILLED, 5)
    assert decisions == [Lose(2, was_member=True, delay_s=None, left=2)]


def test_the_last_worker_that_nobody_replaces_ends_the_run():
    roster, decisions = working(1, max_restarts=0).ended(0, KILLED, 5)
    assert decisions == [Lose(0, True, None, 0), Fail(0)]
    assert roster.ending is Ending.FAILED


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGILL, signal.SIGBUS])
def test_a_worker_that_crashes_for_the_fourth_time_in_one_place_ends_the_run(number):
    roster = working(1)
    for _ in range(3):
        roster, decisions = roster.ended(0, -number, 5)
        assert not any(isinstance(decision, Fail) for decision in decisions)
        roster = roster.started(0)
    roster, decisions = roster.ended(0, -number, 5)
    assert decisions == [Fail(0)]
    assert roster.crashes_always(roster.of(0))


def test_so_does_one_that_starves_but_not_one_that_is_only_killed():
    roster = killed = working(1)
    for _ in range(3):
        roster, decisions = roster.starves(0).ended(0, KILLED, 5)
        assert not any(isinstance(decision, Fail) for decision in decisions)
        roster = roster.started(0)
    assert roster.starves(0).ended(0, KILLED, 5)[1] == [Fail(0)]
    for _ in range(9):
        killed, decisions = killed.ended(0, KILLED, 5)
        assert isinstance(decisions[0], Lose)
        killed = killed.started(0)


def test_so_does_one_that_hangs_for_the_fourth_time_but_not_if_steps_are_committed_in_between():
    roster = moving = working(1)
    for _ in range(3):
        roster, decisions = roster.gives_up(0).ended(0, KILLED, 5)
        assert isinstance(decisions[0], Lose)
        roster = roster.started(0)
    assert roster.gives_up(0).ended(0, KILLED, 5)[1] == [Fail(0)]
    for step in range(9):
        moving, decisions = moving.gives_up(0).ended(0, KILLED, step)
        assert isinstance(decisions[0], Lose)
        moving = moving.started(0).committed()


# ---- scripts at fault ----


def test_a_script_that_fails_before_the_first_step_is_at_fault():
    roster, decisions = begun(2).faults(1, LastWord.ERROR).ended(1, 1, 0)
    assert decisions == [Fail(1)]
    assert roster.ended(0, 7, 0) == (roster._set(0, stage=Stage.GONE, code=7), []), "the others fail because of it"


def test_a_script_that_fails_once_is_given_another_try_and_twice_in_one_place_is_at_fault():
    roster, decisions = working(2).faults(1, LastWord.ERROR).ended(1, 1, 5)
    assert isinstance(decisions[0], Lose)
    roster = roster.started(1)
    roster, _ = roster.waits(1)
    roster, _ = roster.waits(0)
    assert roster.ended(1, 1, 5)[1][0] == Fail(1)
    assert isinstance(roster.ended(1, 1, 6)[1][0], Lose), "somewhere else it may go well"


@pytest.mark.parametrize("fault", [LastWord.MISTAKE, LastWord.HOPELESS])
def test_what_would_fail_again_ends_the_run_at_once(fault):
    assert working(2).faults(1, fault).ended(1, 2, 5)[1] == [Fail(1)]


def test_a_worker_without_which_the_others_cannot_go_on_ends_the_run():
    roster = working(2).faults(1, LastWord.NONE, final=True).faults(1, LastWord.ERROR)
    assert roster.of(1).final
    assert roster.ended(1, 1, 5)[1] == [Fail(1)]


def test_those_who_wait_are_told_to_end_and_those_who_have_not_caught_up_are_killed():
    roster, _ = working(3).scale(4, 8)
    roster = roster.started(3)
    roster, _ = roster.waits(0)
    roster, decisions = roster.faults(2, LastWord.MISTAKE).ended(2, 2, 5)
    assert decisions == [Fail(2), Signal(0, signal.SIGTERM), Signal(3, signal.SIGKILL)]


def test_a_newcomer_that_fails_before_it_has_caught_up_is_left_out():
    roster, _ = working(2).scale(3, 8)
    roster, decisions = roster.started(2).faults(2, LastWord.ERROR).ended(2, 1, 5)
    assert decisions == [LeaveOut(2)]
    assert roster.wanted == 2


def test_a_newcomer_that_fails_when_the_others_have_ended_well_is_left_out_too():
    roster, _ = working(1).scale(2, 8)
    roster = roster.started(1).speaks(0, Script.CLOSED)
    roster, _ = roster.ended(0, 0, 5)
    roster, decisions = roster.faults(1, LastWord.ERROR).ended(1, 4, 5)
    assert decisions == [LeaveOut(1)]


def test_a_worker_that_ends_well_without_the_run_that_the_others_are_in_ends_it():
    roster, decisions = begun(2).ended(0, 0, 0)
    assert (stages(roster)[0], decisions) == (Stage.MISSING, [])
    roster, decisions = roster.speaks(1, Script.INSIDE).waits(1)
    assert decisions == [Fail(0), Signal(1, signal.SIGTERM)]


def test_a_script_that_ends_inside_of_its_run_ends_it_only_if_it_does_not_say_so():
    inside = working(1)
    assert inside.speaks(0, Script.ENDED).ended(0, 0, 5)[1] == []
    assert inside.ended(0, 0, 5)[1] != []


# ---- the end ----


def test_a_run_that_is_over_for_all_but_a_newcomer_waits_for_it():
    roster, _ = working(1).scale(2, 8)
    roster = roster.started(1).speaks(0, Script.CLOSED)
    assert roster.is_over
    assert roster.stragglers == []
    roster, _ = roster.ended(0, 0, 9)
    assert [worker.place for worker in roster.stragglers] == [1]
    assert roster.gives_up(1, leaves=True).ended(1, KILLED, 9)[1] == []


def test_a_worker_that_is_killed_after_the_run_is_replaced():
    roster = working(1).speaks(0, Script.CLOSED)
    assert Start(0, 0.0) in roster.ended(0, KILLED, 9)[1]


# ---- what the user asks ----


def test_a_run_that_is_asked_to_stop_lets_nobody_in_and_replaces_nobody():
    roster, _ = working(2).scale(3, 8)
    roster, decisions = roster.started(2).stop()
    assert decisions == [Signal(2, signal.SIGKILL)]
    roster, decisions = roster.ended(2, KILLED, 5)
    assert decisions == []
    roster, decisions = roster.ended(1, KILLED, 5)
    assert decisions == [Lose(1, True, None, 1)]
    roster, decisions = roster.ended(0, Stopped.exit_code, 6)
    assert decisions == []
    with pytest.raises(ConfigError, match="the run is ending"):
        roster.scale(2, 8)


def test_a_run_that_shall_stop_needs_somebody_who_does_it():
    roster, _ = working(1).stop()
    roster, decisions = roster.ended(0, KILLED, 5)
    assert decisions == [Lose(0, True, 0.0, 0), Start(0, 0.0)]
    stopped = working(1).stop()[0]._replace(has_stopped=True)
    assert stopped.ended(0, KILLED, 5)[1] == [Lose(0, True, None, 0)]


def test_when_everyone_is_told_to_end_nothing_more_is_decided():
    roster = working(2).kill()
    for place in range(2):
        roster, decisions = roster.ended(place, KILLED, 5)
        assert decisions == []
    assert not roster.alive


# ---- machines ----


def test_the_workers_of_a_machine_that_comes_are_started_and_join_when_they_have_caught_up():
    roster, decisions = working(2).adds([5, 6])
    assert decisions == [Start(5, 0.0), Start(6, 0.0)]
    assert roster.wanted == 4
    for place in (5, 6):
        roster = roster.started(place, machine=1)
    assert stages(roster)[2:] == [Stage.CATCHES_UP] * 2


def test_the_workers_of_a_machine_that_is_lost_are_not_replaced_and_the_others_go_on():
    roster, _ = working(2).adds([5, 6])
    roster = roster.started(5, machine=1)
    for place in (5, 0, 1):
        roster, decisions = roster.waits(place)
    assert decisions == [Announce(2, (0, 1, 5), ())]
    for place in (0, 1):
        roster, decisions = roster.waits(place)
        assert decisions == [], "they wait for the one that is lost"
    roster, decisions = roster.loses([5, 6])
    assert decisions == [Announce(3, (0, 1), ())]
    assert (roster.wanted, roster.starts) == (2, ())


def test_there_is_no_generation_without_the_head():
    roster = Roster(2).started(0).started(4, machine=1)
    for place in (0, 4):
        roster, decisions = roster.waits(place)
    roster = roster.committed().speaks(0, Script.INSIDE)
    assert decisions == [Announce(1, (0, 4), ())]
    roster, decisions = roster.ended(0, KILLED, 1)
    assert decisions[1] == Start(0, 0.0)
    roster, decisions = roster.waits(4)
    assert decisions == []
    roster, decisions = roster.started(0).waits(0)
    assert decisions == [Announce(2, (0, 4), ())]


def test_when_the_last_worker_of_the_head_is_lost_for_good_the_run_has_failed():
    roster = Roster(2, max_restarts=0).started(0).started(4, machine=1)
    for place in (0, 4):
        roster, _ = roster.waits(place)
    roster = roster.committed()
    roster, _ = roster.ended(0, KILLED, 1)
    roster, decisions = roster.waits(4)
    assert Fail(0) in decisions


def test_scaling_down_keeps_a_worker_of_the_head():
    roster = Roster(3).started(4, machine=1).started(5, machine=1).started(0)
    for place in (4, 5):
        roster, _ = roster.waits(place)
    roster, decisions = roster._replace(wanted=1).waits(0)
    assert decisions == [Announce(1, (0,), (4, 5))]


def test_when_the_run_is_over_on_the_head_nobody_waits_for_it_elsewhere():
    roster = Roster(2).started(0).started(4, machine=1)
    for place in (0, 4):
        roster, _ = roster.waits(place)
    roster, _ = roster.committed().speaks(0, Script.CLOSED).ended(0, 0, 9)
    roster, decisions = roster.waits(4)
    assert decisions == [Signal(4, signal.SIGKILL)]
    roster, decisions = roster.ended(4, KILLED, 9)
    assert (decisions, roster.alive) == ([], [])


# ---- workers that compute wrong ----


def test_one_that_computed_wrong_is_not_in_the_next_generation_nor_taken_again():
    roster = working(3).convicts(1)
    for place in (0, 1):
        roster, _ = roster.waits(place)
    roster, decisions = roster.waits(2)
    assert decisions == [Announce(2, (0, 2), (1,))]
    roster, decisions = roster.ended(1, 0, 5)
    assert decisions == []
    roster, decisions = roster.scale(4, 8)
    assert decisions == [Start(3, 0.0), Start(4, 0.0)]


def test_one_that_dies_before_it_is_dismissed_is_not_replaced():
    roster, decisions = working(3).convicts(1).ended(1, KILLED, 5)
    assert decisions == [Lose(1, True, None, 2)]
    roster, _ = roster.waits(0)
    assert roster.waits(2)[1] == [Announce(2, (0, 2), ())]


def test_if_all_others_die_meanwhile_those_who_replace_them_are_waited_for():
    roster = working(2).convicts(1)
    roster, _ = roster.waits(1)
    roster, decisions = roster.ended(0, KILLED, 5)
    assert Start(0, 0.0) in decisions
    roster, decisions = roster.started(0).waits(0)
    assert decisions == [Announce(2, (0,), (1,))]


def test_if_nobody_replaces_them_the_run_is_over():
    roster = working(2, max_restarts=0).convicts(1)
    roster, _ = roster.waits(1)
    assert Fail(1) in roster.ended(0, KILLED, 5)[1]
