"""Machines on this machine, where there can be any; see `evenstep.testing.network`."""

import subprocess
from collections.abc import Sequence

import pytest

from evenstep.testing.network import Network, missing

__all__ = ["Network", "finish", "needs_root"]


def needs_root(test):
    """Skip a test where network namespaces cannot be made."""
    why = missing()
    return test if why is None else pytest.mark.skip(reason=why)(test)


def finish(started: Sequence[subprocess.Popen], timeout_s: float = 60.0) -> list[tuple[int, str, str]]:
    """Wait for programs; (exit code, standard output, standard error) of each."""
    found = []
    for process in started:
        out, err = process.communicate(timeout=timeout_s)
        found.append((process.returncode, out, err))
    return found
