"""When something dies, the same bits: faults at every point, resizes, stuck and slow workers."""

import os
import re
import signal
import textwrap

import pytest

import processes
from evenstep.testing import POINTS, Fault, plant
from evenstep.testing.chaos import plan
from evenstep.testing.faults import struck
from workers import Cli, cli_run

SCRIPT = """
    import os, signal, sys, time
    import torch
    import torch.nn.functional as F
    from torch import nn
    import evenstep

    def once(path):
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def is_gone(link):
        try:
            os.kill(int(os.readlink(link)), 0)
        except FileNotFoundError:
            return False  # it has yet to come
        except ProcessLookupError:
            return True  # and the supervisor knows
        return False

    with evenstep.Run(shards=6, seed=3) as run:
        data = torch.utils.data.TensorDataset(torch.randn(50, 4), torch.randint(0, 3, (50,)), torch.arange(50.0))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)

        def function(part):
            return F.cross_entropy(model(part[0]), part[1]), {"id": part[2]}

        for epoch in range(EPOCHS):
            ids = 0.0
            for batch in run.batches(data, batch_size=16, loaders=LOADERS):
                BEFORE
                _, metrics = run.step(batch, function)
                ids += metrics["id"] * len(batch)
                scheduler.step()
                AFTER
            assert abs(ids - 49 * 50 / 2) < 1e-6, "every sample exactly once"
            found = run.evaluate(data, 20, lambda part: {"loss": F.cross_entropy(model(part[0]), part[1])})
        if run.worker == 0:
            print("loss", found["loss"])
"""


EPOCHS = 4


