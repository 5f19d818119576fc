"""What holds for all tests: a safe process to fork from, and nothing left behind by any test."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with a thread pool cannot be forked safely
os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
)  # some virtual machines announce AMX and do not grant it

import pytest
import torch

import processes

LEAVING_S = 5.0  # how long what a test started may take to be gone

torch.set_num_threads(1)
torch.use_deterministic_algorithms(False)  # imports torch._inductor, which takes a second: now, and not in every fork
processes.adopt_orphans()


def _surroundings() -> dict[str, object]:
    return {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "the working directory": os.getcwd(),
    }


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _left_over(threads: set[threading.Thread], children: set[int], memfds: set[int]) -> list[str]:
    """What is there now and was not before, in words."""
    found = [f"thread {t.name}" for t in threading.enumerate() if t not in threads]
    found += [f"process {pid} ({line})" for pid, line in processes.descendants().items() if pid not in children]
    return found + [f"descriptor {fd} of {path}" for fd, path in processes.memfds().items() if fd not in memfds]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks a thread, a process, a memfd or an environment variable, or changes torch's settings."""
    before = (set(threading.enumerate()), set(processes.descendants()), set(processes.memfds()))
    variables, surroundings = _variables(), _surroundings()
    yield
    if _left_over(*before):
        gc.collect()
        processes.until(lambda: not _left_over(*before), LEAVING_S)
    found = _left_over(*before)
    for pid in set(processes.descendants()) - before[1]:
        processes.kill_tree(pid)
    if not before[1]:
        processes.reap_orphans()
    after, now = _variables(), _surroundings()
    found += [
        f"variable {name}: {variables.get(name)!r} became {after.get(name)!r}"
        for name in variables.keys() | after.keys()
        if variables.get(name) != after.get(name)
    ]
    found += [f"{what}: {surroundings[what]} became {now[what]}" for what in now if now[what] != surroundings[what]]
    os.environ.update(variables)
    for name in after.keys() - variables.keys():
        del os.environ[name]
    os.chdir(str(surroundings["the working directory"]))
    torch.set_num_threads(1)
    if now != surroundings:
        torch.use_deterministic_algorithms(bool(surroundings["torch.are_deterministic_algorithms_enabled()"]))
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script of the given (indented) text into a folder of its own and returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write
