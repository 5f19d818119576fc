"""What is shown to people. A terminal that was closed, or a pipe whose reader has gone, never ends a run."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

__all__ = ["complete_streams", "say", "show", "unheard"]

_GONE = (errno.EIO, errno.EPIPE)  # a terminal that hung up; a pipe without a reader


@contextmanager
def unheard(*streams: TextIO) -> Iterator[None]:
    """Write to streams inside of this. If nobody can read them any more, what is written goes nowhere from then on."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            for stream in streams:
                _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """Point the stream's descriptor nowhere, unless it still leads somewhere: Python keeps what it could not write."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):  # it may have no descriptor at all
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def say(sentence: str) -> None:
    """Say something of our own on standard error, where it disturbs no output of the script's."""
    with unheard(sys.stderr):
        print(f"evenstep: {sentence}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Show lines on standard output."""
    with unheard(sys.stdout):
        print(text, flush=True)


def complete_streams() -> None:
    """Give a process that was started without standard streams ones that lead nowhere.

    Else the first files that it opens would take their numbers, and get what is meant to be shown.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
