"""What the libraries under torch choose their kernels by. They look at it once, so it must be there before torch is.

`PORTABLE` limits ATen and oneDNN to kernels that every processor with AVX2 has, and MKL to those that it shares between
makers. A launcher calls `choose` before it imports torch; a script that was started without it is started again
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
    """Ask for an arithmetic in this process and those that it starts; None: for what the environment asks for.

    To be called before torch is imported.
    """
    arithmetic = arithmetic or env.read().arithmetic
    if arithmetic is not None:
        env.write({"EVENSTEP_ARITHMETIC": arithmetic, **(PORTABLE if arithmetic == "portable" else {})})


def insist(caller: FrameType, place: env.Environment) -> None:
    """See to it that the portable choice was made before torch was loaded.

    If it was not, the script is started again with what it needs; it must be a script that Python was given, that
    itself makes the run, and that no launcher watches.

    Args:
        caller: Who makes the run.
        place: What the surroundings say.

    Raises:
        ConfigError: It was not, and the script cannot be started again.
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
