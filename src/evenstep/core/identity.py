"""What a forked copy of a worker is told: it has all that the worker has, and is not the worker."""

import os

from evenstep.core.errors import ConfigError

__all__ = ["copied"]


def copied(pid: int, who: str) -> ConfigError:
    """The error of a copy, before it waits for others who do not know it, or writes in another's place.

    Args:
        pid: The process that may go on.
        who: What that is, in words.
    """
    return ConfigError(
        f"process {os.getpid()} is a forked copy of {who} (process {pid}) and cannot go on in its place: end the copy "
        "with os._exit, or start what it is for as a program of its own (subprocess, or multiprocessing with the start "
        "method spawn)"
    )
