"""Output for people. A closed terminal, or a pipe whose reader is gone, never ends a run."""

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
    """Write to the streams inside this. Once nobody can read them any more, what is written is discarded."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            for stream in streams:
                _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """Redirect the stream to nowhere, unless it still leads somewhere: Python keeps what it could not write."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):  # it may have no descriptor at all
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def say(sentence: str) -> None:
    """Print a message of ours on standard error, where it does not disturb the script's output."""
    with unheard(sys.stderr):
        print(f"evenstep: {sentence}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print lines on standard output."""
    with unheard(sys.stdout):
        print(text, flush=True)


def complete_streams() -> None:
    """Give a process that was started without standard streams ones that lead nowhere.

    Otherwise the first files it opens would get their numbers, and the output meant for them.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))
