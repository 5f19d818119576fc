"""What the user's module does in one part besides computing: values it logs, metrics it updates, lists it appends to.

A part is computed by one worker, but in the end all of them must have done the same. So none of this touches what
Lightning and the module hold while parts are computed: it is recorded, part by part, and carried out afterwards, on
every worker, for all parts (`effects.py`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from evenstep.core.errors import UnsupportedError

__all__ = ["Forms", "Packed", "PartRecord", "PartRecorder", "metrics_of"]

Packed = dict[str, Any]
"""A record as plain values and tensors."""

_HELD = ("_update_count", "_computed", "_forward_cache")  # what a metric keeps besides its states
_LOOKED_AT = 64  # a dict with more items is data, not a setting
_FORMS = 64  # how many forms to remember: names that change in every step are not worth it


class PartRecord:
    """What one part has done.

    Attributes:
        form: What was logged, in order: [name, options, dtype]; a metric has no dtype.
        values: The values; None for a metric.
        sizes: The `batch_size` that each was logged with, or None: the size of the part.
        grown: What was appended to lists of the module, by their names.
    """

    def __init__(self) -> None:
        self.form: list[list[Any]] = []
        self.values: list[float | None] = []
        self.sizes: list[int | None] = []
        self.grown: dict[str, list[Any]] = {}
        self._states: dict[str, dict[str, Any]] = {}  # of metrics, by their names

    @contextmanager
    def own(self, name: str, metric: Metric) -> Iterator[None]:
        """While this is open, a metric holds what this part has put into it, and nothing else.

        Raises:
            UnsupportedError: It has changed something that is not among its states.
        """
        everyones, before = _state_of(metric), _beside_states(metric)
        vars(metric).update(self._states.get(name) or _pristine(metric))
        try:
            yield
        finally:
            self._states[name] = _state_of(metric)
            vars(metric).update(everyones)
        now = _beside_states(metric)
        for attribute in [*before, *now]:
            if before.get(attribute) != now.get(attribute):
                raise UnsupportedError(
                    f"the metric self.{name} ({type(metric).__name__}) keeps something in its {attribute}, which is "
                    "none of its states (add_state), so what the parts of a batch have put into it cannot be merged; "
                    "update it in a hook such as on_validation_epoch_end, with what parts append to a list"
                )

    def pack(self) -> Packed:
        """As plain values and tensors."""
        states = {
            name: [state["_update_count"], state["_forward_cache"], {k: v for k, v in state.items() if k not in _HELD}]
            for name, state in self._states.items()
        }
        return {"form": self.form, "values": self.values, "sizes": self.sizes, "metrics": states, "grown": self.grown}


class Forms:
    """The forms of records that all workers already know, so that the notes of further steps need not repeat them.

    A worker that comes later reads the same notes in the same order, and so knows them too.
    """

    def __init__(self) -> None:
        self._known: list[list[Any]] = []

    def shorten(self, packed: Packed) -> Packed:
        """A record with the number of its form, if that is known."""
        form = packed["form"]
        return {**packed, "form": self._known.index(form) if form in self._known else form}

    def restore(self, records: list[Packed]) -> list[Packed]:
        """The records of a step with their forms, which are remembered from now on."""
        for record in records:
            if isinstance(record["form"], int):
                record["form"] = self._known[record["form"]]
        for record in records:
            if record["form"] not in self._known and len(self._known) < _FORMS:
                self._known.append(record["form"])
        return records


def _state_of(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, *_HELD)}


def _pristine(metric: Metric) -> dict[str, Any]:
    states = {
        name: [] if isinstance(value, list) else value.detach().clone() for name, value in metric._defaults.items()
    }
    return {**states, "_update_count": 0, "_computed": None, "_forward_cache": None}


def _beside_states(metric: Metric) -> dict[str, Any]:
    """What a metric holds besides its states, as far as it is plain."""
    known = {*metric._defaults, *_HELD, "_modules", "_parameters", "_buffers"}
    return {
        name: len(value) if isinstance(value, list | dict | set) else _seen_of_one(value)
        for name, value in vars(metric).items()
        if name not in known
    }


def metrics_of(module: LightningModule) -> dict[str, Metric]:
    """The metrics of a module, by their names."""
    return {name: child for name, child in module.named_modules() if isinstance(child, Metric)}


def _has_own_states(metric: Metric) -> bool:
    """Whether the states that it shows are its own: a `ClasswiseWrapper` shows those of the metric that it wraps."""
    wrapped = (child for child in metric.modules() if isinstance(child, Metric) and child is not metric)
    return all(child._defaults is not metric._defaults for child in wrapped)


class PartRecorder:
    """Records what parts do, instead of letting them do it.

    Args:
        trainer: The trainer.
        module: The user's module.
        hook: Which of its methods is called, for errors.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, hook: str) -> None:
        self._trainer, self._module, self._hook = trainer, module, hook
        self._here = threading.local()  # shards that meet in a layer are computed in threads, in turns

    @property
    def is_inside(self) -> bool:
        """Whether a part is being computed in this thread."""
        return hasattr(self._here, "record")

    @property
    def _record(self) -> PartRecord:
        found: PartRecord = self._here.record
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this is open, parts may be computed."""
        holder = self._trainer.fit_loop.epoch_loop if self._trainer.training else self._trainer._active_loop
        connector, results = self._trainer._logger_connector, holder._results
        hook_before = connector._current_fx
        with ExitStack() as stack:
            if results is not None:
                holder._results = _Log(lambda: self._record)
                stack.callback(setattr, holder, "_results", results)
            loggers, self._trainer.loggers = self._trainer.loggers, [_Unreachable(self._hook)]
            stack.callback(setattr, self._trainer, "loggers", loggers)
            for name, metric in metrics_of(self._module).items():
                if _has_own_states(metric):
                    stack.enter_context(self._owned(name, metric))
            for name, value in vars(self._module).items():
                if type(value) is list:
                    stack.callback(vars(self._module).__setitem__, name, value)
            for name, value in list(vars(self._module).items()):
                if type(value) is list:
                    vars(self._module)[name] = _Growing(name, value, lambda: self._record, self._hook)
            self._before = _look(self._module)
            yield
        connector._current_fx = hook_before  # the values logged for all parts decide what is reset

    @contextmanager
    def part(self) -> Iterator[PartRecord]:
        """Compute one part, in this thread.

        Raises:
            UnsupportedError: It changed an attribute of the module.
        """
        self._here.record = record = PartRecord()
        try:
            yield record
        finally:
            del self._here.record
        now = _look(self._module)
        for name in [*self._before, *now]:
            before, after = self._before.get(name), now.get(name)
            if before is not after and before != after:
                raise UnsupportedError(
                    f"{self._hook} changes self.{name} (from {before!r:.60} to {after!r:.60}), which other workers "
                    "would not see: it is called once for each part of a batch, on the worker that has it. Log it "
                    "(self.log), use a buffer or a torchmetrics metric that is an attribute, or in a ModuleDict, "
                    "append to a list, or do it in a hook such as on_train_batch_start"
                )

    @contextmanager
    def _owned(self, name: str, metric: Metric) -> Iterator[None]:
        """Make calls of a metric affect only the part that makes them."""
        inside = threading.local()

        def owning(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if getattr(inside, "flag", False):  # its forward calls its update
                    return method(*args, **kwargs)
                inside.flag = True
                try:
                    with self._record.own(name, metric):
                        return method(*args, **kwargs)
                finally:
                    inside.flag = False

            return call

        before = {key: vars(metric).get(key) for key in ("update", "forward", "compute", "reset")}
        for key in before:
            vars(metric)[key] = owning(getattr(metric, key))
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    del vars(metric)[key]
                else:
                    vars(metric)[key] = value


class _Log:
    """Takes the place of Lightning's collection of logged values; see `_ResultCollection.log`."""

    batch: Any = None
    batch_size: int | None = None
    dataloader_idx: int | None = None

    def __init__(self, record: Callable[[], PartRecord]) -> None:
        self._record = record

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        del fx, options["sync_dist"], options["sync_dist_fn"], options["sync_dist_group"], options["enable_graph"]
        reduce = options["reduce_fx"]
        options["reduce_fx"] = reduce if isinstance(reduce, str) else reduce.__name__
        record, is_number = self._record(), isinstance(value, Tensor)
        record.sizes.append(options.pop("batch_size"))
        record.form.append([name, options, str(value.dtype).removeprefix("torch.") if is_number else None])
        record.values.append(float(value.detach()) if is_number else None)

    def reset(self, *_: Any, **__: Any) -> None:
        """Nothing to do: logging the values of all parts later decides this."""


