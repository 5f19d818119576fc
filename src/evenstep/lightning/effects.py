"""The side effects of all parts of a batch (`records.py`), carried out once, alike on every worker."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from evenstep.core.errors import UnsupportedError
from evenstep.engine.results import Mean, add
from evenstep.lightning.records import Packed, metrics_of

__all__ = ["carry_out", "join", "mean"]


def carry_out(module: LightningModule, hook: str, records: Sequence[Packed], sizes: Sequence[int]) -> None:
    """Carry out what the parts of a batch have recorded.

    Args:
        module: The user's module.
        hook: Which of its methods was called.
        records: One for each part, in order.
        sizes: The number of samples of each.

    Raises:
        UnsupportedError: The parts have done different things, or a metric cannot be merged.
    """
    metrics = metrics_of(module)
    for record in records:
        for name, (count, _, states) in record["metrics"].items():
            _merge(name, metrics[name], count, states)
    for name, metric in metrics.items():
        found = [(r["metrics"][name][1], size) for r, size in zip(records, sizes, strict=True) if name in r["metrics"]]
        if found:
            scalar = all(isinstance(cache, Tensor) and cache.numel() == 1 for cache, _ in found)
            metric._forward_cache = mean([c for c, _ in found], [size for _, size in found]) if scalar else None
    _log(module, hook, records, sizes)
    for record in records:
        for name, items in record["grown"].items():
            getattr(module, name).extend(_on(module, items))


def _on(module: LightningModule, items: list[Any]) -> list[Any]:
    return [item.to(module.device) if isinstance(item, Tensor) else item for item in items]


def _merge(name: str, metric: Metric, count: int, states: dict[str, Any]) -> None:
    """Merge what a part has put into a metric with what it holds."""
    for key, theirs in states.items():
        ours, reduction = getattr(metric, key), metric._reductions[key]
        if isinstance(ours, list):
            merged: Any = [*ours, *(item.to(metric.device) for item in theirs)]
        elif reduction is dim_zero_sum:
            merged = ours + theirs.to(ours.device)
        elif reduction in (dim_zero_max, dim_zero_min):
            merged = (torch.maximum if reduction is dim_zero_max else torch.minimum)(ours, theirs.to(ours.device))
        elif reduction is dim_zero_cat:
            merged = torch.cat([ours, theirs.to(ours.device)])
        else:
            raise UnsupportedError(
                f"the metric self.{name} ({type(metric).__name__}) has a state '{key}' that is neither a sum, a "
                "minimum, a maximum nor a list, so what the parts of a batch have put into it cannot be merged "
                "exactly; compute it from a list of the module that validation_step appends to"
            )
        setattr(metric, key, merged)
    metric._update_count += count
    metric._computed = None


def _log(module: LightningModule, hook: str, records: Sequence[Packed], sizes: Sequence[int]) -> None:
    """Log every value once: the mean over all samples, or as its `reduce_fx` says."""
    for record in records:
        if record["form"] != records[0]["form"]:
            here, there = ([name for name, *_ in r["form"]] for r in (record, records[0]))
            raise UnsupportedError(
                f"{hook} logs {here} in one part of a batch and {there} in another, or with other options; expected "
                "the same in every part: look for a branch that depends on the samples or on self.global_rank"
            )
    metrics = metrics_of(module)
    for number, (name, options, dtype) in enumerate(records[0]["form"]):
        options = dict(options)
        if dtype is None:
            module.log(name, metrics[options["metric_attribute"]], **options)
            continue
        values = [torch.tensor(record["values"][number], dtype=getattr(torch, dtype)) for record in records]
        given = [record["sizes"][number] for record in records]
        weights = [size if weight is None else weight for weight, size in zip(given, sizes, strict=True)]
        merged = _reduced(values, weights, options["reduce_fx"]).to(module.device)
        module.log(name, merged, batch_size=sum(weights), **options)


def _reduced(values: Sequence[Tensor], weights: Sequence[int], reduction: str) -> Tensor:
    if reduction in ("mean", "avg"):
        return mean(values, weights)
    if reduction == "sum":
        total = add({n: Mean(float(value), 1.0) for n, value in enumerate(values)}, len(values)).total
        return torch.tensor(total, dtype=values[0].dtype)
    return torch.stack(list(values)).max() if reduction == "max" else torch.stack(list(values)).min()


def mean(values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """The weighted mean of numbers, in the order of the tree, in their own type."""
    dtype = values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype()
    found = {n: Mean(float(v) * w, float(w)) for n, (v, w) in enumerate(zip(values, weights, strict=True))}
    return torch.tensor(add(found, len(values)).value, dtype=dtype)


def join(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The values that the parts of a batch returned, joined as if the batch had not been cut.

    Rows are put together, as tensors or as lists with an item for each sample, numbers are averaged by samples; and so
    is what is in dicts, tuples and other lists.

    Raises:
        ValueError: It is unclear how to join them.
    """
    first = values[0]
    if all(value is None for value in values):
        return None
    if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {key: join([value[key] for value in values], sizes) for key in first}
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        return _join_tensors(values, sizes)
    if type(first) is list and all(type(v) is list and len(v) == n for v, n in zip(values, sizes, strict=True)):
        return [item for value in values for item in value]  # one for each sample
    if type(first) in (list, tuple) and all(type(v) is type(first) and len(v) == len(first) for v in values):
        return type(first)(join(items, sizes) for items in zip(*values, strict=True))
    if isinstance(first, float) and all(isinstance(value, float) for value in values):
        return float(mean([torch.tensor(value, dtype=torch.float64) for value in values], sizes))
    raise ValueError(f"a {type(first).__name__}")


def _join_tensors(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    if all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return torch.cat(list(values))
    if all(value.numel() == 1 and value.is_floating_point() for value in values):
        return mean(values, sizes)
    raise ValueError(f"a {type(values[0]).__name__}")
