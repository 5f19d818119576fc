"""What a partition does when it trains by itself and meets the others only at a parameter server."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.engine.randomness import derive, seed_all
from evenstep.server import connect
from evenstep.spark.training import Means, Training, build, figures_of, loss_of, state_of

__all__ = ["Meeting", "Share", "merged_buffers", "train_apart"]


@dataclass(frozen=True)
class Meeting:
    """Where workers meet, and when.

    Attributes:
        address: The address of the server.
        memory: Its shared-memory address for workers on the same machine; None: they use `address` too.
        token: The server's token.
        frequency: After every "epoch" or "batch".
        validation_split: The fraction of the rows, at the end, that is used for validation.
    """

    address: str
    memory: str | None
    token: str
    frequency: str
    validation_split: float


@dataclass(frozen=True)
class Share:
    """What a worker has besides the parameters, which are at the server.

    Attributes:
        num_rows: How many rows it has trained on.
        history: Figures for every epoch.
        buffers: The buffers of its model, such as the statistics of batch norm.
    """

    num_rows: int
    history: list[dict[str, float]]
    buffers: dict[str, np.ndarray[Any, Any]]


def merged_buffers(shares: Sequence[Share]) -> dict[str, Tensor]:
    """The buffers of all workers as one model's: means over rows, or the largest where they are whole numbers."""
    found: dict[str, Tensor] = {}
    for name, first in shares[0].buffers.items():
        values = [share.buffers[name] for share in shares]
        if first.dtype.kind == "f":
            weights = [share.num_rows for share in shares]
            merged = np.average(np.stack(values).astype(np.float64), axis=0, weights=weights)
        else:
            merged = np.max(np.stack(values), axis=0)
        found[name] = torch.from_numpy(np.asarray(merged, first.dtype))
    return found


def train_apart(job: Training, meeting: Meeting, number: int, rows: Iterator[Any]) -> Iterator[Share]:
    """Train on the rows of a partition; yields its share, or nothing if it has no rows.

    A task that Spark runs again sends its updates under the same sequence numbers, so the server applies none twice.
    """
    pairs = list(rows)
    if not pairs:
        return
    torch.set_num_threads(1)
    part, checked = _divide(pairs, meeting.validation_split)
    seed_all(derive("partition", job.seed, number))
    model, optimizer = build(job)
    with connect(_address(meeting), worker=f"partition-{number}", token=meeting.token) as client:
        history, sequence = [], 0
        for epoch in range(job.epochs):
            means = Means()
            _pull(client, model)
            before = state_of(model)
            for batch in _batches(part, job.batch_size, derive("order", job.seed, number, epoch)):
                _step(job, model, optimizer, batch, means)
                if meeting.frequency == "batch":
                    sequence += 1
                    before = _push(client, model, before, sequence)
            if meeting.frequency == "epoch":
                sequence += 1
                _push(client, model, before, sequence)
            history.append(means.value)
            if checked is not None:
                history[-1] |= _validate(job, model, checked)
    yield Share(len(part[0]), history, {name: value.numpy() for name, value in model.named_buffers()})


def _address(meeting: Meeting) -> str:
    """The server's shared memory if it is wanted and the server runs on this machine, otherwise its address."""
    host = urlsplit(meeting.address).hostname or ""
    if meeting.memory is None:
        return meeting.address
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))  # works only where the address is our own
    except OSError:
        return meeting.address
    return meeting.memory


def _divide(pairs: list[Any], split: float) -> tuple[list[Tensor], list[Tensor] | None]:
    try:
        tensors = [torch.as_tensor(np.stack([np.asarray(pair[side]) for pair in pairs])) for side in (0, 1)]
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"expected rows that are pairs of features and label, all of one shape: {error}") from error
    first = len(pairs) - int(split * len(pairs))
    if first == len(pairs):
        return tensors, None
    return [tensor[:first] for tensor in tensors], [tensor[first:] for tensor in tensors]


def _batches(part: list[Tensor], size: int, seed: int) -> Iterator[dict[str, Tensor]]:
    order = torch.randperm(len(part[0]), generator=torch.Generator().manual_seed(seed))
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        yield {"features": part[0][chosen], "label": part[1][chosen]}


def _step(job: Training, model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor], means: Means) -> None:
    loss, metrics = loss_of(job, model, batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    values = {"loss": float(loss.detach()), **{name: float(value.double().mean()) for name, value in metrics.items()}}
    means.add(len(batch["label"]), values)


def _validate(job: Training, model: nn.Module, checked: list[Tensor]) -> dict[str, float]:
    model.eval()
    with torch.inference_mode():
        found = figures_of(job, model, {"features": checked[0], "label": checked[1]})
    model.train()
    return {f"validation_{name}": float(value.double().mean()) for name, value in found.items()}


def _pull(client: Any, model: nn.Module) -> None:
    """Fetch the newest parameters; buffers stay the worker's own, see `Share`."""
    newest = client.get_parameters()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(newest[name])


def _push(client: Any, model: nn.Module, before: dict[str, Tensor], sequence: int) -> dict[str, Tensor]:
    """Send what has changed, and fetch the newest parameters."""
    trained = {name for name, _ in model.named_parameters()}
    now = state_of(model)
    deltas = {name: before[name] - now[name] for name in trained}
    client.update_parameters(deltas, kind="delta", sequence=sequence)
    _pull(client, model)
    return state_of(model)
