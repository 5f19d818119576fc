"""The command line: help and mistakes are quick, and a mistake is one sentence that starts nothing."""

import errno
import os
import subprocess
import sys

import pytest

from evenstep.cli.main import _FLAGS, _parser, _with_port, main
from workers import cli_run


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--help"], ["run", "verify", "does not depend on the number of workers"], id="evenstep"),
        pytest.param(["run", "--help"], ["-n N", "--shards K", "--log-dir DIR", "script ...", "auto"], id="run"),
        pytest.param(["topo", "--help"], ["--from FILE", "--measure", "--simulate FILE", "--out FILE"], id="topo"),
        pytest.param(["graph", "--help"], ["SCRIPT:NAME", "--shards K", "--workers N", "--out FILE"], id="graph"),
        pytest.param(["verify", "--help"], ["--workers N,N,...", "--steps S", "first step and tensor"], id="verify"),
    ],
)
def test_help_names_every_option(argv, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in words:
        assert word in text


def test_neither_help_nor_a_mistake_waits_for_torch():
    code = """
import contextlib, sys
from evenstep.cli.main import main
for argv in (
    ["--help"], ["run", "--help"], ["verify", "--help"], ["topo", "--help"], ["run", "-n", "0", "-"],
    ["run", "missing.py"], ["topo", "--from", "missing.json"], ["topo", "--shards", "4"],
    ["graph", "--help"], ["graph", "missing.py:model", "--out", "x.svg"],
):
    with contextlib.suppress(SystemExit):
        main(argv)
sys.exit("torch" in sys.modules or "numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", "run", "x.py"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "evenstep: there is no script x.py; name a Python file to run\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run", "no.py"], "there is no script no.py; name a Python file to run"),
        (["run", "/"], "there is no script /; name a Python file to run"),
        (["verify", "no.py"], "there is no script no.py; name a Python file to run"),
        (["run", "-n", "0"], "0 workers, expected at least 1, or auto"),
        (["run", "-n", "-2"], "-2 workers, expected at least 1, or auto"),
        (["run", "-n", "abc"], "'abc' is not a number of workers; expected a whole number above 0, or auto"),
        (["run", "-n", "2.5"], "'2.5' is not a number of workers; expected a whole number above 0, or auto"),
        (["run", "-n", "4", "--shards", "2"], "4 workers but only 2 shards: every worker needs one; use at most -n 2"),
        (["run", "-n", "257"], "257 workers, but a run has at most 256 shards and every worker needs one"),
        (["run", "--shards", "0"], "--shards 0, expected a whole number from 1 to 256"),
        (["run", "--shards", "1000"], "--shards 1000, expected a whole number from 1 to 256"),
        (["verify", "--workers", "2"], "--workers 2 is one number; expected at least two to compare, such as 1,2,4"),
        (["verify", "--workers", "1,x"], "'x' is not a number of workers; expected a whole number above 0, or auto"),
        (["verify", "--steps", "0"], "--steps 0, expected a whole number above 0"),
        (["verify", "--timeout", "0"], "--timeout 0, expected a number of seconds above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_starts_nothing(argv, sentence, script, tmp_path, capsys):
    path = script(f"open({str(tmp_path / 'started')!r}, 'w')")
    named = argv if argv[-1] in ("no.py", "/") else [*argv, str(path)]
    assert main(named) == 2
    assert capsys.readouterr() == ("", f"evenstep: {sentence}\n")
    assert not (tmp_path / "started").exists()


def test_shards_that_are_no_number_are_refused_by_name(capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "--shards", "many", "x.py"])
    assert end.value.code == 2
    assert "argument --shards: invalid int value: 'many'" in capsys.readouterr().err


def test_auto_is_no_more_than_the_shards(script):
    path = script("import os; print(os.environ['EVENSTEP_WORKERS'], os.environ['EVENSTEP_SHARDS'])")
    done = cli_run("run", "-n", "auto", "--shards", "1", path)
    assert (done.code, done.stdout) == (0, "[0] 1 1\n")


def test_an_option_behind_the_script_is_the_scripts_and_a_line_says_so(script):
    done = cli_run("run", "-n", "1", script("import sys; print(sys.argv[1:])"), "--shards=3", "--lr", "0.1")
    assert done.stdout == "[0] ['--shards=3', '--lr', '0.1']\n"
    assert done.stderr.startswith("evenstep: --shards comes after ")
    assert done.stderr.endswith("so it goes to the script; if it is meant for evenstep, put it before\n")


def test_the_options_of_a_run_without_a_value_are_known():
    (commands,) = (action for action in _parser()._actions if isinstance(action.choices, dict))
    flags = {name for action in commands.choices["run"]._actions if action.nargs == 0 for name in action.option_strings}
    assert flags == _FLAGS


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("run --page train.py -x", "run --page 0 train.py -x"),
        ("run --page 80 train.py", "run --page 80 train.py"),
        ("run -n 2 --page train.py", "run -n 2 --page 0 train.py"),
        ("run --resume --page -n 2 train.py", "run --resume --page 0 -n 2 train.py"),
        ("run train.py --page x", "run train.py --page x"),
        ("run --resume train.py --page x", "run --resume train.py --page x"),
        ("run -m train --page x", "run -m train --page x"),
        ("run --shards=4 --page", "run --shards=4 --page 0"),
        ("run -n 2 train.py --page", "run -n 2 train.py --page"),
        ("status --page", "status --page"),
    ],
)
def test_a_page_without_a_port_takes_any_and_leaves_the_script_alone(given, meant):
    assert _with_port(given.split()) == meant.split()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_limit_of_the_machine_is_a_sentence(monkeypatch, capsys, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("evenstep.cli.status.ask", fail)
    assert main(["status"]) == 1
    assert f"{os.strerror(number)}: this machine, or a limit" in capsys.readouterr().err
