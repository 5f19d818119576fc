"""The launcher from the outside: what it shows, what it returns, and that nothing is left of it."""

import os
import signal
from collections.abc import Iterable

import pytest

import processes
from evenstep.launch import crew
from workers import Cli, cli_run

TRAIN = """
    import os, signal, sys, time
    import torch
    import evenstep

    def train(run, loaders=0, each=lambda number: None):
        model = torch.nn.Linear(3, 2)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        data = torch.utils.data.TensorDataset(torch.randn(64, 3))
        for number, batch in enumerate(run.batches(data, batch_size=16, epochs=1000, loaders=loaders)):
            run.step(batch, lambda part: model(part[0]).square().mean())
            each(number)
"""


def shared_memory(family: Iterable[int]) -> list[str]:
    """What these processes have in /dev/shm: torch's loaders name files by themselves; others have some too."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in family))]


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(crew, "_GRACE_S", 0.2)  # forked launchers inherit it


# ---- what it shows ----


def test_a_script_runs_as_if_alone_and_its_lines_come_prefixed_and_logged(script, tmp_path):
    script("VALUE = 42", "beside.py")
    path = script(
        """
        import atexit, os, sys, threading, time
        import beside
        print("args", sys.argv[1:], __name__, os.path.basename(__file__), beside.VALUE)
        print("to stderr", file=sys.stderr)
        print("stdin", repr(sys.stdin.read()))
        sys.stdout.flush()
        os.write(1, b"bytes \\xff\\xfe \\xc3\\xa9\\n")
        print("surrogate \\udcff", file=sys.stderr)
        def late():
            while threading.main_thread().is_alive():
                time.sleep(0.01)
            print("late thread")
        threading.Thread(target=late).start()
        atexit.register(lambda: print("no line feed at the end", end=""))
        """
    )
    args = ["--foo", "-n", "3", "--", "--shards", "x y", "-h"]
    done = cli_run("run", "-n", "2", "--log-dir", tmp_path / "a" / "logs", path, *args)
    assert done.code == 0, done.stderr
    for worker in range(2):
        mine = [line[4:] for line in done.raw.splitlines() if line.startswith(b"[%d] " % worker)]
        expected = [
            f"args {args} __main__ train.py 42".encode(),
            b"stdin ''",
            b"bytes \xff\xfe \xc3\xa9",
            b"late thread",
            b"no line feed at the end",
        ]
        assert mine == expected
        assert f"[{worker}] to stderr\n" in done.stderr
        assert f"[{worker}] surrogate \\udcff\n" in done.stderr
        logged = (tmp_path / "a" / "logs" / f"worker-{worker}.log").read_bytes().splitlines()
        assert [line for line in logged if b"stderr" not in line and b"surrogate" not in line] == expected
        assert b"to stderr" in logged


def test_very_much_output_arrives_whole_and_in_order(script):
    path = script(
        """
        import sys
        for number in range(20_000):
            print(number, "x" * 50)
        sys.stdout.write("y" * 5_000_000)
        """
    )
    done = cli_run("run", "-n", "2", path)
    assert done.code == 0
    for worker in range(2):
        mine = [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{worker}] ")]
        assert mine[:20_000] == [f"{number} {'x' * 50}" for number in range(20_000)]
        assert "".join(mine[20_000:]) == "y" * 5_000_000


def test_a_finished_run_shows_one_progress_and_ends_on_the_fingerprint(script):
    path = script(
        TRAIN
        + """
    for number in range(2):
        with evenstep.Run(shards=4, seed=number) as run:
            model = torch.nn.Linear(3, 2)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for batch in run.batches(torch.utils.data.TensorDataset(torch.randn(64, 3)), batch_size=16, epochs=2):
                run.step(batch, lambda part: model(part[0]).square().mean())
            print("mine", run.fingerprint())
    """
    )
    done = cli_run("run", "-n", "2", path)
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    mine = [line.split()[-1] for line in lines if line.startswith("[0] mine")]
    assert [line for line in lines if line.startswith("fingerprint ")] == [f"fingerprint {each}" for each in mine]
    assert lines[-1] == f"fingerprint {mine[1]}"
    assert [line[:9] for line in done.stderr.splitlines()] == ["epoch 1/2", "epoch 2/2"] * 2


# ---- how it fails ----


def test_the_error_of_the_worker_that_failed_is_shown_last_and_whole(script, tmp_path):
    path = script(
        TRAIN
        + """
    with evenstep.Run(shards=4) as run:
        if os.environ["EVENSTEP_WORKER"] == "1":
            raise ValueError("a bad day")
        train(run)
    """
    )
    done = cli_run("run", "-n", "3", "--log-dir", tmp_path / "logs", path)
    assert done.code == 1
    head, _, error = done.stderr.partition("evenstep: worker 1 (pid ")
    assert "Traceback" not in head
    assert "ended with exit code 1\nTraceback (most recent call last):\n" in error
    assert error.rstrip().endswith("ValueError: a bad day")
    assert f'File "{path}"' in error
    assert "runpy" not in error
    assert "supervisor" not in error
    assert "fingerprint" not in done.stdout
    assert (tmp_path / "logs" / "worker-1.log").read_text().rstrip().endswith("ValueError: a bad day")


@pytest.mark.parametrize(
    ("options", "run", "sentence"),
    [
        pytest.param(["-n", "3"], "Run(shards=2)", "3 workers but only 2 shards", id="more workers than shards"),
        pytest.param(
            ["-n", "2", "--shards", "4"], "Run(shards=8)", "--shards 4 but the script says", id="contradiction"
        ),
        pytest.param(["-n", "2"], "Run(shards=0)", "shards=0, expected a whole number from 1 to", id="no shards"),
    ],
)
def test_a_mistake_in_the_settings_is_one_sentence(script, options, run, sentence):
    done = cli_run("run", *options, script(f"import evenstep\nevenstep.{run}"))
    assert done.code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("evenstep: ")
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_worker_that_ends_before_it_joins_is_noticed(script):
    path = script(
        """
        import os, evenstep
        if os.environ["EVENSTEP_WORKER"] == "0":
            raise SystemExit
        evenstep.Run(shards=2)
        """
    )
    done = cli_run("run", "-n", "2", path)
    assert done.code == 7
    assert "worker 0 (pid " in done.stderr
    assert "it ended while the others waited for it" in done.stderr


def test_logs_that_cannot_be_written_stop_everything_before_it_starts(script, tmp_path):
    path = script(f"open({str(tmp_path / 'started')!r}, 'w')")
    (tmp_path / "file").touch()
    (tmp_path / "logs" / "worker-1.log").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "logs"):
        done = cli_run("run", "-n", "2", "--log-dir", folder, path)
        assert done.code == 2
        assert done.stderr.startswith(f"evenstep: --log-dir {folder}")
        assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "started").exists()


# ---- how it is stopped ----

FOREVER = (
    TRAIN
    + """
    def say(number):
        if number == 3:
            print("training")
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)

    with evenstep.Run(shards=4) as run:
        train(run, loaders=2, each=say)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_leaves_no_process_and_no_memory(script, number):
    path = script(FOREVER)
    goes_on = (
        path if number != signal.SIGKILL else "no file"
    )  # a loader that is killed in a batch may leave torch's file
    with Cli("run", "-n", "2", path, goes_on) as cli:
        cli.until_it_says("training", times=2)
        family = processes.descendants(cli.pid)
        assert len(family) == 2 + 2 * 2, "two workers with two loaders each"
        assert number != signal.SIGKILL or processes.until(lambda: not shared_memory(family))
        cli.kill(number)
        done = cli.wait()
        assert processes.until(lambda: not any(map(processes.is_alive, family)))
    assert shared_memory(family) == []
    if number == signal.SIGKILL:
        assert done.code == -number
    else:
        assert done.code == 75
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"evenstep: stopped by {number.name} after step ")
        assert last.endswith("; nothing was saved")
        assert "Traceback" not in done.stderr


