"""Whether a process is still who it was: a forked copy of a worker has all that it has, and is not the worker."""

import os

from evenstep.core.errors import ConfigError

__all__ = ["check_not_a_copy", "last_core"]


def check_not_a_copy(pid: int, who: str) -> None:
    """Say that this process is a copy, before it waits for others who do not know it, or writes in another's place.

    Args:
        pid: The process that may go on.
        who: What that is, in words.

    Raises:
        ConfigError: This is another one.
    """
    if (here := os.getpid()) != pid:
        raise ConfigError(
            f"process {here} is a forked copy of {who} (process {pid}) and cannot go on in its place: end the copy "
            "with os._exit, or start what it is for as a program of its own (subprocess, or multiprocessing with the "
            "start method spawn)"
        )


def last_core() -> int:
    """The number of the processor core on which this process has run last."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[36])
