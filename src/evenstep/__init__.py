"""Data-parallel training for PyTorch: the same weights, bit for bit, on any number of workers.

import evenstep

with evenstep.Run(shards=8, seed=0) as run:
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(train_set, batch_size=256, epochs=3):
        loss = run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.errors import (
    CheckpointError,
    ConfigError,
    EvenstepError,
    MismatchError,
    NondeterminismError,
    PeerError,
    SilenceError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from evenstep import data
    from evenstep.engine.loss import Loss
    from evenstep.engine.results import Note
    from evenstep.run.run import Run
    from evenstep.run.server import Server

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EvenstepError",
    "Loss",
    "MismatchError",
    "NondeterminismError",
    "Note",
    "PeerError",
    "Run",
    "Server",
    "SilenceError",
    "UnsupportedError",
    "data",
]

__version__ = "0.1.0"


_LATE = {
    "Loss": "evenstep.engine.loss",
    "Note": "evenstep.engine.results",
    "Run": "evenstep.run.run",
    "Server": "evenstep.run.server",
}


def __getattr__(name: str) -> Any:
    """Import what brings torch when it is first asked for: that takes seconds, and `evenstep --help` needs none."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name == "data":
        return import_module("evenstep.data")
    raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