def test_loader_processes_die_with_their_worker(script, tmp_path):
    with Cli("run", "-n", "2", "--no-replace", script(FOREVER), tmp_path / "go") as cli:
        cli.until_it_says("training", times=2)
        family = processes.descendants(cli.pid)
        victim = max(pid for pid in family if len(processes.descendants(pid)) == 2)
        cli_of_victim = set(processes.descendants(victim))
        assert processes.until(lambda: not shared_memory(family))
        os.kill(victim, signal.SIGKILL)
        assert processes.until(lambda: not any(map(processes.is_alive, cli_of_victim)))
        (tmp_path / "go").touch()
        cli.kill(signal.SIGTERM)
        done = cli.wait()
        assert processes.until(lambda: not any(map(processes.is_alive, family)))
    assert done.code == 75
    assert f"(pid {victim}) was killed by SIGKILL" in done.stderr
    assert shared_memory(family) == []


def test_workers_that_ignore_the_request_or_are_stopped_are_killed(script, short_grace):
    path = script(
        """
        import os, signal, sys, time
        stops = os.environ["EVENSTEP_WORKER"] == "1"
        signal.signal(signal.SIGTERM, (lambda *_: os.kill(os.getpid(), signal.SIGSTOP)) if stops else signal.SIG_IGN)
        print("here", flush=True)
        time.sleep(600)
        """
    )
    with Cli("run", "-n", "2", path) as cli:
        cli.until_it_says("here", times=2)
        cli.kill(signal.SIGTERM)
        done = cli.wait()
    assert done.code == 143
    assert done.stderr == "evenstep: stopped by SIGTERM\n"


