"""Faults that strike workers at named points of the code, once each, whichever process comes by first.

A plan is a list of faults in a file; `plant` writes it and gives the environment variables that hand it to a job. Every
fault that strikes is claimed by making a file beside it: that survives the process that it kills.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from evenstep.core import points
from evenstep.core.control import ask
from evenstep.core.errors import ConfigError

__all__ = ["Fault", "InjectedError", "arm", "plant", "struck"]

Kind = Literal["kill", "kill all", "stop", "slow", "raise", "exit", "scale"]
VARIABLE = "EVENSTEP_FAULTS"


class InjectedError(RuntimeError):
    """What a fault of the kind "raise" raises."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker.

    Attributes:
        kind: "kill" (SIGKILL), "kill all" (that for every worker), "stop" (SIGSTOP), "slow" (sleeps), "raise" (an
            exception), "exit" (exit code 3) or "scale" (asks the supervisor for another number of workers).
        point: Where; one of `POINTS`.
        visit: At which visit of this point by the worker's process, counted from 1; in a plan that is in order, from
            the fault before.
        worker: To whom; None: whoever comes first.
        seconds: How long "slow" sleeps.
        workers: How many "scale" asks for.
    """

    kind: Kind
    point: str
    visit: int = 1
    worker: int | None = None
    seconds: float = 0.2
    workers: int = 1


def plant(faults: Sequence[Fault], directory: Path, *, in_order: bool = False) -> dict[str, str]:
    """Write a plan into an empty directory; return the variables that a job needs to meet it.

    Args:
        faults: What is to happen.
        directory: Where the plan goes, and the files that say which fault has struck.
        in_order: Whether a fault can strike only when the one before has.

    Raises:
        ConfigError: A fault names a point that there is not.
    """
    for fault in faults:
        if fault.point not in points.POINTS:
            raise ConfigError(f"there is no point {fault.point!r}; expected one of {', '.join(points.POINTS)}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(json.dumps([in_order, [asdict(fault) for fault in faults]]))
    return {VARIABLE: str(directory)}


def struck(directory: Path) -> list[int]:
    """Which faults of a plan have struck so far, by their place in it."""
    return sorted(int(path.suffix[1:]) for path in directory.glob("struck.*"))


def arm(directory: Path, worker: int) -> None:
    """Let the faults of a plan strike in this process."""
    in_order, plan = json.loads((directory / "plan.json").read_text())
    faults = [Fault(**fault) for fault in plan]
    visits: dict[str, int] = {}
    behind = 0  # in order: how many have struck

    def reached(point: str) -> None:
        nonlocal behind
        while in_order and behind < len(faults) and (directory / f"struck.{behind}").exists():
            behind += 1
            visits.clear()
        visits[point] = visits.get(point, 0) + 1
        for number in [behind] if in_order else range(len(faults)):
            fault = faults[number] if number < len(faults) else None
            if fault is None or fault.point != point or fault.worker not in (None, worker):
                continue
            now = visits[point] >= fault.visit if in_order else visits[point] == fault.visit
            if now and _claim(directory / f"struck.{number}"):
                _strike(fault)

    points.arm(reached)


def _claim(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _strike(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "kill all":
        for other in ask({"status": True}, os.getppid())["workers"]:
            if other["pid"] != os.getpid():
                os.kill(other["pid"], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "exit":
        os._exit(3)
    elif fault.kind == "scale":
        ask({"scale": fault.workers}, os.getppid())
    else:
        raise InjectedError(f"a fault was planted at '{fault.point}'")
