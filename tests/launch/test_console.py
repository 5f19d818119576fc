"""What the launcher shows of its workers."""

import sys
from io import BytesIO, TextIOWrapper

import pytest

from evenstep.core.errors import ConfigError
from evenstep.launch.console import Console
from evenstep.run.progress import Progress


def test_lines_have_the_number_of_their_worker_and_its_log_too(tmp_path, capsys):
    with Console(tmp_path, 2) as console:
        console.begin(1, again=False)
        console.show(1, [b"one", b"two"], is_error=False)
        console.show(1, [b"beside"], is_error=True)
        console.log_error(1, "ValueError: é\n")
    out, err = capsys.readouterr()
    assert (out, err) == ("[1] one\n[1] two\n", "[1] beside\n")
    assert (tmp_path / "worker-1.log").read_text() == "one\ntwo\nbeside\nValueError: é\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_the_terminal_lacks_is_escaped_and_bytes_come_out_as_they_are(monkeypatch, encoding):
    written = {name: BytesIO() for name in ("stdout", "stderr")}
    for name, buffer in written.items():
        monkeypatch.setattr(sys, name, TextIOWrapper(buffer, encoding, write_through=True))
    with Console(None, 1) as console:
        console.begin(0, again=False)
        console.print(0, (0, 0), "\u6f22")
        console.say("\u5b57")
        console.show(0, [b"\xff\xfe"], is_error=False)
    assert written["stdout"].getvalue() == b"\\u6f22\n[0] \xff\xfe\n"
    assert written["stderr"].getvalue() == b"evenstep: \\u5b57\n"


def test_a_worker_that_replaces_another_does_not_show_again_what_was_shown(capsys):
    with Console(None, 1) as console:
        console.begin(0, again=False)
        console.show(0, [b"a", b"b"], is_error=False)
        console.begin(0, again=True)
        console.show(0, [b"a"], is_error=False)
        console.show(0, [b"b", b"c"], is_error=False)
    assert capsys.readouterr().out == "[0] a\n[0] b\n[0] c\n"


def test_a_worker_in_a_new_place_shows_nothing_before_it_has_caught_up(capsys):
    with Console(None, 1) as console:
        console.begin(3, again=True)
        console.show(3, [b"a"], is_error=False)
        console.caught_up(3)
        console.show(3, [b"b"], is_error=False)
    assert capsys.readouterr().out == "[3] b\n"


def test_a_group_is_named_and_its_figures_go_to_whoever_shows_all(capsys):
    told = []
    with Console(None, 1, 2, told.append) as console:
        console.begin(0, again=False)
        console.show(0, [b"a"], is_error=False)
        console.say("it is late")
        console.progress(Progress(0, 1, 1, 2, 8, 0.5, {}))
        console.note_fingerprint(3, "abc")
        console.show_fingerprint()
    out, err = capsys.readouterr()
    assert (out, err) == ("[2.0] a\n", "evenstep: group 2: it is late\n")
    assert told[0]["progress"]["loss"] == 0.5
    assert told[1] == {"fingerprint": "abc"}


def test_every_run_of_a_script_ends_on_one_fingerprint_whoever_says_it(capsys):
    with Console(None, 2) as console:
        for operation, fingerprint in ((3, "abc"), (3, "abc"), (9, "def")):
            console.note_fingerprint(operation, fingerprint)
        console.show_fingerprint()
    assert capsys.readouterr().out == "fingerprint abc\nfingerprint def\n"


def test_an_error_is_shown_whole_or_not_at_all(capsys):
    with Console(None, 1) as console:
        console.show_error(None)
        console.show_error("Traceback\nValueError\n")
    assert capsys.readouterr().err == "Traceback\nValueError\n"


def test_a_log_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot create .*: Not a directory; name another directory"):
        Console(tmp_path / "file" / "logs", 1)
