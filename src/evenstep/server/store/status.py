"""Everything that people may want to see of a store, as JSON. The caller holds the store's lock."""

from collections.abc import Iterable, Mapping
from typing import Any

from evenstep.server.store.options import StoreOptions
from evenstep.server.store.state import ParameterState
from evenstep.server.store.workers import RegisteredWorker

__all__ = ["of_departed", "of_parameters", "of_workers", "without_lists"]


def of_parameters(state: ParameterState, options: StoreOptions) -> dict[str, Any]:
    """The parameters."""
    specs = state.layout.specs if state.layout is not None else {}
    return {
        "version": state.version,
        "staleness": options.staleness,
        "lock": options.lock,
        "owner": state.owner,
        "optimizer": type(state.optimizer).__name__ if state.optimizer is not None else None,
        "num_bytes": state.layout.num_bytes if state.layout is not None else 0,
        "copies": state.images.count if state.images is not None else 0,
        "parameters": {
            name: {
                "dtype": str(spec.dtype).removeprefix("torch."),
                "shape": list(spec.shape),
                "version": state.versions[name],
                "buffer": name in state.buffers,
            }
            for name, spec in specs.items()
        },
    }


def of_workers(
    workers: Iterable[RegisteredWorker], version: int, now_s: float, contributed: Iterable[str]
) -> list[dict[str, Any]]:
    """The registered workers, and the progress of each."""
    here = set(contributed)
    return [
        {
            "name": worker.name,
            "updates": worker.updates,
            "lag": version - worker.base_version,
            "last_seen_s": round(now_s - worker.seen_s, 3),
            "in_this_update": worker.name in here,
        }
        for worker in workers
    ]


def of_departed(departed: Mapping[str, tuple[float, str]], now_s: float) -> list[dict[str, Any]]:
    """The workers that left, and how."""
    return [
        {"name": name, "how": how, "last_seen_s": round(now_s - seen_s, 3)} for name, (seen_s, how) in departed.items()
    ]


def without_lists(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status without its lists of parameters and of what happened: for a log."""
    return {key: value for key, value in status.items() if key not in ("parameters", "history", "events")}
