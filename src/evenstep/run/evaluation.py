"""Evaluation and prediction: every sample exactly once, results that do not depend on who computed them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from evenstep.core.errors import ConfigError
from evenstep.data.batch import Batch
from evenstep.engine import structure
from evenstep.engine.circumstances import compare_past, digests
from evenstep.engine.randomness import derive, preserved, seed_all
from evenstep.engine.reports import compare_contents, compare_facts
from evenstep.engine.results import Mean, add
from evenstep.engine.step import Engine
from evenstep.exchange.group import Group
from evenstep.exchange.journal import Entry
from evenstep.run.feed import Feed, Loading
from evenstep.run.meter import Meter
from evenstep.run.others import Others
from evenstep.run.saving import Perform

__all__ = ["Evaluation", "call_parts", "collect_outputs", "evaluating", "fill", "mean_metrics"]

Function = Callable[[Any], Any]
T = TypeVar("T")


class Evaluation:
    """Figures and outputs of a run's models, over all groups.

    Args:
        engine: Has the models.
        others: Others who train them.
        feed: Gives batches.
        perform: Does an operation on all workers.
        group: The number of this worker's group, and how many there are.
    """

    def __init__(self, engine: Engine, others: Others, feed: Feed, perform: Perform, group: tuple[int, int]) -> None:
        self._engine, self._others, self._feed, self._perform, self._place = engine, others, feed, perform, group
        self._count = 0  # how often all groups have met so far

    def _tag(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count}"

    def metrics(self, meter: Meter) -> dict[str, float]:
        """See `Run.metrics`."""
        tag = self._tag("metrics")

        def attempt() -> Entry:
            merged = self._others.merge(tag, meter.means(), meter.num_samples)
            self._engine.group.barrier("metrics")
            return Entry("metrics", merged)

        return self._perform("metrics", attempt, _value)

    def evaluate(self, dataset: Any, batch_size: int, metrics: Function, loading: Loading) -> dict[str, float]:
        """See `Run.evaluate`."""
        tag, order = self._tag("evaluate"), self._feed.in_order(dataset, batch_size, *self._place)

        def attempt() -> Entry:
            self._others.level(tag)
            with evaluating(self._engine.models.slots.modules):
                means = mean_metrics(self._engine, self._feed.once(dataset, order, loading), metrics)
            return Entry("evaluate", self._others.merge(tag, means, order.num_dealt))

        return self._perform_alike(tag, metrics, "evaluate", attempt, _value)

    def predict(self, dataset: Any, batch_size: int, function: Function, loading: Loading) -> Any:
        """See `Run.predict`."""
        tag, order = self._tag("predict"), self._feed.in_order(dataset, batch_size)

        def attempt() -> Entry:
            self._others.level(tag)
            with evaluating(self._engine.models.slots.modules):
                shape, tensors = collect_outputs(self._engine, self._feed.once(dataset, order, loading), function)
                return Entry("predict", shape, safetensors.torch.save(tensors))

        def adopt(entry: Entry, _: bool) -> Any:
            return fill(entry.value, safetensors.torch.load(entry.blob))

        return self._perform_alike(tag, function, "predict", attempt, adopt)

    def _perform_alike(
        self, tag: str, function: Function, kind: str, attempt: Callable[[], Entry], adopt: Callable[[Entry, bool], T]
    ) -> T:
        """Do an operation in which every worker's function sees the same tensors besides the models, whenever it runs.

        Raises:
            MismatchError: They are others on another worker, or when the script was run before.
        """
        beside, group = self._engine.circumstances.beside, self._engine.group
        facts = beside.look(function, step=0)

        def checked() -> Entry:
            found = list(zip(group.members, group.gather_json(f"{kind}: facts", facts), strict=True))
            compare_facts(tag, found)
            entry = attempt()
            beside.called(function, step=0)
            return replace(entry, aside={"facts": digests(facts)})

        def compared(entry: Entry, took_part: bool) -> T:
            if not took_part:
                compare_past(tag, (entry.aside or {}).get("facts", {}), facts)
            return adopt(entry, took_part)

        return self._perform(kind, checked, compared)


def _value(entry: Entry, _: bool) -> dict[str, float]:
    found: dict[str, float] = entry.value
    return found


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All modules in eval mode, without gradients; each is restored afterwards."""
    before = [(module, module.training) for module in modules]
    try:
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


