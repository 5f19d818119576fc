"""`evenstep run --on ray` ends as `evenstep run` does; how it runs is tested with a cluster, in tests/ray."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

import evenstep
from evenstep.agents.view import ScriptError
from evenstep.cli.main import main
from evenstep.core.errors import SilenceError


@pytest.fixture
def ends(monkeypatch, tmp_path):
    """The exit code of a run on a cluster that ends in some way."""
    script = tmp_path / "train.py"
    script.write_text("")

    def code(run):
        fake = SimpleNamespace(run=lambda *args, **options: run(), ScriptError=ScriptError)
        monkeypatch.setattr(evenstep, "ray", fake, raising=False)
        return main(["run", "--on", "ray", "-n", "2", str(script)])

    return code


def failing(error):
    def run():
        raise error

    return run


def test_an_interrupted_run_has_the_code_of_one_that_can_be_resumed(ends):
    assert ends(failing(KeyboardInterrupt(75))) == 75
    assert ends(failing(KeyboardInterrupt())) == 130, "before there was a run"


def test_sigterm_is_an_interrupt(ends):
    def terminated():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10.0)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(75) from None

    before = signal.getsignal(signal.SIGTERM)
    assert ends(terminated) == 75
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_failed_run_has_the_code_of_its_script(ends, capsys):
    error = SilenceError("worker 0 ended with exit code 3")
    error.exit_code = 3
    assert ends(failing(error)) == 3
    assert capsys.readouterr().err == "evenstep: worker 0 ended with exit code 3\n"
    error.was_shown = True
    assert ends(failing(error)) == 3
    assert ends(failing(ScriptError("Traceback"))) == 1
    assert capsys.readouterr().err == "Traceback\n"
