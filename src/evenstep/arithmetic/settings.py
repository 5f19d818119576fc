"""The variables by which the libraries under torch choose kernels. They are read once, so they must precede torch.

`PORTABLE` limits ATen and oneDNN to kernels that every processor with AVX2 has, and MKL to those that it shares between
makers. A launcher calls `choose` before it imports torch; a script started without one is started again
(`insist`), or told what to export.
"""

import sys
import threading
from types import FrameType
from typing import NoReturn

from evenstep.core import env
from evenstep.core.errors import ConfigError

__all__ = ["PORTABLE", "choose", "insist"]

PORTABLE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}


def choose(arithmetic: str | None) -> None:
    """Ask for an arithmetic in this process and those it starts; None: for the one the environment asks for.

    Call it before torch is imported.
    """
    arithmetic = arithmetic or env.read().arithmetic
    if arithmetic is not None:
        env.write({"EVENSTEP_ARITHMETIC": arithmetic, **(PORTABLE if arithmetic == "portable" else {})})


def insist(caller: FrameType, place: env.Environment) -> None:
    """Make sure that portable arithmetic was chosen before torch was loaded.

    If it was not, the script is started again with the right settings. That takes a script given to Python by path,
    which makes the run itself and is watched by no launcher.

    Args:
        caller: The frame that makes the run.
        place: What the environment says.

    Raises:
        ConfigError: It was not chosen in time, and the script cannot be started again.
    """
    if env.kernel_choices().items() >= PORTABLE.items():
        return
    if _can_begin_again(caller, place):
        _begin_again()
    how = " ".join(f"{name}={value}" for name, value in PORTABLE.items())
    raise ConfigError(
        "arithmetic='portable' must be chosen before torch is loaded: start the script with "
        f"`evenstep run --arithmetic portable`, or `export {how}` before Python starts"
    )


def _can_begin_again(caller: FrameType, place: env.Environment) -> bool:
    main = sys.modules["__main__"]
    return (
        place.segment_fd is None
        and caller.f_globals.get("__name__") == "__main__"
        and getattr(main, "__file__", None) is not None
        and main.__dict__ is caller.f_globals
        and threading.active_count() == 1
    )


def _begin_again() -> NoReturn:
    print(
        "evenstep: starting again: portable arithmetic must be chosen before torch is loaded; "
        "`evenstep run --arithmetic portable` does so at once",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    env.become([sys.executable, *sys.orig_argv[1:]], PORTABLE)
