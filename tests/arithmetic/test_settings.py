"""Portable arithmetic is chosen before torch is loaded, or the script is started again, or told what to do."""

import os
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

import evenstep
from evenstep.arithmetic import settings
from evenstep.core import env
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError


@pytest.fixture
def variables(monkeypatch):
    """Sets variables of this process for one test; None removes one."""

    def set_all(found: dict[str, str | None]) -> None:
        for name in (*settings.PORTABLE, "EVENSTEP_ARITHMETIC"):
            monkeypatch.setenv(name, "")  # so that it is put back, whatever becomes of it
            monkeypatch.delenv(name)
        for name, value in found.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    set_all({})
    return set_all


def frame(**of_globals: object) -> SimpleNamespace:
    return SimpleNamespace(f_globals=of_globals)


def main_frame() -> SimpleNamespace:
    return SimpleNamespace(f_globals=sys.modules["__main__"].__dict__)


@pytest.fixture
def alone(monkeypatch):
    """This process is that of a script, in one thread, whoever runs the tests."""
    script = ModuleType("__main__")
    script.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--lr", "0.1"])
    monkeypatch.setattr(threading, "active_count", lambda: 1 + len(set(threading.enumerate()) - before))
    before = set(threading.enumerate())


@pytest.fixture
def started(monkeypatch) -> list[tuple[list[str], dict[str, str]]]:
    """Instead of becoming another process, this one notes what it would become."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(env, "become", lambda command, variables: found.append((command, variables)))
    return found


def test_a_launcher_sets_all_that_torch_will_look_at(variables):
    settings.choose("portable")
    assert os.environ.items() >= {**settings.PORTABLE, "EVENSTEP_ARITHMETIC": "portable"}.items()


def test_a_launcher_takes_the_environments_word_if_it_has_none_of_its_own(variables):
    variables({"EVENSTEP_ARITHMETIC": "portable"})
    settings.choose(None)
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
    settings.choose("native")
    assert os.environ["EVENSTEP_ARITHMETIC"] == "native"


def test_without_a_word_nothing_is_set(variables):
    settings.choose(None)
    assert not {*settings.PORTABLE, "EVENSTEP_ARITHMETIC"} & os.environ.keys()


def test_what_is_set_already_needs_no_new_start(variables, started):
    variables(dict(settings.PORTABLE))
    settings.insist(main_frame(), Environment())
    assert started == []


@pytest.mark.parametrize("wrong", [{}, {**settings.PORTABLE, "MKL_CBWR": "AVX2"}])
def test_a_script_that_makes_the_run_itself_is_started_again(variables, started, alone, capsys, wrong):
    variables(wrong)
    with pytest.raises(ConfigError):  # where it goes on only because this test does not become another process
        settings.insist(main_frame(), Environment())
    assert started == [([sys.executable, "train.py", "--lr", "0.1"], settings.PORTABLE)]
    assert "starting again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("caller", "place"),
    [
        (frame(__name__="library"), Environment()),
        (frame(__name__="__main__"), Environment()),  # a notebook, or a script that something else runs
        (main_frame(), Environment(segment_fd=5)),  # a launcher's worker
    ],
)
def test_others_are_told_what_to_do(variables, started, caller, place):
    with pytest.raises(ConfigError) as caught:
        settings.insist(caller, place)
    assert started == []
    assert "`evenstep run --arithmetic portable`" in str(caught.value)
    assert "export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE" in str(caught.value)


def test_a_process_with_threads_is_not_started_again(variables, started, alone):
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(ConfigError):
            settings.insist(main_frame(), Environment())
    finally:
        done.set()
        thread.join()
    assert started == []


def test_a_run_says_it_in_one_sentence(variables):
    with pytest.raises(ConfigError, match="must be chosen before torch is loaded"):
        evenstep.Run(arithmetic="portable")


def test_the_launcher_imports_no_torch_before_the_choice():
    code = "import evenstep.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
