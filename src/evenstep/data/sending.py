"""Batches on their way to a GPU: pinned and copied on a stream of their own, by a thread, before they are asked for."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.data.batch import Batch
from evenstep.data.nested import rebuild

__all__ = ["sent"]


def sent(batches: Iterator[Batch], device: torch.device, ahead: int) -> Iterator[Batch]:
    """The same batches, whose parts are being copied to a device.

    Args:
        batches: The loaded batches.
        device: Where to copy them.
        ahead: How many to load before they are asked for.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's
    waiting: list[Batch] = []
    with ThreadPoolExecutor(1, "evenstep-sends") as thread:  # it ends with the iterator
        for batch in batches:
            coming = thread.submit(_send, batch.parts, device, stream)
            waiting.append(replace(batch, sent=partial(_taken, coming, device)))
            if len(waiting) > ahead:
                yield waiting.pop(0)
        yield from waiting


def _send(parts: dict[int, Any], device: torch.device, stream: Any) -> tuple[dict[int, Any], Any]:
    """Start copying; return the copies, and the event after which they are there."""
    if stream is None:
        return {shard: _copied(part, device) for shard, part in parts.items()}, None
    with torch.cuda.device(device), torch.cuda.stream(stream):
        found = {shard: _copied(part, device) for shard, part in parts.items()}
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record()
    return found, event


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        pinned = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
        return pinned.to(device, non_blocking=True)
    return rebuild(value, partial(_copied, device=device))


def _taken(coming: "Future[tuple[dict[int, Any], Any]]", device: torch.device) -> dict[int, Any]:
    """The parts; work launched from now on waits for the copies."""
    parts, event = coming.result()
    if event is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        for tensor in pytree.tree_leaves(parts):
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)  # its memory belongs to the other stream
    return parts
