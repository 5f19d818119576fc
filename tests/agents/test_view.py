"""What the caller of a run on a cluster sees, and which error it ends with."""

import pickle
from dataclasses import asdict

import pytest

from evenstep.agents.view import RunView, ScriptError
from evenstep.core.errors import ConfigError, SilenceError, UnsupportedError
from evenstep.run.progress import Progress


@pytest.fixture
def view():
    return RunView(None, quiet=False)


def test_output_goes_where_it_went_on_the_worker(view, capsys):
    view.hear({"out": "a line"})
    view.hear({"err": "evenstep: a sentence"})
    assert capsys.readouterr() == ("a line\n", "evenstep: a sentence\n")


def test_a_quiet_run_shows_nothing_but_what_the_user_has_to_know(capsys):
    heard = []
    view = RunView(heard.append, quiet=True)
    view.hear({"out": "a line"})
    view.hear({"event": {"progress": asdict(Progress(2, 3, 1, 4, 64, 0.5, {}))}})
    view.say("placed on a node")
    view.warn("no room yet")
    view.hear({"event": {"fingerprint": "abc"}})
    assert view.end(0, pickle.dumps(5)) == 5
    assert capsys.readouterr() == ("", "evenstep: no room yet\n")
    assert heard == [Progress(2, 3, 1, 4, 64, 0.5, {})]


def test_a_run_that_went_well_shows_its_fingerprint_and_gives_the_result(view, capsys):
    view.hear({"event": {"fingerprint": "abc"}})
    assert view.end(0, pickle.dumps({"a": 1})) == {"a": 1}
    assert capsys.readouterr().out == "fingerprint abc\n"


@pytest.mark.parametrize("code", [75, 130])
def test_a_run_that_was_stopped_is_an_interrupt_with_its_exit_code(view, code):
    with pytest.raises(KeyboardInterrupt) as caught:
        view.end(code, None)
    assert caught.value.args == (code,)


def test_a_mistake_of_ours_is_raised_as_what_it_is(view):
    view.hear({"event": {"error": "evenstep: this cannot be trained exactly"}})
    with pytest.raises(UnsupportedError, match=r"^this cannot be trained exactly$"):
        view.end(UnsupportedError.exit_code, None)


def test_a_head_that_could_not_start_is_a_mistake(view):
    view.hear({"event": {"mistake": "the page's port is taken"}})
    with pytest.raises(ConfigError, match="the page's port is taken"):
        view.end(1, None)


def test_any_other_error_is_the_traceback_of_the_script(view):
    view.hear({"event": {"error": "Traceback ...\nZeroDivisionError"}})
    with pytest.raises(ScriptError, match="ZeroDivisionError") as caught:
        view.end(9, None)
    assert caught.value.exit_code == 9


def test_a_run_that_ends_without_a_reason_says_the_last_that_was_heard(capsys):
    view = RunView(None, quiet=True)
    view.hear({"err": "evenstep: worker 1 is stuck; its stack:"})
    view.hear({"err": "  File train.py, line 3"})
    view.hear({"err": "evenstep: no worker is left"})
    with pytest.raises(SilenceError, match=r"^no worker is left \(exit code 7\)") as caught:
        view.end(7, None)
    assert caught.value.exit_code == 7
    assert caught.value.__notes__ == ["worker 1 is stuck; its stack:\n  File train.py, line 3"]
    assert capsys.readouterr() == ("", "")
