"""Checkpoints of transformers in a run: a worker that comes later begins from the same one, even if it is gone by then.

A worker that replaces another runs the script from its beginning, when the folder may have been rotated away. It no
longer needs the weights, which the run has, but everything else. So the small files go into the journal.
"""

import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from evenstep.core.errors import CheckpointError
from evenstep.run.run import Run

__all__ = ["available", "compare", "describe"]

_OURS = "evenstep.json"
_SMALL = ("trainer_state.json", "scheduler.pt", "rng_state.pth", _OURS)


@contextmanager
def available(run: Run, folder: str) -> Iterator[tuple[str, bool]]:
    """A folder to resume from, and whether it has weights and the optimizer's state.

    Args:
        run: The run.
        folder: The folder of the checkpoint.

    Raises:
        CheckpointError: It has changed since the run began from it, and nobody has its weights yet.
    """
    kept = {name: data.tobytes() for name, data in run.once(lambda: _read(Path(folder))).items()}
    if {name: data.tobytes() for name, data in _read(Path(folder)).items()} == kept:
        yield folder, True
    elif run.catching_up:
        with tempfile.TemporaryDirectory() as copy:
            for name, data in kept.items():
                (Path(copy) / name).write_bytes(data)
            yield copy, False
    else:
        raise CheckpointError(f"{folder} has changed since this run began to read it; start the run again")


def _read(folder: Path) -> dict[str, np.ndarray]:
    files = [folder / name for name in _SMALL]
    return {file.name: np.frombuffer(file.read_bytes(), np.uint8) for file in files if file.is_file()}


def describe(folder: Path, run: Run) -> None:
    """Write into a checkpoint which run it belongs to."""
    (folder / _OURS).write_text(json.dumps(_about(run)))


def compare(folder: Path, run: Run) -> None:
    """Warn if a checkpoint comes from a run with other arithmetic; one of plain transformers says nothing about it."""
    if not (folder / _OURS).is_file():
        return
    said = json.loads((folder / _OURS).read_text())
    for key, value in _about(run).items():
        if said.get(key) != value:
            warnings.warn(
                f"the checkpoint was written with {key}={said.get(key)} but this run has {key}={value}: training goes "
                "on, but not as if it had never stopped",
                stacklevel=2,
            )


def _about(run: Run) -> dict[str, int]:
    return {"shards": run.shards, "seed": run.config.seed}
