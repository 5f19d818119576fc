"""The parts of a soak: what grows is seen, what comes and goes is not; and each part can fail."""

import os
import signal
import subprocess
import time

import pytest

import processes
from evenstep.testing.soak import grouped, watch
from evenstep.testing.soak.__main__ import soak, table
from evenstep.testing.soak.burden import SoakResult, end, start
from evenstep.testing.soak.trained import Trained
from evenstep.testing.soak.watch import Usage, Watch, usage


def watched(monkeypatch, *lives):
    """A watch that has looked at processes which used this in turn."""
    seen = Watch()
    for pid, looks in enumerate(lives):
        for look in looks:
            monkeypatch.setattr(watch, "usage", lambda _, look=look: look)
            seen.look({"it": [pid]})
    return seen.growth("it")


def steady(number, memory=100.0):
    return [Usage(memory + 50 * (n % 3 > 0), 10 + 9 * (n % 4 > 0), 4 + n % 2) for n in range(number)]


def test_what_comes_and_goes_is_no_growth(monkeypatch):
    found = watched(monkeypatch, steady(90))
    assert found.grown == ()
    assert (found.lives, found.peak_mib) == (1, 150.0)
    assert found.before == found.after == Usage(100.0, 10, 4)


@pytest.mark.parametrize(
    ("grows", "name"),
    [(lambda n: (n, 0, 0), "memory"), (lambda n: (0, n // 4, 0), "descriptors"), (lambda n: (0, 0, n // 4), "threads")],
)
def test_what_grows_is_named_also_in_one_of_several_lives(monkeypatch, grows, name):
    leaks = [
        Usage(look.memory_mib + more[0], look.descriptors + more[1], look.threads + more[2])
        for look, more in zip(steady(90), map(grows, range(90)), strict=True)
    ]
    found = watched(monkeypatch, steady(90), leaks, steady(40))
    assert found.grown == (name,)
    assert found.lives == 3


def test_becoming_warm_is_no_growth_and_a_short_life_says_nothing(monkeypatch):
    cold = [Usage(20.0, 3, 1)] * 4
    assert watched(monkeypatch, cold + steady(40)).grown == ()
    assert watched(monkeypatch, cold + steady(4)).grown == ()


def test_what_a_process_uses_is_read_from_the_system():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert processes.until(lambda: processes.command_line(process.pid) == "sleep 60")
        found = usage(process.pid)
        assert 0 < found.memory_mib < 20
        assert found.threads == 1
        assert found.descriptors >= 3
        process.kill()
    assert usage(process.pid) is None


def test_a_program_that_does_not_want_to_end_is_ended(tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
    log = tmp_path / "log"
    process = start(["-c", code], log)
    assert processes.until(lambda: log.exists() and "here" in log.read_text())
    assert end(process, patience_s=0.1) == -signal.SIGKILL
    quick = start(["-c", "raise SystemExit(7)"], log)
    assert end(quick, number=0) == 7


class Fake:
    """A burden of one process."""

    def __init__(self, name, good):
        self.name, self._good, self.turns = name, good, 0

    def begin(self):
        self._process = subprocess.Popen(["sleep", "60"])

    def turn(self):
        self.turns += 1

    def subjects(self):
        return {self.name: [self._process.pid]}

    def finish(self):
        end(self._process)
        return SoakResult(self._good, f"{self.turns} turns", "well" if self._good else "BADLY")


@pytest.mark.parametrize(("good", "seconds"), [(True, 0.5), (False, 0.0)])
def test_burdens_go_on_beside_each_other_and_one_table_says_how(good, seconds):
    burdens = [Fake("first", True), Fake("second", good)]
    begun = time.monotonic()
    outcomes, seen = soak(burdens, seconds)
    assert time.monotonic() - begun < 60
    assert all(burden.turns for burden in burdens), "how slow the machine may be"
    text, all_well = table(burdens, outcomes, seen, [])
    assert all_well is good
    assert text.endswith("all is well" if good else "SOMETHING IS WRONG")
    assert [line.split()[0] for line in text.splitlines()[:2]] == ["first", "second"]
    assert sum(line.endswith("  no") for line in text.splitlines()) == 2
    text, all_well = table(burdens, outcomes, seen, ["process 7"])
    assert not all_well
    assert "left behind: process 7" in text


@pytest.mark.long
def test_a_job_that_loses_a_rank_is_looked_at(tmp_path):
    seconds, wrong = grouped._lose_a_rank(tmp_path, 1)
    assert wrong == []
    assert 0 <= seconds < 20


@pytest.mark.long
def test_a_rank_that_blames_another_is_what_a_job_is_looked_at_for(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped, "_be_left", lambda place, rank, loser, *_: 3 if rank != loser else os._exit(9))
    _, wrong = grouped._lose_a_rank(tmp_path, 1)
    assert len(wrong) == 2
    assert all("ended with 3" in each for each in wrong)


def test_the_training_meets_only_faults_that_it_must_survive(tmp_path):
    planned = Trained(tmp_path, 60.0, 3)._planned
    assert len(planned) > 100
    assert {fault.kind for fault in planned} == {"kill", "kill all", "stop", "slow", "scale"}