def call_parts(engine: Engine, batch: Batch, function: Function) -> dict[int, Any]:
    """Call the function for every part, each time with the committed buffers and its own random numbers."""
    values = {}
    engine.models.strays.look()
    with preserved():
        for shard in range(*engine.sharing.evaluated[engine.group.rank]):
            if batch.sizes[shard]:
                part = batch.part(shard)
                engine.models.restore_buffers()
                seed_all(derive("evaluate", engine.config.seed, batch.number, shard))
                values[shard] = function(part)
    engine.models.restore_buffers()
    return values


def mean_metrics(engine: Engine, batches: Iterator[Batch], metrics: Function) -> dict[str, float]:
    """The mean of each metric over all samples: tree sums over shards, then over batches in order."""
    mine: list[dict[str, Any]] = []
    for batch in _compared(engine, batches):
        row = {}
        for shard, found in call_parts(engine, batch, metrics).items():
            if not isinstance(found, dict):
                raise ConfigError(
                    f"metrics returned a {type(found).__name__}; expected a dict such as {{'accuracy': values}}"
                )
            row[str(shard)] = {n: Mean.of(n, value, batch.sizes[shard]).pack() for n, value in found.items()}
        mine.append(row)
    totals: dict[str, Mean] | None = None
    for number, rows in enumerate(zip(*engine.group.gather_json("evaluate", mine), strict=True)):
        by_shard = {int(shard): found for row in rows for shard, found in row.items()}
        totals = dict.fromkeys(by_shard[0], Mean(0.0, 0.0)) if totals is None else totals
        for shard, found in by_shard.items():
            if found.keys() != totals.keys():
                raise ConfigError(
                    f"metrics gave {sorted(found)} in batch {number}, shard {shard}, but {sorted(totals)} at first; "
                    "it must give the same ones for every part"
                )
        for name, before in totals.items():
            found = add({k: Mean.unpack(row[name]) for k, row in by_shard.items()}, engine.config.shards)
            totals[name] = Mean(before.total + found.total, before.weight + found.weight)
    return {name: mean.value for name, mean in (totals or {}).items()}


def collect_outputs(engine: Engine, batches: Iterator[Batch], function: Function) -> tuple[Any, dict[str, Tensor]]:
    """The outputs for all samples, concatenated in data-set order, on every worker, on the CPU.

    Returns:
        Their structure, and the tensors in it, as `fill` takes them.
    """
    found: list[Any] = []
    for batch in _compared(engine, batches):
        values = list(call_parts(engine, batch, function).values())
        shares = [sum(batch.sizes[first:end]) for first, end in engine.sharing.evaluated]
        found.append(_gather_nested(engine.group, f"predict batch {batch.number}", values, shares))
    leaves: list[Tensor] = []
    shape = structure.describe(_join(found), leaves, "what the model gave predict")
    engine.group.barrier("predict is over")
    return shape, {f"{n:06}": leaf for n, leaf in enumerate(leaves)}


def _compared(engine: Engine, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, in the first of which workers see that they have the same data.

    Raises:
        NondeterminismError: They have not.
    """
    group = engine.group
    for batch in batches:
        if batch.probes is not None and group.num_workers > 1:
            of_all = group.gather_json("samples", batch.contents())
            contents = list(zip(group.members, of_all, strict=True))
            compare_contents(engine.version, contents, strict=engine.config.on_nondeterminism == "error")
        yield batch


def fill(shape: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of what `collect_outputs` returns."""
    return structure.fill(shape, (tensors[name] for name in sorted(tensors)))


def _gather_nested(group: Group, tag: str, values: list[Any], shares: list[int]) -> Any:
    """Concatenate tensors in nested tuples, lists and dicts over shards and workers.

    A worker without samples in this batch learns the structure from the first that has some.
    """
    leaves: list[Tensor] = []
    mine = structure.describe(_join(values), leaves, "what the model gave predict") if values else None
    shape = next(found for found in group.gather_json(f"{tag}: structure", mine) if found is not None)
    out = []
    for n, (dtype, sample) in enumerate(structure.specs(shape)):
        kind = getattr(torch, dtype)
        rows = leaves[n] if leaves else torch.empty((0, *sample), dtype=kind)
        flat = rows.detach().cpu().contiguous().reshape(len(rows), math.prod(sample))
        full = group.gather(f"{tag}: output {n}", flat, shares, everyone=True)
        out.append(full.reshape(len(full), *sample))
    return structure.fill(shape, iter(out))


def _join(values: list[Any]) -> Any:
    """Concatenate values of one structure along the first dimension of their tensors."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_join([value[n] for value in values]) for n in range(len(first)))
    return first
