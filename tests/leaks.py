"""Nothing is left behind: what a test may not leak, and what it may not change."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import processes

LEAVING_S = 20.0  # how long what a test started may take to be gone


@contextmanager
def nothing_left_behind(leaving_s: float = LEAVING_S) -> Iterator[None]:
    """Fail what leaks a thread, a process, a memfd or an environment variable, or changes torch's settings."""
    before = (set(threading.enumerate()), set(processes.descendants()), set(processes.memfds()))
    variables, settings = _variables(), _settings()
    yield
    if _left_over(*before):
        for _ in range(3):  # a graph that is collected lets go of what only the next collection finds
            gc.collect()
            if not _left_over(*before):
                break
        processes.until(lambda: not _left_over(*before), leaving_s)
    found = _left_over(*before)
    for pid in set(processes.descendants()) - before[1]:
        processes.kill_tree(pid)
    if not before[1]:
        processes.reap_orphans()
    found += _changes("variable ", variables, _variables()) + _changes("", settings, _settings())
    _restore(variables, settings)
    if found:
        pytest.fail("the test left behind: " + "; ".join(found), pytrace=False)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _settings() -> dict[str, object]:
    return {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_deterministic_algorithms_warn_only_enabled()": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.utils.deterministic.fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "the working directory": os.getcwd(),
    }


def _left_over(threads: set[threading.Thread], children: set[int], memfds: set[int]) -> list[str]:
    """What is there now and was not before, in words."""
    found = [f"thread {t.name}" for t in threading.enumerate() if t not in threads]
    found += [f"process {pid} ({line})" for pid, line in processes.descendants().items() if pid not in children]
    return found + [f"descriptor {fd} of {path}" for fd, path in processes.memfds().items() if fd not in memfds]


def _changes(
    kind: str, before: dict[str, object] | dict[str, str], now: dict[str, object] | dict[str, str]
) -> list[str]:
    names = sorted(before.keys() | now.keys())
    return [f"{kind}{n}: {before.get(n)!r} became {now.get(n)!r}" for n in names if before.get(n) != now.get(n)]


def _restore(variables: dict[str, str], settings: dict[str, object]) -> None:
    """Put things back, so that the tests that follow fail for their own reasons only."""
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    now = _settings()
    if now == settings:
        return
    os.chdir(str(settings["the working directory"]))
    torch.set_num_threads(int(str(settings["torch.get_num_threads()"])))
    torch.use_deterministic_algorithms(bool(settings["torch.are_deterministic_algorithms_enabled()"]))
    torch.utils.deterministic.fill_uninitialized_memory = settings[
        "torch.utils.deterministic.fill_uninitialized_memory"
    ]
    torch.set_grad_enabled(bool(settings["torch.is_grad_enabled()"]))
