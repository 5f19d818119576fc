"""The soak itself: starts all burdens, watches them, ends them and prints one table."""

import argparse
import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from evenstep.testing.soak.burden import Burden, SoakResult
from evenstep.testing.soak.grouped import Grouped
from evenstep.testing.soak.served import Served
from evenstep.testing.soak.trained import Trained
from evenstep.testing.soak.watch import Watch

_LOOK_S = 2.0
_TURN_S = 0.2
_WIDTHS = (12, 6, 12, 10)
_PR_SET_CHILD_SUBREAPER = 36


def soak(burdens: Sequence[Burden], seconds: float) -> tuple[list[SoakResult], Watch]:
    """Run burdens side by side for this long, and for a turn at least.

    Returns:
        How each went, and what their processes used.
    """
    watch, until = Watch(), time.monotonic() + seconds
    next_look_s = 0.0
    for burden in burdens:
        burden.begin()
    while True:
        for burden in burdens:
            burden.turn()
            if time.monotonic() > next_look_s:
                watch.look(burden.subjects())
        if time.monotonic() > next_look_s:
            next_look_s = time.monotonic() + _LOOK_S
        if time.monotonic() >= until:
            return [burden.finish() for burden in burdens], watch
        time.sleep(_TURN_S)


def table(
    burdens: Sequence[Burden], outcomes: Sequence[SoakResult], watch: Watch, left: Sequence[str]
) -> tuple[str, bool]:
    """Everything as text, and whether all is well."""
    good = not left and all(outcome.good for outcome in outcomes)
    lines = []
    for burden, outcome in zip(burdens, outcomes, strict=True):
        lines.append(f"{burden.name:<16} {outcome.did}: {outcome.result}")
    titles = [
        f"{text:>{width}}" for text, width in zip(("MiB", "peak", "descriptors", "threads"), _WIDTHS, strict=True)
    ]
    lines += ["", f"{'process':<24} lives {' '.join(titles)}  grows"]
    for name in watch.names:
        growth = watch.growth(name)
        before, after = growth.before, growth.after
        good = good and not growth.grown
        memory = f"{before.memory_mib:.0f} -> {after.memory_mib:.0f}"
        few = (f"{getattr(before, what)} -> {getattr(after, what)}" for what in ("descriptors", "threads"))
        columns = [
            f"{text:>{width}}" for text, width in zip((memory, f"{growth.peak_mib:.0f}", *few), _WIDTHS, strict=True)
        ]
        lines.append(f"{name:<24} {growth.lives:>5} {' '.join(columns)}  {', '.join(growth.grown).upper() or 'no'}")
    lines += ["", "left behind: " + (", ".join(left) or "nothing"), "all is well" if good else "SOMETHING IS WRONG"]
    return "\n".join(lines), good


def _left_behind() -> list[str]:
    """Orphaned processes that still run."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and os.waitpid(int(name), os.WNOHANG) == (0, 0):
                found.append(f"process {name}")
    return found


def main() -> int:
    """Soak for some minutes; 0 if all was well."""
    parser = argparse.ArgumentParser(prog="python -m evenstep.testing.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (0)")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become our children
    before = set(os.listdir("/dev/shm"))
    directory = Path(tempfile.mkdtemp(prefix="evenstep-soak-"))
    burdens: list[Burden] = [
        Trained(directory / "training", seconds, options.seed),
        Served(directory / "server", seconds, options.seed),
        Grouped(directory / "groups", options.seed),
    ]
    outcomes, watch = soak(burdens, seconds)
    time.sleep(1.0)
    left = _left_behind() + sorted(f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before)
    text, good = table(burdens, outcomes, watch, left)
    for outcome in outcomes:
        if not outcome.good:
            print(outcome.details[-20000:], file=sys.stderr)
    print(text)
    if good:
        shutil.rmtree(directory)
    else:
        print(f"what the processes said is in {directory}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
