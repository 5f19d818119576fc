"""Faults that strike workers at named points of the code, once each, whichever process gets there first.

A plan is a list of faults in a file; `plant` writes it and returns the environment variables that hand it to a job. A
fault that strikes is claimed by creating a file beside it, which survives the killed process.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from evenstep.core import points
from evenstep.core.control import ask
from evenstep.core.errors import ConfigError

__all__ = ["Fault", "InjectedError", "arm", "flip", "plant", "struck"]

Kind = Literal["kill", "kill all", "stop", "slow", "raise", "exit", "scale", "flip"]
VARIABLE = "EVENSTEP_FAULTS"


class InjectedError(RuntimeError):
    """What a fault of the kind "raise" raises."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker.

    Attributes:
        kind: "kill" (SIGKILL), "kill all" (the same for every worker), "stop" (SIGSTOP), "slow" (sleeps), "raise" (an
            exception), "exit" (exit code 3), "scale" (asks the supervisor for another number of workers) or "flip"
            (flips one bit of a tensor shown at the point).
        point: Where; one of `POINTS`, and for "flip" one of `DATA`.
        visit: At which visit of this point by the worker's process, counted from 1; in an ordered plan, since the
            previous fault.
        worker: Which worker, or for a "node" which machine; None: whichever gets there first.
        seconds: How long "slow" sleeps.
        workers: How many "scale" asks for.
        bit: The bit that "flip" flips, counted through the tensor's bytes, modulo its size.
        lasting: Whether "flip" strikes again at every later visit, in the same process.
    """

    kind: Kind
    point: str
    visit: int = 1
    worker: int | None = None
    seconds: float = 0.2
    workers: int = 1
    bit: int = 0
    lasting: bool = False


def plant(faults: Sequence[Fault], directory: Path, *, in_order: bool = False) -> dict[str, str]:
    """Write a plan into an empty directory; return the variables that a job needs to meet it.

    Args:
        faults: What is to happen.
        directory: Where the plan goes, and the files that say which fault has struck.
        in_order: Whether a fault can strike only after the previous one.

    Raises:
        ConfigError: A fault names a point that does not exist.
    """
    for fault in faults:
        known = points.DATA if fault.kind == "flip" else points.POINTS
        if fault.point not in known:
            raise ConfigError(f"there is no point {fault.point!r}; expected one of {', '.join(known)}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(json.dumps([in_order, [asdict(fault) for fault in faults]]))
    return {VARIABLE: str(directory)}


def struck(directory: Path) -> list[int]:
    """Which faults of a plan have struck so far, by their place in it."""
    return sorted(int(path.suffix[1:]) for path in directory.glob("struck.*"))


def arm(directory: Path, worker: int) -> None:
    """Make the faults of a plan strike in this process."""
    planted = _Planted(directory, worker)
    points.arm(planted.visit, planted.visit)


class _Planted:
    """The faults of a plan, as one process meets them."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory, self._worker = directory, worker
        self._in_order, plan = json.loads((directory / "plan.json").read_text())
        self._faults = [Fault(**fault) for fault in plan]
        self._visits: dict[str, int] = {}
        self._behind = 0  # of an ordered plan: how many have struck
        self._lasting: list[Fault] = []

    def visit(self, point: str, tensor: Any = None) -> None:
        """Note that the process reaches a point, perhaps with a tensor."""
        if point in points.DATA and (tensor is None or not tensor.numel()):
            return
        for fault in self._lasting:
            if fault.point == point:
                flip(tensor, fault.bit)
        self._visits[point] = 1 + self._visits_of(point)
        for number in [self._behind] if self._in_order else range(len(self._faults)):
            if number < len(self._faults) and self._is_time(self._faults[number], point):
                self._strike(number, tensor)

    def _visits_of(self, point: str) -> int:
        while self._in_order and self._behind < len(self._faults) and self._path(self._behind).exists():
            self._behind += 1
            self._visits.clear()
        return self._visits.get(point, 0)

    def _is_time(self, fault: Fault, point: str) -> bool:
        if fault.point != point or fault.worker not in (None, self._worker):
            return False
        visits = self._visits[point]
        return visits >= fault.visit if self._in_order else visits == fault.visit

    def _strike(self, number: int, tensor: Any) -> None:
        if _claim(self._path(number)):
            fault = self._faults[number]
            if fault.lasting:
                self._lasting.append(fault)
            _strike(fault, tensor)

    def _path(self, number: int) -> Path:
        return self._directory / f"struck.{number}"


def flip(tensor: Any, bit: int) -> None:
    """Flip one bit of a tensor on any device, counted modulo its size."""
    import torch  # here: planting faults does not need it

    number, within = divmod(bit % (8 * tensor.numel() * tensor.element_size()), 8 * tensor.element_size())
    data = tensor.data  # uncounted by torch, as a change by a faulty machine would be
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), data.shape)) if data.ndim else ()
    element = data[index].cpu().reshape(1).clone()
    element.view(torch.uint8)[within // 8] ^= 1 << within % 8
    data[index] = element[0].to(data.device)


def _claim(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _kill_all() -> None:
    """Kill all workers, this one last."""
    for other in ask({"status": True}, os.getppid())["workers"]:
        if other["pid"] != os.getpid():
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(other["pid"], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _strike(fault: Fault, tensor: Any = None) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "kill all":
        _kill_all()
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "exit":
        os._exit(3)
    elif fault.kind == "scale":
        ask({"scale": fault.workers}, os.getppid())
    elif fault.kind == "flip":
        flip(tensor, fault.bit)
    else:
        raise InjectedError(f"a fault was planted at '{fault.point}'")
