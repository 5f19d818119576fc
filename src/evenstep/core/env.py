"""The only place that reads or writes the process environment.

The launcher hands a worker its place through `EVENSTEP_*`; under torchrun the place comes from torchrun's variables.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from evenstep.core.errors import ConfigError

__all__ = [
    "Environment",
    "become",
    "kernel_choices",
    "mps_directory",
    "num_gpus",
    "of_child",
    "ray_address",
    "read",
    "store_address",
    "worker_variables",
    "write",
]


@dataclass(frozen=True)
class Environment:
    """What the environment of this process says about the run.

    Attributes:
        worker: This worker's number.
        num_workers: How many workers there are.
        shards: The number of shards asked for on the launcher's command line, if any.
        arithmetic: The arithmetic asked for there, or by the process that started this one, if any.
        segment_fd: The inherited file descriptor of the shared segment, if the launcher made one.
        torchrun: Whether torchrun started this process.
        events_fd: Where to write progress and errors as JSON lines for the launcher, if it listens.
        digests: Where worker 0 writes a digest of every tensor after each step, for `evenstep verify`.
        max_steps: After how many steps the batches end, for `evenstep verify --steps`.
        supervised: Whether the launcher replaces workers.
        timeout_s: How long any wait for another worker may take, if the launcher's command line says so.
        resume: Whether to go on from the newest checkpoint.
        faults: Where a test has planted faults for this process.
        standing: Where the group of this worker stands, if there are groups and servers; a text of `plan.groups`.
        job: Identifies the launcher's job; None: there is no launcher.
        recheck: One in how many steps is computed twice, if the launcher's command line says so.
        tolerate_wrong: How often a worker may compute wrong, if the launcher's command line says so.
        machines: If workers may be on several machines: which one each is on; empty if the supervisor will say.
    """

    worker: int = 0
    num_workers: int = 1
    shards: int | None = None
    arithmetic: str | None = None
    segment_fd: int | None = None
    torchrun: bool = False
    events_fd: int | None = None
    digests: Path | None = None
    max_steps: int | None = None
    supervised: bool = False
    timeout_s: float | None = None
    resume: bool = False
    faults: Path | None = None
    standing: str | None = None
    job: str | None = None
    recheck: int | None = None
    tolerate_wrong: int | None = None
    machines: tuple[int, ...] | None = None


def _number(name: str, divisor: int = 1) -> Any:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text) if divisor == 1 else int(text) / divisor
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, expected a whole number; unset or correct it") from None


def _numbers(name: str) -> tuple[int, ...] | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, expected whole numbers; unset or correct it") from None


def read() -> Environment:
    """Read the environment of this process.

    Raises:
        ConfigError: A variable is not a number, or a worker's number is out of range.
    """
    digests, faults = os.environ.get("EVENSTEP_DIGESTS"), os.environ.get("EVENSTEP_FAULTS")
    common: dict[str, Any] = {
        "shards": _number("EVENSTEP_SHARDS"),
        "arithmetic": os.environ.get("EVENSTEP_ARITHMETIC") or None,
        "events_fd": _number("EVENSTEP_EVENTS_FD"),
        "digests": Path(digests) if digests else None,
        "max_steps": _number("EVENSTEP_MAX_STEPS"),
        "supervised": bool(_number("EVENSTEP_SUPERVISED")),
        "timeout_s": _number("EVENSTEP_STEP_TIMEOUT_MS", 1000),
        "resume": bool(_number("EVENSTEP_RESUME")),
        "faults": Path(faults) if faults else None,
        "standing": os.environ.get("EVENSTEP_STANDING"),
        "job": os.environ.get("EVENSTEP_JOB"),
        "recheck": _number("EVENSTEP_RECHECK"),
        "tolerate_wrong": _number("EVENSTEP_TOLERATE_WRONG"),
        "machines": _numbers("EVENSTEP_MACHINES"),
    }
    worker = _number("EVENSTEP_WORKER")
    if worker is not None:
        num_workers, segment_fd = _number("EVENSTEP_WORKERS") or 1, _number("EVENSTEP_SEGMENT_FD")
        if not common["supervised"]:  # else workers may be added
            _check_place("EVENSTEP_WORKER", worker, "EVENSTEP_WORKERS", num_workers)
        return Environment(worker, num_workers, segment_fd=segment_fd, **common)
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if rank is None or world is None or "MASTER_ADDR" not in os.environ:
        return Environment(**common)
    _check_place("RANK", rank, "WORLD_SIZE", world)
    return Environment(rank, world, torchrun=True, **common)


def _check_place(name: str, worker: int, of: str, num_workers: int) -> None:
    if not 0 <= worker < num_workers:
        raise ConfigError(
            f"{name} is {worker} but {of} is {num_workers}: expected a number from 0 to {num_workers - 1}"
        )


def worker_variables(
    worker: int,
    num_workers: int,
    shards: int | None,
    segment_fd: int,
    events_fd: int,
    *,
    supervised: bool = False,
    timeout_s: float | None = None,
    resume: bool = False,
    standing: str | None = None,
    job: str | None = None,
    recheck: int | None = None,
    tolerate_wrong: int | None = None,
    machines: Sequence[int] | None = None,
) -> dict[str, str]:
    """The variables that tell a worker its place; the inverse of `read`."""
    given: dict[str, object] = {
        "EVENSTEP_WORKER": worker,
        "EVENSTEP_WORKERS": num_workers,
        "EVENSTEP_SEGMENT_FD": segment_fd,
        "EVENSTEP_EVENTS_FD": events_fd,
        "EVENSTEP_SHARDS": shards,
        "EVENSTEP_SUPERVISED": "1" if supervised else None,
        "EVENSTEP_STEP_TIMEOUT_MS": None if timeout_s is None else round(1000 * timeout_s),
        "EVENSTEP_STANDING": standing,
        "EVENSTEP_JOB": job,
        "EVENSTEP_RESUME": "1" if resume else None,
        "EVENSTEP_RECHECK": recheck,
        "EVENSTEP_TOLERATE_WRONG": tolerate_wrong,
        "EVENSTEP_MACHINES": None if machines is None else ",".join(map(str, machines)),
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def store_address() -> tuple[str, int]:
    """The address of the store through which torchrun's workers find each other."""
    return os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))


def of_child(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a process that we start: ours plus these variables."""
    return {**os.environ, **variables}


def ray_address() -> str | None:
    """Where the user's Ray cluster is, if a variable says so."""
    return os.environ.get("RAY_ADDRESS") or None


def write(variables: dict[str, str]) -> None:
    """Set variables in this process, for what it loads or starts from now on."""
    os.environ.update(variables)


def become(command: list[str], variables: dict[str, str]) -> NoReturn:
    """Replace this process with a command, with these variables added to its environment."""
    os.execve(command[0], command, {**os.environ, **variables})


def mps_directory() -> Path:
    """Where NVIDIA's service that lets processes share a GPU can be found, if it runs."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))


def lightning_seed() -> int:
    """The seed given to `lightning.seed_everything`; 0 if it was not called."""
    return _number("PL_GLOBAL_SEED") or 0


def num_gpus() -> int:
    """How many NVIDIA GPUs this process may use, without touching them: a process that has touched one cannot fork."""
    there = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(there)
    named = [name.strip() for name in visible.split(",")]
    wrong = [name in ("", "-1") for name in named]  # the first invalid one hides all after it
    return min(len(there), wrong.index(True) if True in wrong else len(named))


def kernel_choices() -> dict[str, str | None]:
    """The variables by which the libraries under torch choose their kernels, and so their last bits."""
    return {name: os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")}
