"""Out of memory: a worker goes, and not its supervisor; it is said, and one that would starve again ends the run."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

import processes
from evenstep.launch.memory import Starvation, go_first
from workers import Cli, cli_run

CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


# ---- what the system says ----


def fake(tmp_path: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup with these files, of a process in these cgroups."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/self/oom_score_adj": "0\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


PLACES = {
    "the second version": ("0::/job\n", "cgroup/job/memory.events", "low 0\noom 9\noom_kill {}\n"),
    "the first": ("4:memory:/job\n0::/\n", "cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "neither": ("", "proc/vmstat", "nr_free_pages 5\noom_kill {}\n"),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_process_that_starved_is_counted_once(tmp_path, place):
    cgroup, name, text = PLACES[place]
    proc, cgroups = fake(tmp_path, cgroup, {name: text.format(3)})
    starvation = Starvation(proc, cgroups)
    assert not starvation.struck()
    (tmp_path / name).write_text(text.format(5))
    assert [starvation.struck() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": f"MemTotal:  {256 << 20} kB\n"}, 2),
        ({"proc/meminfo": f"MemTotal:  {8 << 20} kB\n", "cgroup/job/memory.max": f"{4096 * MIB}\n"}, 125),
        ({"proc/meminfo": f"MemTotal:  {8 << 20} kB\n", "cgroup/job/memory.max": "max\n"}, 63),
        ({"cgroup/memory/job/memory.limit_in_bytes": f"{300 * MIB}\n"}, 1000),
        ({}, 1000),
    ],
)
def test_a_worker_goes_before_its_supervisor_and_not_before_everything_else(tmp_path, files, expected):
    proc, cgroups = fake(tmp_path, "4:memory:/job\n0::/job\n", files)
    go_first(proc, cgroups)
    assert int((proc / "self/oom_score_adj").read_text()) == expected


def test_where_the_system_says_nothing_nothing_is_concluded(tmp_path):
    assert not Starvation(tmp_path, tmp_path).struck()
    go_first(tmp_path, tmp_path)


# ---- what happens ----


@contextlib.contextmanager
def cgroup(limit_bytes: int):
    """A cgroup with so much memory, of whichever version there is; the function that puts a process into it."""
    first = CGROUPS / "memory" / f"evenstep-{os.getpid()}"
    second = CGROUPS / f"evenstep-{os.getpid()}"
    try:
        if (CGROUPS / "memory").is_dir():
            first.mkdir()
            (first / "memory.limit_in_bytes").write_text(str(limit_bytes))
            folder = first
        else:
            second.mkdir()
            (second / "memory.max").write_text(str(limit_bytes))
            (second / "memory.swap.max").write_text("0")
            folder = second
    except OSError as error:
        for made in (first, second):
            with contextlib.suppress(OSError):
                made.rmdir()
        pytest.skip(f"a cgroup with a limit of memory cannot be made here: {error}")
    try:
        yield lambda pid: (folder / "cgroup.procs").write_text(str(pid))
    finally:
        assert processes.until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


SCRIPT = """
    import os, sys, torch, evenstep
    from torch import nn

    def claim():
        try:
            os.close(os.open(f"{sys.argv[1]}/claimed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def function(part):
        if run.version == 3 and WHEN:
            torch.ones(150 << 20)
        return model(part[0]).square().mean()

    while not os.path.exists(f"{sys.argv[1]}/go"): pass
    with evenstep.Run(shards=4) as run:
        data = torch.utils.data.TensorDataset(torch.randn(40, 4))
        model = nn.Linear(4, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for batch in run.batches(data, 8):
            run.step(batch, function)
"""


def starve(script, tmp_path, when):
    path = script(SCRIPT.replace("WHEN", when))
    with cgroup(300 * MIB) as put, Cli("run", "-n", "2", path, tmp_path) as cli:
        assert processes.until(lambda: len(processes.descendants(cli.pid)) == 2)
        for pid in (cli.pid, *processes.descendants(cli.pid)):
            put(pid)
        (tmp_path / "go").touch()
        return cli.wait(60)


def test_a_worker_that_starves_is_replaced_and_the_bits_are_the_same(script, tmp_path):
    done = starve(script, tmp_path, "claim()")
    assert done.code == 0, done.stderr
    assert re.search(
        r"worker [01] \(pid \d+\) was killed by SIGKILL \(out of memory\) at step 3; it is rep", done.stderr
    )
    quiet = cli_run("run", "-n", "1", script(SCRIPT.replace("WHEN", "False")), tmp_path)
    assert done.stdout == quiet.stdout


def test_a_step_that_never_has_enough_memory_ends_the_run(script, tmp_path):
    """All workers at once: the supervisor, which has as much as they, must not be the one that is taken."""
    done = starve(script, tmp_path, "True")
    assert done.code == 128 + signal.SIGKILL, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(r"was killed by SIGKILL \(out of memory\), like 3 before it, with no step committed", last), last
