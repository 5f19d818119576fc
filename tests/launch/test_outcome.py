"""How a run ended: one exit code and one last sentence for each way."""

import signal
from dataclasses import replace

import pytest

from crews import FakeConsole, crew_of, killed
from evenstep.launch.job import Job
from evenstep.launch.machine import End
from evenstep.launch.outcome import RunOutcome
from evenstep.launch.roster import LastWord, Script


def ended_well(num_workers=1):
    crew, *_ = crew_of(num_workers)
    for place in range(num_workers):
        crew.roster = crew.roster.speaks(place, Script.CLOSED)
        crew.ended(place, End(0, "it ended", None, False, 4), 4)
    return crew.roster


def outcome(roster, *, began_with=1, trained=True, failed=None, stop_signal=None, stopped=None):
    console = FakeConsole()
    found = RunOutcome(Job("train.py", (), 1), roster, began_with, trained, failed, stop_signal, stopped)
    return found.tell(console), console


def test_a_run_that_ends_well_shows_its_fingerprint():
    code, console = outcome(ended_well())
    assert (code, console.calls, console.sentences) == (0, [("show_fingerprint",)], [])


def test_a_script_without_a_run_is_told_so_if_several_workers_ran_it():
    assert outcome(ended_well(), trained=False)[1].sentences == []
    code, console = outcome(ended_well(2), began_with=2, trained=False)
    assert code == 0
    assert "made no evenstep.Run: 2 workers each ran all of it" in console.sentences[0]


@pytest.mark.parametrize(
    ("stopped", "code", "sentence"),
    [
        (None, 128 + signal.SIGTERM, "stopped by SIGTERM"),
        ({"step": 7, "checkpoint": None}, 75, "stopped by SIGTERM after step 7; nothing was saved"),
        ({"step": 7, "checkpoint": "c/7"}, 75, "stopped by SIGTERM after step 7; its checkpoint is c/7: go on"),
    ],
)
def test_a_run_that_was_stopped_says_what_was_saved(stopped, code, sentence):
    crew, *_ = crew_of(1)
    crew.stop(1.0)
    crew.ended(0, End(75, "it ended", None, False, 7), 7)
    found, console = outcome(crew.roster, stop_signal=signal.SIGTERM, stopped=stopped)
    assert found == code
    assert console.sentences[0].startswith(sentence)


def test_a_stop_that_came_after_the_last_step_is_no_stop():
    code, console = outcome(ended_well(), stop_signal=signal.SIGINT)
    assert (code, console.sentences) == (0, [])


def failed(end, *, fault=None, error=None):
    crew, *_ = crew_of(2)
    if fault is not None:
        crew.roster = crew.roster.faults(1, fault)
    crew.ended(1, end, 3)
    crew.seats[1].error = error
    return outcome(crew.roster, failed=crew.seats[1])


def test_a_mistake_of_the_user_is_shown_alone():
    code, console = failed(End(2, "worker 1 ended", None, False, 3), fault=LastWord.MISTAKE, error="one sentence")
    assert (code, console.sentences, console.calls) == (2, [], [("show_failure", "one sentence")])


def test_a_signal_is_the_exit_code_as_in_a_shell():
    code, console = failed(killed(1))
    assert (code, console.sentences) == (137, ["worker 1 (pid 1) was killed by SIGKILL"])


def test_a_worker_that_was_killed_because_it_hung_says_so_last():
    code, console = failed(replace(killed(1), given_up="worker 1 (pid 1) has been inside the step for 4.0 s"))
    assert (code, console.sentences) == (137, ["worker 1 (pid 1) has been inside the step for 4.0 s"])


def test_a_worker_that_ended_without_a_word_while_others_waited_is_a_lost_peer():
    code, console = failed(End(0, "worker 1 ended with exit code 0", None, False, 3))
    assert (code, console.sentences[-1]) == (7, "it ended while the others waited for it")