def training(before="pass", after="pass", epochs=EPOCHS, loaders=0):
    words = {"BEFORE": before, "AFTER": after, "EPOCHS": str(epochs), "LOADERS": str(loaders)}
    return re.sub("|".join(words), lambda match: words[match[0]], SCRIPT)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What the training ends on when nothing happens."""
    path = tmp_path_factory.mktemp("undisturbed") / "train.py"
    path.write_text(textwrap.dedent(training()))
    done = cli_run("run", "-n", "1", path)
    assert done.code == 0, done.stderr
    return [line.removeprefix("[0] ") for line in done.stdout.splitlines()]


def assert_same(done, undisturbed):
    assert done.code == 0, done.stderr
    lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert lines[-1] == undisturbed[-1], done.stderr
    if "[0] " in done.stdout:  # worker 0 may be gone for good
        assert lines == undisturbed


# ---- a worker dies ----


def test_a_step_that_is_done_again_begins_from_the_same_samples(script, tmp_path):
    text = training(epochs=1).replace("return F.cross", "part[0].mul_(0.5); return F.cross")
    found = [cli_run("run", "-n", "2", script(text))]
    fault = Fault("kill", "before update", visit=2, worker=1)
    found.append(cli_run("run", "-n", "2", script(text), variables=plant([fault], tmp_path / "faults")))
    assert struck(tmp_path / "faults") == [0]
    assert [done.stdout for done in found] == [found[0].stdout] * 2
    assert "fingerprint" in found[0].stdout


@pytest.mark.parametrize(
    ("worker", "point"),
    [
        (worker, point)
        for point in POINTS
        if point not in ("recover", "checkpoint")
        for worker in ([0] if point == "inside commit" else [0, 2])  # the first worker's alone
    ],
)
def test_a_worker_killed_at_any_point_changes_no_bit(script, tmp_path, undisturbed, worker, point):
    fault = Fault("kill", point, visit=1 if point == "join" else 5, worker=worker)
    done = cli_run("run", "-n", "3", script(training()), variables=plant([fault], tmp_path / "faults"))
    assert_same(done, undisturbed)
    assert struck(tmp_path / "faults") == [0]
    assert "was killed by SIGKILL" in done.stderr
    assert "it is replaced" in done.stderr


@pytest.mark.parametrize("visit", [2, 3, 4, 5])
def test_a_model_keeps_its_first_buffers_if_a_worker_dies_while_it_is_prepared(script, tmp_path, undisturbed, visit):
    variables = plant([Fault("kill", "exchange", visit, worker=0)], tmp_path / "faults")
    assert_same(cli_run("run", "-n", "2", script(training()), variables=variables), undisturbed)
    assert struck(tmp_path / "faults") == [0]


FIRST_STEP = 3  # the operations are join, prepare and it: its optimizer state is new when it comes to nothing


def test_optimizer_state_made_by_a_step_that_came_to_nothing_is_made_anew(script, tmp_path, undisturbed):
    variables = plant([Fault("kill", "before commit", FIRST_STEP, worker=0)], tmp_path / "faults")
    assert_same(cli_run("run", "-n", "3", script(training()), variables=variables), undisturbed)
    assert struck(tmp_path / "faults") == [0]


def test_what_is_prepared_after_a_step_was_tried_again_lies_at_one_place_for_all(script, tmp_path):
    second = """
        second = nn.Linear(4, 3)
        second, adam = run.prepare(second, torch.optim.Adam(second.parameters(), 1e-2))
        for batch in run.batches(data, batch_size=16, epochs=2):
            time.sleep(0.1)  # so that the new worker takes part
            run.step(batch, lambda part: F.cross_entropy(second(part[0]), part[1]), adam)
    """
    path = script(training(epochs=1).replace("batch, function)", "batch, function, optimizer)") + second)
    quiet = cli_run("run", "-n", "1", path)
    variables = plant([Fault("kill", "before commit", FIRST_STEP, worker=0)], tmp_path / "faults")
    done = cli_run("run", "-n", "3", path, variables=variables)
    assert_same(done, quiet.stdout.replace("[0] ", "").splitlines())


def test_the_fingerprint_is_shown_even_if_the_first_worker_dies_at_the_very_end(script, tmp_path, undisturbed):
    operations = 1 + 1 + EPOCHS * (4 + 1) + 1  # join, prepare, steps and an evaluation for each epoch, the end
    variables = plant([Fault("kill", "inside commit", operations, worker=0)], tmp_path / "faults")
    done = cli_run("run", "-n", "3", script(training()), variables=variables)
    assert done.code == 0
    assert done.stdout.splitlines()[-1] == undisturbed[-1]
    assert struck(tmp_path / "faults") == [0]


def test_workers_killed_while_they_recover_change_no_bit(script, tmp_path, undisturbed):
    faults = [Fault("kill", "forward", 5), Fault("kill", "recover", 1), Fault("kill", "recover", 1)]
    variables = plant(faults, tmp_path / "faults", in_order=True)
    assert_same(cli_run("run", "-n", "4", script(training()), variables=variables), undisturbed)
    assert struck(tmp_path / "faults") == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 3])
def test_all_workers_may_die_at_once(script, tmp_path, undisturbed, count):
    variables = plant([Fault("kill all", "inside update", 5), Fault("kill all", "backward", 7)], tmp_path / "faults")
    assert_same(cli_run("run", "-n", str(count), script(training()), variables=variables), undisturbed)
    assert struck(tmp_path / "faults") == [0, 1]


ENDS = {
    "sys.exit(3)": "ended with exit code 3",
    "sys.exit('no data here')": "no data here",
    "os._exit(5)": "ended with exit code 5",
    "raise ValueError('a bad day')": "ValueError: a bad day",
    "__import__('ctypes').string_at(0)": "was killed by SIGSEGV",
    "os.kill(os.getpid(), 40)": "was killed by signal 40",
    "sys.exit(0)": "ended with exit code 0",
    "os._exit(0)": "ended with exit code 0",
}


@pytest.mark.parametrize("how", ENDS)
def test_however_a_worker_ends_in_the_middle_it_is_replaced(script, tmp_path, undisturbed, how):
    before = f"if run.version == 5 and run.worker == 1 and once(r'{tmp_path}/once'): {how}"
    done = cli_run("run", "-n", "3", script(training(before)))
    assert_same(done, undisturbed)
    assert ENDS[how] in done.stderr


def test_an_error_that_comes_again_fails_the_run_and_is_shown_last(script):
    done = cli_run("run", "-n", "3", script(training("if run.version == 5: raise ValueError('always')")))
    assert done.code == 1
    assert done.stderr.rstrip().endswith("ValueError: always")
    assert "fingerprint" not in done.stdout


def test_a_worker_that_cannot_catch_up_is_done_without(script, tmp_path, undisturbed):
    before = f"""if run.version == 5 and run.worker == 1:
                    if not once(r'{tmp_path}/once'): os.symlink(str(os.getpid()), r'{tmp_path}/second')
                    sys.exit(3)
                while run.version == 8 and not is_gone(r'{tmp_path}/second'): time.sleep(0.01)"""
    done = cli_run("run", "-n", "3", script(training(before)))
    assert_same(done, undisturbed)
    assert "before it had caught up; the others go on without it" in done.stderr


def test_nobody_is_replaced_if_so_asked(script, tmp_path, undisturbed):
    variables = plant([Fault("kill", "forward", 5, worker=0), Fault("kill", "forward", 12, worker=1)], tmp_path / "f")
    done = cli_run("run", "-n", "3", "--no-replace", script(training()), variables=variables)
    assert_same(done, undisturbed)
    assert "2 go on" in done.stderr
    assert "1 go on" in done.stderr
    done = cli_run(
        "run",
        "-n",
        "2",
        "--max-restarts",
        "1",
        script(training()),
        variables=plant([Fault("kill all", "forward", 5), Fault("kill all", "forward", 8)], tmp_path / "g"),
    )
    assert done.code == 137
    assert "fingerprint" not in done.stdout


def test_loader_processes_of_the_dead_die_and_the_data_is_the_same(script, tmp_path, undisturbed):
    variables = plant([Fault("kill", "forward", 5), Fault("scale", "forward", 12, workers=2)], tmp_path / "faults")
    done = cli_run("run", "-n", "3", script(training(loaders=2)), variables=variables)
    assert_same(done, undisturbed)


def test_a_worker_killed_after_its_run_does_the_rest_again(script, tmp_path, undisturbed):
    rest = f"""
    if run.worker == 0 and once(r'{tmp_path}/once'):
        os.kill(os.getpid(), signal.SIGKILL)
    if run.worker == 0:
        print("the rest")
    """
    for count in ("1", "2"):
        done = cli_run("run", "-n", count, script(training() + rest))
        assert done.code == 0
        assert sorted(done.stdout.splitlines()) == sorted([f"[0] {undisturbed[0]}", undisturbed[1], "[0] the rest"])
        assert "it is replaced" in done.stderr
        (tmp_path / "once").unlink()


# ---- a worker hangs, or is slow ----


def test_a_stopped_worker_is_named_with_its_stack_and_replaced(script, tmp_path, undisturbed):
    variables = plant([Fault("stop", "backward", 5, worker=1)], tmp_path / "faults")
    done = cli_run("run", "-n", "3", script(training()), variables=variables)
    assert_same(done, undisturbed)
    (sentence,) = (line for line in done.stderr.splitlines() if "has been stopped for" in line and "last ex" in line)
    seconds, step, shard = re.search(r"stopped for ([\d.]+) s at step (\d+), shard (\d), its last", sentence).groups()
    assert float(seconds) >= 1
    assert (int(step), int(shard) in (2, 3)) == (5, True)  # it had nothing to do in step 3
    assert "[1]   File" in done.stderr
    assert "_strike" in done.stderr


def test_a_stuck_step_is_given_up_after_the_step_timeout(script, tmp_path, undisturbed):
    before = f"stuck = run.version == 5 and run.worker == 1 and once(r'{tmp_path}/once')"
    text = training(before).replace(
        "def function(part):",
        "def function(part):\n            if stuck: time.sleep(600)",
    )
    done = cli_run("run", "-n", "3", "--weights", "1,1,1", "--step-timeout", "3", script(text))
    assert_same(done, undisturbed)
    assert re.search(r"worker 1 \(pid \d+\) .* at step 5, shard 2, its last exchange was .*; its stack:", done.stderr)
    assert "in function" in done.stderr  # of its stack
    assert done.stderr.count("it is replaced") == 1, "those who waited for it are not to blame"


def test_a_worker_that_hangs_while_it_catches_up_does_not_keep_the_run_from_ending(script, tmp_path, undisturbed):
    before = f"""if run.worker == 1 and run.version == 3 and os.path.exists(r'{tmp_path}/once'): time.sleep(600)
                if run.worker == 1 and run.version == 5 and once(r'{tmp_path}/once'): os.kill(os.getpid(), 9)"""
    done = cli_run("run", "-n", "3", "--step-timeout", "1", script(training(before)))
    assert_same(done, undisturbed)
    assert re.search(r"worker 1 \(pid \d+\) has not caught up [\d.]+ s after the others ended", done.stderr)


def test_a_worker_whose_script_catches_the_error_of_a_step_is_replaced_and_the_error_told(script, undisturbed):
    text = training("bad = run.version == 5 and run.worker == 1").replace(
        "_, metrics = run.step(batch, function)",
        """
                try:
                    _, metrics = run.step(batch, (lambda part: 1 / 0) if bad else function)
                except ZeroDivisionError:
                    continue""",
    )
    done = cli_run("run", "-n", "2", script(text))
    assert_same(done, undisturbed)
    assert "ZeroDivisionError: division by zero" in done.stderr


def test_schedulers_of_a_worker_that_catches_up_do_not_complain(script, tmp_path):
    text = training(epochs=2).replace("torch.optim.Adam(", "torch.optim.SGD(")  # without any state
    variables = plant([Fault("kill", "forward", 5, worker=0)], tmp_path / "faults")
    done = cli_run("run", "-n", "2", script(text), variables=variables)
    assert done.code == 0
    assert "lr_scheduler.step()" not in done.stderr


def test_the_shards_of_a_slow_worker_move(script, undisturbed):
    text = training().replace("return F.cross", "time.sleep(0.03 * (run.worker == 1)); return F.cross")
    done = cli_run("run", "-n", "2", script(text))
    assert_same(done, undisturbed)
    moves = re.findall(
        r"shards move to faster workers: worker 0: .* s for (\d) shards, now (\d); worker 1: .* for (\d) .* now (\d)",
        done.stderr,
    )
    assert (moves[0][0], moves[0][2]) == ("3", "3")
    assert (moves[-1][1], moves[-1][3]) == ("5", "1"), "at once, or step by step where the other waits for a core"


def test_weights_share_out_the_shards(script, undisturbed):
    done = cli_run(
        "run",
        "-n",
        "3",
        "--weights",
        "4,1,1",
        script(training("assert len(run.local_shards) == (4, 1, 1)[run.worker]")),
    )
    assert_same(done, undisturbed)


# ---- more and fewer workers ----


def test_workers_come_and_go_by_command_and_by_signal(script, tmp_path, undisturbed):
    wait = "time.sleep(0.01)"  # only those who take part do, so that who comes later catches up
    there = f"lambda shard: torch.tensor([float(os.path.exists(r'{tmp_path}/go'))]) if {wait} is None else None"
    hold = f"while run.version == 6 and not run.exchange('go', {there}): pass"  # all decide alike
    with Cli("run", "-n", "2", script(training(before=hold))) as cli:

        def workers():
            return len([p for p in processes.descendants(cli.pid) if processes.is_alive(p)])

        assert processes.until(lambda: workers() == 2)
        assert processes.until(lambda: "generation 1" in status(cli.pid))
        done = cli_run("scale", "4", "--job", str(cli.pid))
        assert (done.code, done.stdout) == (0, "evenstep: 4 workers from the next step on\n")
        assert processes.until(lambda: workers() == 4)
        refused = cli_run("scale", "7", "--job", str(cli.pid))
        assert refused.code == 2
        assert "expected 1 to 6: every worker needs a shard" in refused.stderr
        cli.kill(signal.SIGUSR2)
        assert processes.until(lambda: workers() == 3)
        cli.kill(signal.SIGUSR1)
        assert processes.until(lambda: workers() == 4)
        assert cli_run("scale", "1", "--job", str(cli.pid)).code == 0
        (tmp_path / "go").touch()
        done = cli.wait()
    assert_same(done, undisturbed)
    assert "1 workers from now on" in done.stderr


def status(pid):
    return cli_run("status", "--job", str(pid)).stdout


def test_a_job_that_is_not_there_is_a_sentence():
    done = cli_run("scale", "3", "--job", str(os.getpid()))
    assert done.code == 2
    assert "no job answers as process" in done.stderr


# ---- chaos ----


def test_a_short_chaos_ends_on_the_same_bits(script, tmp_path, undisturbed):
    faults = plan(11, 8)
    done = cli_run(
        "run", "-n", "3", "--step-timeout", "10", script(training()), timeout_s=100,
        variables=plant(faults, tmp_path / "faults", in_order=True),
    )  # fmt: skip
    assert_same(done, undisturbed)
    assert len(struck(tmp_path / "faults")) >= 4


def test_a_plan_is_fixed_by_its_seed():
    assert plan(5, 100) == plan(5, 100) != plan(6, 100)
    assert len(plan(5, 100)) == 100
