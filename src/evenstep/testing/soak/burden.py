"""The burdens of a soak: each goes on until it is told to end, and then reports how it went."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Burden", "SoakResult", "end", "start"]


_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",  # large tensors leave no holes, so growth is not the allocator's doing
}


@dataclass(frozen=True)
class SoakResult:
    """How a burden went.

    Attributes:
        good: Whether all was well.
        did: What was done and suffered, in figures.
        result: The outcome.
        details: For finding out what went wrong.
    """

    good: bool
    did: str
    result: str
    details: str = ""


class Burden(Protocol):
    """One of several that run side by side, each in its own processes."""

    name: str

    def begin(self) -> None:
        """Start the processes."""

    def turn(self) -> None:
        """Do what is due: kill, restart. Returns soon."""

    def subjects(self) -> Mapping[str, Sequence[int]]:
        """The present processes, by role."""

    def finish(self) -> SoakResult:
        """End all processes and examine what they did."""


def start(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start a program of this environment in its own session, with all its output in a file."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **_SETTINGS, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: "subprocess.Popen[bytes]", number: int = signal.SIGTERM, patience_s: float = 60.0) -> int:
    """Ask a program to end; kill its session if it does not. Returns its exit code, or minus the signal."""
    if process.poll() is None:
        process.send_signal(number)
    deadline = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
