"""Whether a process is a forked copy: it has everything the worker has, but is not the worker."""

import os

from evenstep.core.errors import ConfigError

__all__ = ["check_not_a_copy", "last_core"]


def check_not_a_copy(pid: int, who: str) -> None:
    """Refuse to go on in a copy, before it waits for others that do not know it, or writes where the original does.

    Args:
        pid: The process that may go on.
        who: What to call it in the message.

    Raises:
        ConfigError: This is another process.
    """
    if (here := os.getpid()) != pid:
        raise ConfigError(
            f"process {here} is a forked copy of {who} (process {pid}) and cannot go on in its place: end the copy "
            "with os._exit, or start what it is for as a program of its own (subprocess, or multiprocessing with the "
            "start method spawn)"
        )


def last_core() -> int:
    """The number of the core that this process last ran on."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[36])
