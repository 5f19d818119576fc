"""A prepared optimizer: its parameters, who owns which, and its state in the segment.

Every worker holds the whole optimizer object (so that schedulers work anywhere), but in a step only the owner of a
parameter gives it a gradient, so `optimizer.step()` changes owned parameters only.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.gradients import Gradients
from evenstep.engine.state import Entry, State
from evenstep.exchange.group import Group

__all__ = ["Pair"]


class Pair:
    """An optimizer with the parameters that it trains.

    Args:
        group: The workers.
        state: Where parameters and optimizer state live; holds the parameters already.
        spans: The shards of each worker.
        optimizer: The user's optimizer; it stays the user's object.
        names: The full name of every prepared parameter, by its id.
        prefix: What the names of the optimizer's state begin with.

    Raises:
        UnsupportedError: The optimizer cannot be split by parameter, or holds one that is in no prepared model.
    """

    def __init__(
        self,
        group: Group,
        state: State,
        spans: Sequence[tuple[int, int]],
        optimizer: Optimizer,
        names: dict[int, str],
        prefix: str,
    ) -> None:
        self.optimizer = optimizer
        self._group, self._state, self._prefix = group, state, prefix
        self.parameters: list[nn.Parameter] = [p for g in optimizer.param_groups for p in g["params"]]
        _check_kind(optimizer)
        unknown = [tuple(p.shape) for p in self.parameters if id(p) not in names]
        if unknown:
            raise UnsupportedError(
                f"{type(optimizer).__name__} holds a parameter of shape {unknown[0]} that is in no prepared model; "
                "make it part of the model that is passed to prepare"
            )
        self.names = [names[id(p)] for p in self.parameters]
        mine = [type(optimizer).__name__, self.names, self.hyperparameters()]
        of_all = group.gather_json(f"{prefix}: optimizer", mine)
        for worker, theirs in enumerate(of_all):
            if theirs != of_all[0]:
                raise MismatchError(
                    f"worker {worker} prepares the optimizer {theirs} where worker 0 prepares {of_all[0]}: "
                    "all workers must build the same"
                )
        self.gradients = Gradients(group, spans, self.names, self.parameters)
        self._state_entries: dict[int, dict[str, Entry]] = {}
        for p in self.parameters:  # an optimizer may make state when it is built, before the model moved to its device
            held = optimizer.state.get(p, {})
            held.update({k: v.to(p.device) for k, v in held.items() if isinstance(v, Tensor) and v.ndim})
        self._state_values: dict[int, dict[str, Any]] = {}
        self._undo: dict[int, dict[str, Any]] = {}
        if any(gathered := group.gather_json(f"{prefix}: existing state", self._news(range(len(self.names))))):
            self.adopt([gathered[0]])  # every worker loaded the same; worker 0's counts

    def update(self, sums: dict[int, Tensor | None]) -> list[Any]:
        """Save what the owned parameters are now, then step. Returns what is new in the optimizer's state."""
        touched = [i for i, gradient in sums.items() if gradient is not None]
        self._undo = {i: dict(self.optimizer.state.get(self.parameters[i], {})) for i in touched}
        for i in touched:
            entries = [self._state.entries[self.names[i]], *self._state_entries.get(i, {}).values()]
            self._state.save(entries)
            self.parameters[i].grad = sums[i]
        try:
            self.optimizer.step()
        finally:
            for p in self.parameters:
                p.grad = None
        for i in touched:
            for entry in (self._state.entries[self.names[i]], *self._state_entries.get(i, {}).values()):
                entry.publish()
        return self._news(touched)

    def rollback(self) -> None:
        """Forget state that an aborted update created or replaced."""
        for i, before in self._undo.items():
            if before:
                self.optimizer.state[self.parameters[i]] = before
            else:
                self.optimizer.state.pop(self.parameters[i], None)
        self._undo = {}

    def commit(self) -> None:
        """Forget how to roll back."""
        self._undo = {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Adopt optimizer state from a checkpoint. All workers must call this alike."""
        news = []
        for i, name in enumerate(self.names):
            head = f"{self._prefix}.{name}."
            mine = {key.removeprefix(head): t for key, t in tensors.items() if key.startswith(head)}
            plain = {key.removeprefix(head): v for key, v in values.items() if key.startswith(head)}
            fresh = {key: t for key, t in mine.items() if key not in self._state_entries.get(i, {})}
            for key, tensor in fresh.items():
                like = self.parameters[i].device if tensor.ndim else tensor.device
                self.optimizer.state[self.parameters[i]][key] = tensor.to(like)
            shapes = {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in fresh.items()}
            if shapes or plain:
                news.append([i, shapes, plain])
        self.adopt([news])

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The options of the parameter groups, such as learning rates, as plain values."""
        return [
            {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Put options of the parameter groups back."""
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})

    def release(self) -> None:
        """Give the optimizer its whole state as ordinary tensors, whoever owned it."""
        for i, entries in self._state_entries.items():
            for key, entry in entries.items():
                self.optimizer.state[self.parameters[i]][key] = (
                    entry.live.clone() if entry.working is entry.live or entry.working is None else entry.working
                )

    def _news(self, indices: Sequence[int]) -> list[Any]:
        """State that the segment does not have yet: [parameter, {key: [shape, dtype]}, {key: plain value}]."""
        news = []
        for i in indices:
            tensors: dict[str, Any] = {}
            values: dict[str, Any] = {}
            for key, value in self.optimizer.state.get(self.parameters[i], {}).items():
                entry = self._state_entries.get(i, {}).get(key)
                if isinstance(value, Tensor):
                    if entry is None or entry.working is not value:
                        tensors[key] = [list(value.shape), str(value.dtype).removeprefix("torch.")]
                elif not isinstance(value, int | float | str | bool | None):
                    raise UnsupportedError(
                        f"{type(self.optimizer).__name__} keeps a {type(value).__name__} as '{key}' for "
                        f"'{self.names[i]}'; evenstep can share tensors and plain numbers only"
                    )
                elif key not in self._state_values.get(i, {}) or self._state_values[i][key] != value:
                    values[key] = value
            if tensors or values:
                news.append([i, tensors, values])
        return news

    def adopt(self, news_of_workers: list[list[Any]]) -> None:
        """Move new optimizer state into the segment. All workers must call this alike, outside of any update."""
        moved = False
        for worker, news in enumerate(news_of_workers):
            for i, tensors, values in news:
                held = self.optimizer.state[self.parameters[i]]
                for key, value in values.items():
                    held[key] = value
                    self._state_values.setdefault(i, {})[key] = value
                    self._state.values[f"{self._prefix}.{self.names[i]}.{key}"] = value
                self._adopt_tensors(worker, i, tensors)
                moved = moved or bool(tensors)
        if moved:
            self._group.barrier(f"{self._prefix}: state moved")
            for entries in self._state_entries.values():
                for entry in entries.values():
                    entry.pull()

    def _adopt_tensors(self, worker: int, i: int, tensors: dict[str, Any]) -> None:
        held = self.optimizer.state[self.parameters[i]]
        known = self._state_entries.setdefault(i, {})
        fresh: dict[str, Tensor] = {}
        for key, (shape, dtype) in tensors.items():
            name = f"{self._prefix}.{self.names[i]}.{key}"
            mine = held.get(key)
            if key in known:  # the optimizer replaced its tensor: copy into the one we have
                if worker == self._group.worker:
                    known[key].live.copy_(mine)
            else:
                fresh[name] = (
                    mine if mine is not None else torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                )
        for (name, tensor), entry in zip(fresh.items(), self._state.add(fresh, shared=True), strict=True):
            known[name.rpartition(".")[2]] = entry
            if worker == self._group.worker:
                entry.live.copy_(tensor)
        for key in tensors:
            if known[key].working is not None:
                held[key] = known[key].working


def _check_kind(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} calls the model by itself (its step needs a closure) and sees all parameters "
            "at once, so it cannot be split between owners; use an optimizer that treats each parameter on its own"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam wants sparse gradients, which evenstep does not add up; use Adam")
    if not type(optimizer).__module__.startswith("torch.optim"):
        warnings.warn(
            f"{type(optimizer).__name__} is not from torch.optim: the result is the same for every number of workers "
            "only if it treats each parameter on its own",
            stacklevel=4,
        )
