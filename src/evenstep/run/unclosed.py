"""A run that is never closed shows no fingerprint, so a hint is printed when the process ends."""

import atexit
import os
from collections.abc import Callable
from functools import cache

__all__ = ["closed", "forget", "opened"]

_HINT = (
    "the run was never closed, so it has no fingerprint to show, and its last checkpoint may be missing; use "
    "`with evenstep.Run(...) as run`, or call run.close() at the end"
)
_open: dict[int, tuple[int, Callable[[str], None]]] = {}  # by the id of a run: its process, and how to print the hint


def opened(run: object, say: Callable[[str], None]) -> None:
    """Note that a run begins. If the process ends before it is closed, `say` is called with a hint."""
    _register()
    _open[id(run)] = (os.getpid(), say)


def closed(run: object) -> None:
    """Note that a run is over, or has failed."""
    _open.pop(id(run), None)


def forget() -> None:
    """Drop all hints: the script has failed, so it is obvious why its runs were not closed."""
    _open.clear()


@cache
def _register() -> None:
    atexit.register(_say)


def _say() -> None:
    for pid, say in _open.values():
        if pid == os.getpid():
            say(_HINT)
