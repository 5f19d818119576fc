"""What a freshly forked worker does: take its place, run the user's script, and end with an exit code."""

import atexit
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from evenstep.core import env
from evenstep.core.children import default_signals
from evenstep.core.errors import (
    BeginsAgain,
    CheckpointError,
    ConfigError,
    EvenstepError,
    MismatchError,
    NondeterminismError,
    PeerError,
    UnsupportedError,
    WrongError,
)
from evenstep.core.events import Event, send
from evenstep.core.importing import importing
from evenstep.launch.memory import go_first
from evenstep.launch.script import run_as_main
from evenstep.run import unclosed

__all__ = ["STACK_SIGNAL", "run_worker", "warm_up"]

STACK_SIGNAL = signal.SIGRTMIN + 7
"""The signal on which a worker writes the stacks of its threads to standard error."""

_OURS = (__file__, run_as_main.__code__.co_filename)
_HIDDEN = "__tracebackhide__"  # marks a frame between ours and the user's code
_MISTAKES = (
    ConfigError,
    UnsupportedError,
    CheckpointError,
    WrongError,
)  # their sentence says it all; a traceback would hide it


def warm_up() -> None:
    """Import, before any worker is forked, what would take each of them seconds."""
    with importing():
        import torch._inductor.config  # noqa: F401  # imported by the first step

        import evenstep.run.run  # noqa: F401  # imported by the script
    gc.freeze()  # workers that look for garbage need not go through all of this, nor copy its memory
    atexit.register(gc.unfreeze)  # otherwise libraries find their objects alive at the end, and report leaks


def run_worker(script: Path | str, args: Sequence[str], variables: dict[str, str]) -> int:
    """The body of a worker's process; returns its exit code.

    Args:
        script: The user's script, or the name of a module.
        args: Its arguments.
        variables: Environment variables that tell the worker its place.
    """
    default_signals()
    go_first()
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    env.write(variables)
    place = env.read()
    if place.faults is not None:
        from evenstep.testing.faults import arm

        arm(place.faults, place.worker)
    mine, events_fd = os.getpid(), int(variables["EVENSTEP_EVENTS_FD"])
    _warn_through(lambda event: _tell(mine, events_fd, event))
    code = _run_script(script, args, place.worker, lambda event: _tell(mine, events_fd, event))
    if code:
        unclosed.forget()
    threading._shutdown()  # type: ignore[attr-defined]  # as whenever Python ends: wait for non-daemon threads
    atexit._run_exitfuncs()
    return code


def _tell(worker: int, events_fd: int, event: Event) -> None:
    """Tell the supervisor how the script ended; in a process that the worker forked, write it to standard error."""
    if os.getpid() == worker:
        send(events_fd, event)
    elif text := event.get("error") or event.get("warning"):
        print(text.rstrip(), file=sys.stderr)


def _warn_through(tell: Callable[[Event], None]) -> None:
    """Send warnings to the supervisor, which shows one that several workers give only once."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if file is not None:
            file.write(text)
        else:
            tell({"warning": text})

    warnings.showwarning = show


def _run_script(script: Path | str, args: Sequence[str], worker: int, tell: Callable[[Event], None]) -> int:
    try:
        run_as_main(script, args)
        tell({"ended": True})
    except BeginsAgain as request:
        tell({"begins again": True})
        return request.exit_code
    except SystemExit as request:
        if isinstance(request.code, int | None):
            return request.code or 0
        tell({"error": str(request.code)})
        return 1
    except PeerError as error:
        if error.worker == worker:  # the script has caught the error and gone on
            tell({"error": f"evenstep: {error}"})
        return error.exit_code  # the worker that failed says why
    except _MISTAKES as error:
        tell({"error": f"evenstep: {error}", "mistake": True})
        return error.exit_code
    except BaseException as error:  # noqa: BLE001  # the border of the process: reported, and the exit code says so
        text = "".join(traceback.format_exception(_without_our_frames(error)))
        tell({"error": text, "hopeless": isinstance(error, MismatchError | NondeterminismError)})
        return error.exit_code if isinstance(error, EvenstepError) else 1
    return 0


def _without_our_frames(error: BaseException) -> BaseException:
    """The error with its traceback starting in the user's script: nobody needs to see runpy and the launcher."""
    trace = error.__traceback__
    while trace is not None and (
        "runpy" in trace.tb_frame.f_code.co_filename
        or trace.tb_frame.f_code.co_filename in _OURS
        or _HIDDEN in trace.tb_frame.f_locals
    ):
        trace = trace.tb_next
    return error.with_traceback(trace or error.__traceback__)