def test_workers_that_do_not_hear_of_a_failure_are_terminated(script, short_grace):
    path = script(
        """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "600"])
        print("started", flush=True)
        if os.environ["EVENSTEP_WORKER"] == "1":
            sys.exit(9)
        time.sleep(600)
        """
    )
    done = cli_run("run", "-n", "2", path)  # the children must go too: the fixture looks for them
    assert done.code == 9


def test_what_a_script_leaves_running_does_not_keep_the_launcher(script, tmp_path):
    path = script(
        f"""
        import os, subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # it holds our standard output open
        open(f"{tmp_path}/child-{{os.environ['EVENSTEP_WORKER']}}", "w").write(str(child.pid))
        print("left alone", end="")
        os._exit(0) if child.poll() else None
        child.returncode = 0  # or Python warns that it still runs
        """
    )
    done = cli_run("run", "-n", "2", path)
    for pid in tmp_path.glob("child-*"):
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert done.code == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] left alone", "[1] left alone"]


def test_a_script_without_a_run_is_told_that_it_ran_several_times(script):
    done = cli_run("run", "-n", "2", script("print('hello')"))
    assert done.code == 0
    assert sorted(done.stdout.split()) == ["[0]", "[1]", "hello", "hello"]
    assert "made no evenstep.Run: 2 workers each ran all of it by themselves; train inside" in done.stderr
    assert "made no" not in cli_run("run", "-n", "1", script("print('hello')")).stderr


def test_a_worker_that_crashes_in_the_same_step_every_time_ends_the_run(script):
    """Else a wrong instruction, or a library with a bug, would be tried for ever."""
    crash = "    os.kill(os.getpid(), signal.SIGSEGV) if number == 2 else None"
    path = script(
        TRAIN + f"\n    def each(number):\n    {crash}\n    with evenstep.Run() as run: train(run, each=each)\n"
    )
    done = cli_run("run", "-n", "1", path)
    assert done.code == 128 + signal.SIGSEGV
    assert done.stderr.count("was killed by SIGSEGV") == 4
    assert "like 3 before it, with no step committed in between" in done.stderr.splitlines()[-1]