class _Unreachable:
    """Replaces the loggers while parts are computed: they would get only one worker's parts."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"{self._hook} asks the logger for its {name}, but it is called once for each part of a batch, on the "
            "worker that has it; use self.log, or write in a hook such as on_validation_epoch_end what the parts have "
            "appended to a list of the module"
        )


class _Growing(list[Any]):
    """A list of the module while parts are computed: what is appended is recorded."""

    def __init__(self, name: str, items: list[Any], record: Callable[[], PartRecord], hook: str) -> None:
        super().__init__(items)
        self._name, self._record, self._hook = name, record, hook

    def append(self, item: Any) -> None:
        self.extend([item])

    def extend(self, items: Any) -> None:
        self._record().grown.setdefault(self._name, []).extend(items)

    def __iadd__(self, items: Any) -> "_Growing":  # type: ignore[misc]  # nothing but the module's own list
        self.extend(items)
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"{self._hook} changes the list self.{self._name} other than by appending to it; it is called once for "
            "each part of a batch, so do that in a hook such as on_train_batch_start"
        )

    insert = pop = clear = remove = sort = reverse = __setitem__ = __delitem__ = __imul__ = _refuse


_LIGHTNINGS = frozenset(vars(LightningModule()))


def _look(module: LightningModule) -> dict[str, Any]:
    """The plain attributes of a user's module, and the tensors it holds besides parameters and buffers."""
    return {
        name: seen
        for name, value in vars(module).items()
        if name not in _LIGHTNINGS and not name.startswith("_hparams") and (seen := _seen(value)) is not None
    }


def _seen(value: Any) -> Any:
    """Something that is different once a value has changed; None: it is not looked at."""
    if isinstance(value, dict | set):
        if len(value) > _LOOKED_AT:
            return len(value)
        return (
            {key: _seen(item) for key, item in value.items()} if isinstance(value, dict) else frozenset(map(id, value))
        )
    if type(value) is list:
        return len(value)
    if isinstance(value, torch.nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return _seen_of_one(value)
    numbers = ((name, _seen_of_one(item)) for name, item in vars(value).items())
    return {name: seen for name, seen in numbers if seen is not None} or None  # such as those of an AverageMeter


def _seen_of_one(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return f"a tensor ({id(value)}, changed {0 if value.is_inference() else value._version} times)"
    if isinstance(value, Metric):  # in a plain dict or object, so that it is not among those of the module
        return f"a metric, updated {value._update_count} times"
    if isinstance(value, np.ndarray):
        return f"an array ({id(value)}), {value.tobytes().hex() if value.size <= _LOOKED_AT else value.shape}"
    return f"a deque of {list(value)}" if isinstance(value, deque) and len(value) <= _LOOKED_AT else None
