"""Lightning's checkpoints in a run: read once for all workers, so that one that comes later begins from the same one.

A worker that replaces another runs the script from its beginning, when the file may be gone or different: `last.ckpt`
is overwritten while training goes on. It no longer needs the weights, which the run has, but everything else: progress,
callbacks, schedulers. So this goes into the journal.
"""

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.run.run import Run
from evenstep.run.values import pack

__all__ = ["OURS", "about", "begin_of", "is_without_weights", "read"]

OURS = "evenstep"
"""The key of what the run stores in a checkpoint."""

Checkpoint = dict[str, Any]


def read(run: Run, path: str | Path, load: Callable[[], Checkpoint]) -> Checkpoint:
    """The checkpoint at a path, the same on every worker and whenever the script runs.

    Args:
        run: The run.
        path: Where it is.
        load: Reads it.

    Raises:
        CheckpointError: It has changed since the run began from it, and nobody has its weights yet.
    """
    found = run.once(lambda: {"checksum": _checksum(path), "rest": _without_weights(load())})
    if _checksum(path) == found["checksum"]:
        return load()
    if not run.catching_up:
        raise CheckpointError(f"{path} has changed since this run began to read it; start the run again")
    rest: Checkpoint = found["rest"]
    rest["state_dict"] = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, shape) in rest["state_dict"].items()
    }
    return rest


def is_without_weights(checkpoint: Checkpoint) -> bool:
    """Whether it came from the journal, because the file has changed: so a worker that catches up gets it."""
    return any(value.is_meta for value in checkpoint["state_dict"].values() if isinstance(value, torch.Tensor))


def about(run: Run, steps: int) -> dict[str, int]:
    """What a checkpoint says of the run that wrote it, after this many steps."""
    return {"steps": steps, "shards": run.shards, "seed": run.config.seed}


def begin_of(checkpoint: Checkpoint, run: Run) -> int:
    """After how many steps training goes on, with the random numbers of the run that wrote the checkpoint."""
    said = checkpoint.get(OURS)
    if said is None:  # Lightning's own
        return int(checkpoint["global_step"])
    steps = int(said["steps"])
    for key, value in about(run, steps).items():
        if said[key] != value:
            warnings.warn(
                f"the checkpoint was written with {key}={said[key]} but this run has {key}={value}: training goes on, "
                "but not as if it had never stopped",
                stacklevel=2,
            )
    return steps


def _checksum(path: str | Path) -> str | None:
    """The checksum of a local file; None for anything else, which is assumed not to change."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "nothing"
    except OSError:
        return None


def _without_weights(checkpoint: Checkpoint) -> Checkpoint:
    forms = {
        name: [str(value.dtype).removeprefix("torch."), list(value.shape)]
        for name, value in checkpoint["state_dict"].items()
        if isinstance(value, torch.Tensor)
    }
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = []
    return {"state_dict": forms, **{key: value for key, value in rest.items() if _can_be_kept(value)}}


def _can_be_kept(value: Any) -> bool:
    """Whether the journal can hold it; hyperparameters may be anything, but are not needed to go on."""
    try:
        pack(value, "a checkpoint")
    except ConfigError:
        return False
    return True
