"""The results of the shards of a step, and how they become one loss and one value per metric: pure arithmetic.

Each is a sum over something and the weight of that something. Sums and weights are added over shards in tree order,
so the mean does not depend on who computed which shard.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.engine.loss import Loss, PartLoss
from evenstep.plan import tree

__all__ = ["Mean", "Note", "Reading", "Results", "ShardResult", "add", "merge"]


@dataclass(frozen=True)
class Note:
    """A metric of a part that is not a mean, such as the indices of its hardest samples.

    `run.step` gives the list of all parts' values, in the order of their shards, on every worker.

    Attributes:
        value: Plain: numbers, texts, None, and lists and dicts of them.
    """

    value: Any


@dataclass(frozen=True)
class Mean:
    """A mean before the division."""

    total: float
    weight: float

    @classmethod
    def of(cls, name: str, metric: Any, num_rows: int) -> "Mean":
        """The mean of a part's metric, given for every row, as their mean, or as a `Loss`.

        Raises:
            ConfigError: It has the wrong number of values.
        """
        tensors: list[Tensor] = []
        make = _mean(name, metric, num_rows, tensors)
        return make([float(t) for t in tensors])

    @property
    def value(self) -> float:
        """The mean; not a number if it is over nothing."""
        return self.total / self.weight if self.weight else float("nan")

    def pack(self) -> list[str]:
        """As JSON, exact to the bit for any numbers."""
        return [self.total.hex(), float(self.weight).hex()]

    @classmethod
    def unpack(cls, packed: Sequence[str]) -> "Mean":
        """The inverse of `pack`."""
        total, weight = packed
        return cls(float.fromhex(total), float.fromhex(weight))


@dataclass(frozen=True)
class ShardResult:
    """The result of one shard's step function.

    Attributes:
        loss: Over its rows, or over what the function says.
        weighted: Whether the function says over what.
        metrics: By name.
        notes: By name, as JSON.
        has_graph: Whether the loss depends on anything that is trained.
    """

    loss: Mean
    weighted: bool
    metrics: dict[str, Mean]
    notes: dict[str, str] = field(default_factory=dict)
    has_graph: bool = True

    @classmethod
    def of(cls, loss: PartLoss, metrics: Mapping[str, Any], num_rows: int) -> "ShardResult":
        """The result of a part with this many rows."""
        reading = Reading(loss, metrics, num_rows)
        return reading.result([float(t) for t in reading.tensors])

    def pack(self) -> list[Any]:
        """As JSON."""
        metrics = {name: mean.pack() for name, mean in self.metrics.items()}
        return [self.loss.pack(), self.weighted, metrics, self.notes, self.has_graph]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> "ShardResult":
        """The inverse of `pack`."""
        loss, weighted, metrics, notes, has_graph = packed
        means = {name: Mean.unpack(mean) for name, mean in metrics.items()}
        return cls(Mean.unpack(loss), weighted, means, notes, has_graph)


class Reading:
    """A shard's result while its numbers may still be on a device.

    Args:
        loss: The loss.
        metrics: The metrics.
        num_rows: The number of samples of the part.

    Attributes:
        tensors: The numbers to read, without dimensions, in float64.

    Raises:
        ConfigError: A metric has the wrong number of values, or a note is not a plain value.
    """

    def __init__(self, loss: PartLoss, metrics: Mapping[str, Any], num_rows: int) -> None:
        self.tensors: list[Tensor] = []
        self._weighted, self._has_graph = loss.loss is not None, loss.has_graph
        self._loss = _mean("loss", loss.value if loss.loss is None else loss.loss, num_rows, self.tensors)
        self._metrics = {
            name: _mean(name, metric, num_rows, self.tensors)
            for name, metric in metrics.items()
            if not isinstance(metric, Note)
        }
        self._notes = {name: _text(name, note.value) for name, note in metrics.items() if isinstance(note, Note)}

    def result(self, numbers: Sequence[float]) -> ShardResult:
        """The result, from the numbers in `tensors`."""
        metrics = {name: make(numbers) for name, make in self._metrics.items()}
        return ShardResult(self._loss(numbers), self._weighted, metrics, self._notes, self._has_graph)


def _text(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"note '{name}' cannot be sent to other workers ({error}); expected a plain value, such as tensor.tolist()"
        ) from error


def _mean(name: str, value: Any, num_rows: int, tensors: list[Tensor]) -> Callable[[Sequence[float]], Mean]:
    """A function that makes a mean from the numbers in `tensors`; appends to these what it needs to read."""

    def number(value: Any) -> Callable[[Sequence[float]], float]:
        if not isinstance(value, Tensor):
            plain = _plain(name, value)
            return lambda _: plain
        place = len(tensors)
        tensors.append(value.detach().double().reshape(()))
        return lambda numbers: numbers[place]

    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value)
    if isinstance(value, Loss):
        amount, weight = number(value.value), number(value.weight)
        return lambda numbers: _weighted(amount(numbers), weight(numbers), is_total=value.is_total)
    if isinstance(value, Tensor) and value.ndim:
        if value.shape[0] != num_rows:
            raise ConfigError(
                f"metric '{name}' has {value.shape[0]} values for a part of {num_rows} samples; "
                "expected one value for each sample, or their mean"
            )
        total = number(value.detach().reshape(num_rows, -1).double().mean(1).sum())
        return lambda numbers: Mean(total(numbers), num_rows)
    mean = number(value)
    return lambda numbers: Mean(mean(numbers) * num_rows, num_rows)


def _plain(name: str, value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"metric '{name}' is a {type(value).__name__}; expected a tensor with one value for each sample, their "
            "mean, evenstep.Loss(mean, weight=n), or in a step evenstep.Note(value)"
        ) from None


def _weighted(amount: float, weight: float, *, is_total: bool) -> Mean:
    if not 0 <= weight < float("inf"):
        raise ConfigError(f"Loss(weight={weight}), expected a finite number of at least 0")
    return Mean((amount if is_total else amount * weight) if weight else 0.0, weight)


@dataclass(frozen=True)
class Results:
    """The results of a step over all its samples.

    Attributes:
        loss: The mean loss.
        metrics: The mean of each metric, or the list of what the parts noted.
        scale: The factor for the summed gradients; None: no scaling; 0: there are none to use.
        without_mean: A shard whose loss, a plain mean, is not a number although another's is.
        has_graph: Whether any shard's loss depends on something that is trained; or none has any weight.
    """

    loss: float
    metrics: dict[str, Any]
    scale: float | None
    without_mean: int | None = None
    has_graph: bool = True

    def scale_gradients(self, sums: dict[int, Tensor | None]) -> None:
        """Scale, in place, the gradients of a loss that is weighted by something other than rows."""
        if self.scale is not None:
            for i, gradient in sums.items():
                if gradient is not None:
                    sums[i] = gradient.mul_(self.scale) if self.scale else None


def merge(by_shard: Mapping[int, ShardResult], sizes: Sequence[int]) -> Results:
    """The results of all shards that have samples, as one.

    Args:
        by_shard: What each gave.
        sizes: The number of samples of every shard of the run.

    Raises:
        ConfigError: The shards gave different kinds of results.
    """
    first = min(by_shard)
    like = by_shard[first]
    for k, found in by_shard.items():
        if (here := _names(found)) != (there := _names(like)):
            raise ConfigError(
                f"the step function gave metrics {here} in shard {k} but {there} in shard {first}; it must give the "
                "same ones for every part"
            )
        if found.weighted != like.weighted:
            kinds = {True: "an evenstep.Loss", False: "a plain loss"}
            raise ConfigError(
                f"the step function gave {kinds[found.weighted]} in shard {k} but {kinds[like.weighted]} in shard "
                f"{first}; it must give the same for every part"
            )
    loss = add({k: result.loss for k, result in by_shard.items()}, len(sizes))
    metrics: dict[str, Any] = {
        name: add({k: result.metrics[name] for k, result in by_shard.items()}, len(sizes)).value
        for name in sorted(like.metrics)
    }
    for name in sorted(like.notes):
        metrics[name] = [json.loads(by_shard[k].notes[name]) for k in sorted(by_shard)]
    missing = [] if like.weighted else [k for k, result in sorted(by_shard.items()) if math.isnan(result.loss.total)]
    odd = missing[0] if 0 < len(missing) < len(by_shard) else None
    has_graph = not loss.weight or any(result.has_graph for result in by_shard.values())
    return Results(loss.value, metrics, _scale(loss, sizes) if like.weighted else None, odd, has_graph)


def _names(result: ShardResult) -> list[str]:
    return sorted([*result.metrics, *(f"{name} (a note)" for name in result.notes)])


def _scale(loss: Mean, sizes: Sequence[int]) -> float | None:
    """See `Results`; a part that is the whole batch went backward from the mean itself."""
    if not loss.weight:
        return 0.0
    return None if max(sizes) == sum(sizes) else sum(sizes) / loss.weight


def add(means: Mapping[int, Mean], num_shards: int) -> Mean:
    """The mean over all shards, in tree order; some may have none."""
    found = [means.get(k, Mean(0.0, 0.0)) for k in range(num_shards)]
    return tree.reduce(found, lambda a, b: Mean(a.total + b.total, a.weight + b.weight))
