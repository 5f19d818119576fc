"""A process of our own beside a process of the cluster: starting it, talking to it, and never letting it live longer.

Messages are JSON lines, optionally followed by bytes, through the standard streams.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from subprocess import PIPE, Popen
from typing import IO, Any

from evenstep.core import env
from evenstep.core.children import signal_name
from evenstep.core.importing import importing
from evenstep.native import core

__all__ = ["begin", "describe_end", "receive", "send", "serve"]


def begin(module: str, words: Sequence[str] = (), *, err: int | None = None, keep: Sequence[int] = ()) -> Popen[bytes]:
    """Start a module as a process that is killed when the thread that calls this ends.

    Args:
        module: A module of this package whose `main` is called with `words` and returns the exit code.
        words: Its arguments.
        err: Where its standard error goes; None: where ours goes.
        keep: Descriptors that it inherits under the same numbers.
    """
    return Popen(
        [sys.executable, "-m", "evenstep.agents", module, str(os.getpid()), *words],
        stdin=PIPE,
        stdout=PIPE,
        stderr=err,
        pass_fds=keep,
        env=env.of_child({"OMP_NUM_THREADS": "1"}),
        start_new_session=True,
    )


def serve(module: str, parent: int, words: Sequence[str]) -> int:
    """The body of a process that `begin` started; returns its exit code.

    The module is imported after the kernel was told to end this process with its parent: importing torch may take long.
    """
    core.die_with_parent()
    if os.getppid() != parent:
        return 1  # our parent had gone already
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a Ray actor blocks SIGINT
    with importing():
        main = import_module(module).main
    code: int = main(words)
    return code


def send(pipe: IO[bytes] | None, message: dict[str, Any], data: bytes = b"") -> None:
    """Send a message."""
    assert pipe is not None, "the process was started with pipes"
    pipe.write(json.dumps({**message, "num_bytes": len(data)}).encode() + b"\n" + data)
    pipe.flush()


def receive(pipe: IO[bytes] | None) -> tuple[dict[str, Any], bytes] | None:
    """Wait for a message; None: there will be no more."""
    assert pipe is not None, "the process was started with pipes"
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    return message, pipe.read(message["num_bytes"])


def describe_end(code: int) -> str:
    """How a process ended, phrased to follow its name."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
