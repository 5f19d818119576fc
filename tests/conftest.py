"""What holds for all tests: a safe process to fork from, and nothing left behind by any test."""

import gc
import os
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with a thread pool cannot be forked safely
os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
)  # some virtual machines announce AMX and do not grant it
os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton, if it is there: kernels are tested without a GPU

import hypothesis
import pytest
import torch

import lanes
import leaks
import pages
import processes
import quick
from evenstep.transport.segment import Segment
from workers import fork_run

torch.set_num_threads(1)
torch.use_deterministic_algorithms(False)  # imports torch._inductor, which takes a second: now, and not in every fork
processes.adopt_orphans()
os.fsync = os.fdatasync = os.fstat  # no test cuts the power, and disks take their time
hypothesis.settings.register_profile(  # how long an example takes says more about the machine than about us
    "patient", hypothesis.settings.default, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")
_MANY = 30_000  # objects that a collection goes through: some ten milliseconds
_MUCH = 16 << 20  # bytes, likewise for a fork
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may ignore it, as in `nohup make test &`


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick`: only what starts no process and takes no time; `--lanes N`: in several processes."""
    parser.addoption("--quick", action="store_true", help="only tests in one process, and no long ones")
    parser.addoption("--lanes", type=int, default=1, help="how many processes run tests at a time, a file each")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what is not quick, if that is wanted."""
    return True if config.getoption("quick") and quick.is_foreign(collection_path) else None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Put the folders of frameworks and engines aside, if there are lanes: whichever runs one collects it."""
    options = parent.config.option
    put_aside = options.lanes > 1 and not options.collectonly and quick.is_foreign(path)
    return lanes.Aside.put(path, parent) if put_aside else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not quick, if that is wanted."""
    if config.getoption("quick"):
        left_out = [item for item in items if not quick.is_quick(item)]
        config.hook.pytest_deselected(items=left_out)
        left = set(left_out)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes, if that is wanted."""
    wanted = session.config.getoption("lanes")
    if wanted == 1 or session.testsfailed or session.config.option.collectonly:
        return None  # as pytest does
    lanes.run(session, wanted)
    return True


def pytest_collection_finish() -> None:
    """Everything is imported: what every fork would do, or drag along, is done once."""
    gc.set_threshold(700, 10, 10)  # Python's own: see `started`
    for clear in typing._cleanups:  # a library does so at every exit
        clear()
    pages.settle()


def pytest_unconfigure() -> None:
    """Python ends as it always does."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_is_settled() -> Iterator[None]:
    """What the tests of a file have imported, or let go of, is out of the way of the files that follow."""
    before = pages.private_bytes()
    yield
    if len(gc.get_objects()) > _MANY or pages.private_bytes() > before + _MUCH:
        pages.settle()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks a thread, a process, a memfd or an environment variable, or changes torch's settings."""
    with leaks.nothing_left_behind():
        yield


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script of the given (indented) text into a folder of its own and returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs that are started by `subprocess.run` be forks of this process: the same, without importing torch."""
    really = subprocess.run

    def run(
        command: list[str], *, env: dict[str, str] | None = None, timeout: float | None = None, **other: Any
    ) -> subprocess.CompletedProcess[Any]:
        if command[0] != sys.executable:  # `platform` asks uname, when it is first asked
            return really(command, env=env, timeout=timeout, **other)
        assert env is not None
        assert timeout is not None
        return fork_run(command, {name: value for name, value in env.items() if name.startswith("EVENSTEP_")}, timeout)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture
def new_segment():
    """Makes a segment for so many workers. Keep it in the test itself: it is mapped for as long as anybody has it."""
    fds = []

    def make(num_workers):
        segment = Segment.create(num_workers)
        fds.append(segment.fd)
        return segment

    yield make
    for fd in fds:
        os.close(fd)
