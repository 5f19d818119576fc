"""What a run prints is printed once, whoever is replaced; what several workers warn of is shown once."""

import json
import os
from types import SimpleNamespace

import pytest

from evenstep.core.env import Environment
from evenstep.run.voice import Voice
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run

TRAIN = """
    import warnings
    import torch
    import evenstep

    warnings.simplefilter("default")
    warnings.warn("a warning of everybody's")
    with evenstep.Run(shards=4) as run:
        warnings.warn(f"a warning of worker {run.worker}")
        model = torch.nn.Linear(3, 1)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.print("begin", 7, sep="-")
        for number in range(6):
            run.step(torch.ones(8, 3), lambda part: model(part).square().mean())
            run.print(f"step {number}")
            run.print(f"again {number}")
"""
LINES = ["begin-7", *(f"{word} {number}" for number in range(6) for word in ("step", "again"))]


@pytest.mark.parametrize("at", [None, ("forward", 3), ("after commit", 4)])
def test_every_line_is_printed_once_whoever_is_replaced(script, tmp_path, at):
    variables = plant([Fault("kill", *at)], tmp_path / "faults") if at else {}
    done = cli_run("run", "-n", "3", script(TRAIN), variables=variables)
    assert done.code == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert sorted(lines) == sorted(LINES)
    assert last.startswith("fingerprint ")
    assert done.stderr.count("a warning of everybody's") == 2, "the message, and the line of the script"
    for worker in range(3):
        assert done.stderr.count(f"UserWarning: a warning of worker {worker}") == 1
    if at:
        assert struck(tmp_path / "faults") == [0]
    else:
        assert lines == LINES


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_only_the_first_worker_prints_and_whoever_catches_up(pipe):
    reading, writing = pipe
    ledger = SimpleNamespace(done=5, took_part=True, group=SimpleNamespace(rank=0))
    voice = Voice(Environment(events_fd=writing), ledger, speaks=True)
    voice.print("a")
    voice.print("b")
    ledger.group.rank, ledger.done = 1, 6
    voice.print("not for us")
    ledger.took_part = False
    voice.print("c")
    Voice(Environment(events_fd=writing), ledger, speaks=False).print("never")
    events = [json.loads(line) for line in os.read(reading, 10000).splitlines()]
    assert [(event["prints"], event["at"]) for event in events] == [("a", [5, 0]), ("b", [5, 1]), ("c", [6, 1])]


def test_without_a_launcher_it_is_printed(capsys):
    ledger = SimpleNamespace(done=0, took_part=True, group=SimpleNamespace(rank=0))
    voice = Voice(Environment(), ledger, speaks=True)
    voice.print("a line")
    voice.say("a sentence")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("a line\n", "evenstep: a sentence\n")
