"""A run that is never closed says so, once, and `verify` can tell it from a quiet one."""

import subprocess
import sys

import pytest

from evenstep.cli.verify import verify
from workers import cli_run

HINT = "evenstep: the run was never closed, so it has no fingerprint to show"
TRAIN = """
    import sys
    import torch
    import evenstep

    run = evenstep.Run(shards=4OPTIONS)
    model = torch.nn.Linear(3, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        run.step(torch.ones(8, 3), lambda part: model(part).square().mean())
    END
"""


def training(end="", options=""):
    return TRAIN.replace("END", end).replace("OPTIONS", options)


@pytest.mark.parametrize(
    ("end", "options", "said"),
    [
        ("", "", 1),
        ("run.close()", "", 0),
        ("", ", quiet=True", 0),
        ("sys.exit(3)", "", 0),
        ("raise KeyError('a bad day')", "", 0),
    ],
)
def test_the_launcher_says_it_once(script, end, options, said):
    done = cli_run("run", "-n", "2", script(training(end, options)))
    assert done.stderr.count(HINT) == said, done.stderr
    assert done.stdout.count("fingerprint") == (end == "run.close()")


def test_a_plain_script_says_it_too(script):
    done = subprocess.run([sys.executable, script(training())], capture_output=True, text=True, check=True)
    assert done.stderr.count(HINT) == 1
    assert "run.close()" in done.stderr


@pytest.mark.parametrize(("end", "said"), [("run.close()", "fingerprint "), ("", "(the run was never closed)")])
def test_verify_knows_what_a_quiet_run_ends_on(warm, script, capsys, end, said):
    assert verify(script(training(end, ", quiet=True")), [], [1, 2], None, None, 60.0) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert said in first
    assert first.split()[4:] == second.split()[4:]
    assert last == "all equal, at every step"
