"""Evaluation and prediction: every sample exactly once, results that do not depend on who computed them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.core.errors import ConfigError
from evenstep.data.batch import Batch
from evenstep.engine import structure
from evenstep.engine.randomness import derive, preserved, seed_all
from evenstep.engine.results import Mean, add
from evenstep.engine.step import Engine
from evenstep.exchange.group import Group

__all__ = ["call_parts", "collect_outputs", "evaluating", "fill", "mean_metrics"]

Function = Callable[[Any], Any]


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """All modules in eval mode, no gradients; afterwards each is as it was."""
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
    """Call the function for every part, each time with the committed buffers and random numbers of its own."""
    values = {}
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
    for batch in batches:
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
    for batch in batches:
        values = list(call_parts(engine, batch, function).values())
        shares = [sum(batch.sizes[first:end]) for first, end in engine.sharing.evaluated]
        found.append(_gather_nested(engine.group, f"predict batch {batch.number}", values, shares))
    leaves: list[Tensor] = []
    shape = structure.describe(_join(found), leaves, "what the model gave predict")
    engine.group.barrier("predict is over")
    return shape, {f"{n:06}": leaf for n, leaf in enumerate(leaves)}


def fill(shape: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of what `collect_outputs` returns."""
    return structure.fill(shape, (tensors[name] for name in sorted(tensors)))


def _gather_nested(group: Group, tag: str, values: list[Any], shares: list[int]) -> Any:
    """Concatenate tensors in nested tuples, lists and dicts over shards and workers.

    A worker without samples in this batch learns the structure from worker 0, which always has some.
    """
    leaves: list[Tensor] = []
    mine = structure.describe(_join(values), leaves, "what the model gave predict") if values else None
    shape = group.gather_json(f"{tag}: structure", mine)[0]
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
