"""A machine that computes wrong, among others: it is named, it goes, and the weights are those of a healthy run."""

import re

import pytest

from evenstep.testing import Fault, plant
from workers import WorkersFailed, cli_run, run_workers

SCRIPT = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    import evenstep

    with evenstep.Run(shards=6, seed=7, timeout_s=20.0) as run:
        norm = nn.BatchNorm1d(16) if "norm" in sys.argv else nn.Tanh()
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), nn.Linear(16, 4))
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        for _ in range(6):
            batch = torch.randn(24, 8), torch.randint(0, 4, (24,))
            run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
"""
ONCE = Fault("flip", "gradient", visit=17, worker=1, bit=1000)
ALWAYS = Fault("flip", "gradient", visit=17, worker=1, bit=1000, lasting=True)
FAULTS = {
    "a gradient": ("tanh", [ONCE]),
    "all gradients from then on": ("tanh", [ALWAYS]),
    "statistics": ("norm", [Fault("flip", "statistics", visit=9, worker=1, bit=60)]),
    "a buffer": ("norm", [Fault("flip", "buffer", visit=7, worker=1, bit=60)]),
}


@pytest.fixture
def trained(script, tmp_path):
    """Trains on three workers, or so many, under faults."""
    path, number = script(SCRIPT), iter(range(100))

    def train(*options, model="tanh", faults=(), workers=3):
        variables = plant(faults, tmp_path / f"faults{next(number)}")
        return cli_run("run", "-n", str(workers), *options, str(path), model, variables=variables)

    return train


@pytest.mark.parametrize("model", ["tanh", "norm"])
def test_a_healthy_run_says_nothing_and_ends_on_the_same_bits(trained, model):
    expected, found = trained(model=model), trained("--recheck", "1", model=model)
    assert found.code == expected.code == 0
    assert found.stdout == expected.stdout
    assert found.stderr == ""


@pytest.mark.parametrize(("model", "faults"), FAULTS.values(), ids=FAULTS)
def test_whoever_computes_wrong_is_named_and_goes(trained, model, faults):
    expected, found = trained(model=model), trained("--recheck", "1", model=model, faults=faults)
    assert found.code == 0, found.stderr
    assert found.stdout == expected.stdout
    point = "gradient of '" if faults[0].point == "gradient" else faults[0].point
    line, *others = found.stderr.splitlines()
    assert re.fullmatch(
        rf"evenstep: worker 1 \(machine \S+, process \d+, core \d+\) computed wrong in step \d, shard \d, {point}.*: "
        r"element \[.*\] is \S+ \(bits 0x[0-9a-f]+\), not \S+ \(bits 0x[0-9a-f]+\); it is dismissed, and the others do "
        r"the step again",
        line,
    )
    assert others == ["evenstep: 2 workers from now on: 0, 2"]


def test_the_first_worker_too(trained):
    fault = Fault("flip", "gradient", visit=17, worker=0, bit=1000, lasting=True)
    expected, found = trained(), trained("--recheck", "1", faults=[fault])
    assert (found.code, found.stdout) == (0, expected.stdout)
    assert "evenstep: 2 workers from now on: 1, 2" in found.stderr


def test_one_that_must_be_tolerated_stays_until_it_was_wrong_too_often(trained):
    expected, found = trained(), trained("--recheck", "1", "--tolerate-wrong", "2", faults=[ALWAYS])
    assert (found.code, found.stdout) == (0, expected.stdout)
    said = [line.rpartition("; ")[2] for line in found.stderr.splitlines() if "computed wrong" in line]
    assert said[:2] == [f"tolerated, {n} of 2: the step is done again" for n in (1, 2)]
    assert said[2:] == ["it is dismissed, and the others do the step again"]


def test_of_two_workers_one_that_was_wrong_once_is_named(trained):
    expected, found = trained(), trained("--recheck", "1", faults=[ONCE], workers=2)
    assert (found.code, found.stdout) == (0, expected.stdout)
    assert "worker 1 (" in found.stderr


def test_of_two_that_never_agree_nobody_can_say_and_the_run_stops(trained):
    found = trained("--recheck", "1", faults=[ALWAYS], workers=2)
    assert (found.code, found.stdout) == (12, "")
    assert "do not agree on step 0, shard" in found.stderr
    assert "without a majority nobody can say which: nothing of the step was committed" in found.stderr
    assert "Traceback" not in found.stderr


def test_it_is_found_within_twice_as_many_steps_as_lie_between_two_rechecks(trained):
    found = trained("--recheck", "3", faults=[ALWAYS])
    assert found.code == 0
    assert int(re.search(r"computed wrong in step (\d+)", found.stderr)[1]) < 2 * 3


def test_the_only_worker_is_named_too_and_the_run_stops(trained):
    found = trained("--recheck", "1", faults=[Fault("flip", "gradient", visit=9, bit=3)], workers=1)
    assert found.code == 12
    assert "the only worker computes steps twice by itself, which finds" in found.stderr
    assert "worker 0 (machine" in found.stderr
    assert "train without that machine" in found.stderr


def test_a_parameter_that_changes_by_itself_is_taken_back_from_the_checkpoint_of_that_step(script, tmp_path):
    flip = Fault("flip", "parameter", visit=4 * 4 + 1, worker=0, bit=70)  # of four, before the fifth step
    expected = cli_run("run", "-n", "1", str(script(SCRIPT)))
    path = script(
        SCRIPT.replace(
            "for _ in range(6)", f"run.checkpoint({str(tmp_path / 'saved')!r}, every=4)\n        for _ in range(6)"
        )
    )
    found = cli_run("run", "-n", "1", "--recheck", "1", str(path), variables=plant([flip], tmp_path / "faults"))
    assert (found.code, found.stdout) == (0, expected.stdout), found.stderr
    assert re.search(
        r"at step 4 worker 0 \(machine \S+, process \d+, core \d+\) holds a wrong 'model\.0\.weight': element "
        r"\[0, 2\] is \S+ \(bits \S+\), not \S+ \(bits \S+\); it is taken back from the checkpoint of this step\n",
        found.stderr,
    )


def test_without_a_copy_of_that_step_the_run_stops(trained):
    found = trained("--recheck", "1", faults=[Fault("flip", "parameter", visit=17, bit=70)], workers=1)
    assert (found.code, found.stdout) == (12, "")
    assert "at step 4 'model.0.weight' is not what the step before left, and nobody else has it" in found.stderr


def test_code_that_is_not_deterministic_is_told_apart(script):
    path = script(SCRIPT.replace("F.cross_entropy(", "run.version * 0 + next(clock) * F.cross_entropy(").replace(
        "import evenstep\n", "import evenstep\n    import itertools\n    clock = itertools.count(1)\n", 1
    ))  # fmt: skip
    found = cli_run("run", "-n", "3", "--recheck", "1", str(path))
    assert found.code == 4
    assert "the step function is not deterministic" in found.stderr
    assert "computed wrong" not in found.stderr


def test_where_nobody_replaces_workers_the_run_stops_on_all_of_them():
    def body(worker):
        import torch

        import evenstep
        from evenstep.core import points
        from evenstep.testing.faults import flip

        visits = iter(range(1000))
        if worker == 1:
            points.arm(None, lambda what, tensor: flip(tensor, 5) if next(visits) == 3 else None)
        with evenstep.Run(shards=3, recheck=1, quiet=True, timeout_s=10.0) as run:
            model, _ = run.prepare(model := torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), 0.1))
            run.step(torch.ones(6, 2), lambda part: model(part).square().mean())

    with pytest.raises(WorkersFailed) as failed:
        run_workers(3, body)
    assert {outcome.kind for outcome in failed.value.outcomes} <= {"WrongError", "PeerError"}
    assert "worker 1 (machine" in str(failed.value)


def test_options_that_make_no_sense_are_refused(script):
    for option in ("--recheck", "--tolerate-wrong"):
        found = cli_run("run", option, "-1", str(script("")))
        assert found.code == 2
        assert f"{option} -1, expected a number that is not negative" in found.stderr
