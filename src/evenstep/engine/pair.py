"""A prepared optimizer: its parameters, who owns which, and its state in the segment.

Every worker holds the whole optimizer object (so that schedulers work anywhere), but in a step only the owner of a
parameter gives it a gradient, so `optimizer.step()` changes owned parameters only.
"""

import inspect
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import points
from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.gradients import Gradients
from evenstep.engine.state import Entry, State, is_dense
from evenstep.exchange.group import Group

__all__ = ["News", "Pair"]


News = list[Any]
"""What is new in optimizers' state: [parameter, {key: [shape, dtype, stride]}, {key: plain value}], in order."""


class Pair:
    """An optimizer with the parameters that it trains.

    Making one takes room in the segment, so all workers must do it alike; it talks to nobody.

    Args:
        group: The workers.
        state: Where parameters and optimizer state live; holds the parameters already.
        optimizer: The user's optimizer; it stays the user's object.
        names: The full name of every prepared parameter, by its id.
        prefix: What the names of the optimizer's state begin with.

    Raises:
        UnsupportedError: The optimizer cannot be split by parameter, or holds one that is in no prepared model.
    """

    def __init__(self, group: Group, state: State, optimizer: Optimizer, names: dict[int, str], prefix: str) -> None:
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
        self.gradients = Gradients(group, self.names, self.parameters)
        self._entries: dict[int, dict[str, Entry]] = {}
        for p in self.parameters:  # an optimizer may make state when it is built, before the model moved to its device
            held = optimizer.state.get(p, {})
            held.update({k: v.to(p.device) for k, v in held.items() if isinstance(v, Tensor) and v.ndim})
        self._values: dict[int, dict[str, Any]] = {}
        self._undo: dict[int, dict[str, Any]] = {}

    def agree(self) -> News:
        """See that all workers prepare the same; return the state that the first worker's optimizer brings along.

        Raises:
            MismatchError: Another worker prepares another optimizer.
        """
        mine = [type(self.optimizer).__name__, self.names, self.hyperparameters()]
        of_all = self._group.gather_json(f"{self._prefix}: optimizer", [mine, self._news(range(len(self.names)))])
        for worker, (theirs, _) in zip(self._group.members, of_all, strict=True):
            if theirs != of_all[0][0]:
                raise MismatchError(
                    f"worker {worker} prepares the optimizer {theirs} where worker 0 prepares {of_all[0][0]}: "
                    "all workers must build the same"
                )
        news: News = of_all[0][1]
        self.settle(news, {i for i, _, _ in news} if self._group.rank == 0 else set())
        return news

    def update(self, sums: dict[int, Tensor | None]) -> News:
        """Save what the owned parameters are now, then step. Returns what is new in the optimizer's state."""
        touched = [i for i, gradient in sums.items() if gradient is not None]
        self._undo = {i: dict(self.optimizer.state.get(self.parameters[i], {})) for i in touched}
        for i in touched:
            entries = [self._state.entries[self.names[i]], *self._entries.get(i, {}).values()]
            self._state.save(entries)
            self.parameters[i].grad = sums[i]
        points.reach("inside update")
        try:
            self.optimizer.step()
        finally:
            for p in self.parameters:
                p.grad = None
        for i in touched:
            for entry in (self._state.entries[self.names[i]], *self._entries.get(i, {}).values()):
                entry.publish()
        return self._news(touched)

    def settle(self, news: News, mine: Collection[int]) -> None:
        """Move new optimizer state into the segment. All workers must call this alike, inside of an operation.

        Args:
            news: That of all workers, in the order of the parameters: it is part of the layout.
            mine: For which parameters this worker has the values.
        """
        for i, tensors, _ in news:
            held = self.optimizer.state[self.parameters[i]]
            self._undo.setdefault(i, dict(held))
            self._reserve(i, tensors)
            for key in tensors:
                entry = self._entries[i][key]
                if i in mine:
                    entry.live.copy_(held[key])
            self._hold(i, tensors, {key: held[key] for key in tensors if i in mine})

    def _reserve(self, i: int, tensors: dict[str, Any]) -> None:
        """Make room for state that has none. Trying an operation again makes the same room, so it may stay."""
        known = self._entries.setdefault(i, {})
        fresh = {
            f"{self._prefix}.{self.names[i]}.{key}": torch.empty_strided(
                shape, stride, dtype=getattr(torch, dtype), device="meta"
            )
            for key, (shape, dtype, stride) in sorted(tensors.items())
            if key not in known
        }
        if not fresh:  # even an empty reservation takes room, and whoever tries again would take it once more
            return
        for entry in self._state.add(fresh, shared=True):
            known[entry.name.rpartition(".")[2]] = entry

    def _hold(self, i: int, keys: Iterable[str], own: dict[str, Tensor]) -> None:
        """Let the optimizer use the state in the segment; on a GPU, copies, and only for what this worker owns."""
        held = self.optimizer.state[self.parameters[i]]
        device = self.parameters[i].device
        for key in keys:
            entry = self._entries[i][key]
            if device.type != "cpu" and entry.live.ndim:
                owned = self.gradients.owners[i] == self._group.rank
                entry.working = own.get(key, entry.live.to(device)) if owned or key in own else None
            if entry.working is not None:
                held[key] = entry.working

    def adopt(self, news: News, took_part: bool) -> None:
        """An operation with this news is committed."""
        for i, tensors, values in news:
            held = self.optimizer.state[self.parameters[i]]
            if not took_part:
                self._reserve(i, tensors)
                self._hold(i, tensors, {})
            for key in tensors:
                self._entries[i][key].counts = True
            for key, value in values.items():
                held[key] = value
                self._values.setdefault(i, {})[key] = value
                self._state.values[f"{self._prefix}.{self.names[i]}.{key}"] = value
        self._undo = {}

    def stepped_elsewhere(self) -> None:
        """The optimizer's step was done by others; schedulers want to know that it was."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own mark

    def rollback(self) -> None:
        """Forget state that an operation created or replaced before it was given up."""
        for i, before in self._undo.items():
            if before:
                self.optimizer.state[self.parameters[i]] = before
            else:
                self.optimizer.state.pop(self.parameters[i], None)
        self._undo = {}

    def replan(self, spans: Sequence[tuple[int, int]]) -> None:
        """The workers, or the shards of each, have changed. All workers must call this alike."""
        self.gradients.replan(spans)
        for i, entries in self._entries.items():  # not what an operation made that came to nothing: it is made anew
            self._hold(i, [key for key, entry in entries.items() if entry.counts], {})

    def news_of(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> News:
        """A checkpoint's state of this optimizer, as news."""
        news = []
        for i, name in enumerate(self.names):
            head = f"{self._prefix}.{name}."
            mine = {key.removeprefix(head): _describe(t) for key, t in tensors.items() if key.startswith(head)}
            plain = {key.removeprefix(head): v for key, v in values.items() if key.startswith(head)}
            if mine or plain:
                news.append([i, mine, plain])
        return news

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
        for i, entries in self._entries.items():
            for key, entry in entries.items():
                if entry.counts:
                    self.optimizer.state[self.parameters[i]][key] = (
                        entry.live.clone() if entry.working is entry.live or entry.working is None else entry.working
                    )

    def _news(self, indices: Sequence[int]) -> News:
        """State that the segment does not have yet."""
        news = []
        for i in indices:
            tensors: dict[str, Any] = {}
            values: dict[str, Any] = {}
            for key, value in self.optimizer.state.get(self.parameters[i], {}).items():
                entry = self._entries.get(i, {}).get(key)
                if isinstance(value, Tensor):
                    if entry is None or entry.working is not value:
                        tensors[key] = _describe(value)
                elif not isinstance(value, int | float | str | bool | None):
                    raise UnsupportedError(
                        f"{type(self.optimizer).__name__} keeps a {type(value).__name__} as '{key}' for "
                        f"'{self.names[i]}'; evenstep can share tensors and plain numbers only"
                    )
                elif key not in self._values.get(i, {}) or self._values[i][key] != value:
                    values[key] = value
            if tensors or values:
                news.append([i, tensors, values])
        return news


def _describe(tensor: Tensor) -> list[Any]:
    """Shape, dtype and the strides that the segment keeps."""
    stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), list(stride)]


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
