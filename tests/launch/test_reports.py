"""What workers report: every event changes its worker or reaches the user, and half a line harms nothing."""

import json

import pytest

from crews import crew_of
from evenstep.launch.reports import Reports
from evenstep.launch.roster import LastWord, Script


@pytest.fixture
def setting():
    crew, machines, console, seen = crew_of(2)
    pages = []
    reports = Reports(crew, console, seen, pages.append)

    def tell(place, **event):
        reports.heard(place, "events", [json.dumps(event).encode()])

    return reports, tell, crew, machines, console, seen, pages


def test_output_is_shown_and_half_a_line_is_no_event(setting):
    reports, _, _, _, console, *_ = setting
    reports.heard(1, "err", [b"a line"])
    reports.heard(1, "events", [b'{"error": "x'])
    assert console.calls[-1] == ("show", 1, [b"a line"], True)
    assert reports._crew.seats[1].error is None


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ({"error": "boom"}, LastWord.ERROR),
        ({"error": "boom", "hopeless": True}, LastWord.HOPELESS),
        ({"error": "a sentence", "mistake": True}, LastWord.MISTAKE),
        ({"begins again": True}, LastWord.BEGINS_AGAIN),
    ],
)
def test_the_last_word_of_a_worker_is_kept(setting, event, fault):
    reports, _, crew, *_ = setting
    reports.heard(1, "events", [json.dumps(event).encode()])
    assert crew.roster.of(1).fault is fault
    assert crew.seats[1].error == event.get("error")
    assert crew.seats[1].begins_again == (fault is LastWord.BEGINS_AGAIN)
    reports.heard(1, "events", [b'{"final": true}'])
    assert (crew.roster.of(1).fault, crew.roster.of(1).final) == (fault, True)


def test_a_worker_that_another_waits_for_in_vain_is_given_up_once(setting):
    _, tell, _, machines, *_ = setting
    for _ in range(2):
        tell(0, silent=1, text="step 3: worker 0 has waited 2 s")
    assert machines.took("give_up") == [("give_up", 1, "says nothing: step 3: worker 0 has waited 2 s", False)]


def test_a_worker_that_computes_wrong_is_tolerated_as_often_as_allowed_then_dismissed(setting):
    _, tell, crew, _, console, *_ = setting
    for _ in range(2):
        tell(0, wrong=1, tolerates=1, text="worker 1 computed wrong")
    assert console.sentences == [
        "worker 1 computed wrong; tolerated, 1 of 1: the step is done again",
        "worker 1 computed wrong; it is dismissed, and the others do the step again",
    ]
    assert crew.roster.convicted


def test_what_the_script_says_of_its_run_is_known(setting):
    reports, tell, crew, machines, _, seen, pages = setting
    assert not reports.trained
    tell(0, made=True)
    tell(0, shards=8, timeout_s=5.0)
    tell(0, stopped={"step": 4, "checkpoint": None})
    tell(0, page=8080)
    tell(0, saved="checkpoints/4")
    assert reports.trained
    assert reports.stopped == {"step": 4, "checkpoint": None}
    assert crew.roster.has_stopped
    assert (crew.shards, crew.timeout_s, pages) == (8, 5.0, [8080])
    assert machines.took("limit") == [("limit", 5.0)]
    assert seen.described([])["checkpoints"][0][1] == "checkpoints/4"
    tell(1, closed=True)
    assert crew.roster.of(1).script is Script.CLOSED
