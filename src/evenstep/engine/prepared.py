"""A prepared optimizer: its parameters, who owns which, and its state in the segment.

Every worker holds the whole optimizer object (so that schedulers work anywhere), but in a step only the owner of a
parameter gives it a gradient, so `optimizer.step()` changes owned parameters only.
"""

import inspect
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import points
from evenstep.core.errors import MismatchError, NondeterminismError, UnsupportedError
from evenstep.engine.delivery import Delivery, Local, SharedAreas
from evenstep.engine.edits import Edit
from evenstep.engine.flat import FlatGradients
from evenstep.engine.form import Form
from evenstep.engine.gradients import Gradients
from evenstep.engine.peers import connect
from evenstep.engine.state import Entry, State
from evenstep.exchange.group import Group
from evenstep.plan.summing import Leaves, Span, Summing, plan_nodes, plan_summing

__all__ = ["News", "PreparedOptimizer"]


_OPTIONS = "options of all groups"  # beside the plain values of the first parameter

News = list[Any]
"""What is new in optimizers' state: [parameter, {key: its form}, {key: plain value}], in order."""


class PreparedOptimizer:
    """An optimizer with the parameters that it trains.

    Making one takes room in the segment, so all workers must do it alike; it talks to nobody.

    Args:
        group: The workers.
        state: Where parameters and optimizer state live; holds the parameters already.
        optimizer: The user's optimizer; it stays the user's object.
        names: The full name of every prepared parameter, by its id.
        prefix: What the names of the optimizer's state begin with.
        whole: One worker steps all parameters, for optimizers that look at all of them at once.

    Raises:
        UnsupportedError: The optimizer cannot be split by parameter, or holds one that is in no prepared model.
    """

    def __init__(
        self,
        group: Group,
        state: State,
        optimizer: Optimizer,
        names: dict[int, str],
        prefix: str,
        *,
        whole: bool = False,
    ) -> None:
        self.optimizer, self._whole = optimizer, whole
        self._group, self._state, self._prefix = group, state, prefix
        self.parameters = self._listed()
        _check_kind(optimizer, whole=whole)
        self.names = self._names_of(self.parameters, names)
        self._make_gradients()
        self._entries: dict[int, dict[str, Entry]] = {}
        for p in self.parameters:  # an optimizer may make state when it is built, before the model moved to its device
            held = optimizer.state.get(p, {})
            held.update({k: v.to(p.device) for k, v in held.items() if isinstance(v, Tensor) and v.ndim})
        self._values: dict[int, dict[str, Any]] = {}
        self._undo: dict[int, dict[str, Any]] = {}
        self._undo_options: list[dict[str, Any]] | None = None
        self._left: list[
            tuple[dict[str, Any], dict[str, tuple[Tensor, int]]]
        ] = []  # the state as the last step left it

    @property
    def optimizers(self) -> "tuple[PreparedOptimizer, ...]":
        """This one: several may step together."""
        return (self,)

    def _make_gradients(self) -> None:
        memory = self._state.memory
        self.gradients: Gradients | FlatGradients = (
            Gradients(self.names)
            if memory.shared
            else FlatGradients(self.names, self.parameters, partial(connect, self._group, memory.device))
        )
        shape = (self._group.segment.num_workers, max(len(self.names), 1))
        self._words = self._state.memory.words(shape[0] * shape[1]).view(shape)

    def _listed(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _names_of(self, parameters: Sequence[nn.Parameter], names: dict[int, str]) -> list[str]:
        unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
        if unknown:
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} holds a parameter of shape {unknown[0]} that is in no prepared "
                "model; make it part of the model that is passed to prepare"
            )
        return [names[id(p)] for p in parameters]

    def added(self) -> list[nn.Parameter]:
        """The parameters that user code has given to the optimizer since it was prepared.

        Raises:
            UnsupportedError: It has also taken some away.
        """
        listed, known = self._listed(), set(map(id, self.parameters))
        if len(listed) == len(known) and all(id(p) in known for p in listed):
            return []
        if known - set(map(id, listed)):
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} lost a parameter after it was prepared; parameters can be added to "
                "it (add_param_group), and frozen (requires_grad_(False)), but not taken away"
            )
        return [p for p in listed if id(p) not in known]

    def extend(self, parameters: Sequence[nn.Parameter], names: dict[int, str]) -> None:
        """Train more parameters from now on. Takes room in the segment, so all workers must do it alike.

        Raises:
            UnsupportedError: One of them is in no prepared model.
        """
        self.names = self.names + self._names_of(parameters, names)
        self.parameters = [*self.parameters, *parameters]
        self._make_gradients()

    def agree(self) -> News:
        """See that all workers prepare the same; return the state that the first worker's optimizer brings along.

        Raises:
            MismatchError: Another worker prepares another optimizer.
        """
        of_all = self.compare(f"{self._prefix}: optimizer", self._news(range(len(self.names))))
        news: News = of_all[0]
        self.settle(news, {i for i, _, _ in news} if self._group.rank == 0 else set())
        self._state.spread(f"{self._prefix}: values", self.entries_of(news), 0)
        return news

    def entries_of(self, news: News) -> list[Entry]:
        """Where the tensors of some news lie."""
        return [self._entries[i][key] for i, tensors, _ in news for key in sorted(tensors)]

    def entries(self) -> list[Entry]:
        """All state that counts."""
        return [entry for entries in self._entries.values() for entry in entries.values() if entry.counts]

    def compare(self, tag: str, more: Any = None) -> list[Any]:
        """See that all workers have the same optimizer; return what each of them says beside that.

        Raises:
            MismatchError: Another worker has another.
        """
        mine = [type(self.optimizer).__name__, self.names, self.hyperparameters()]
        of_all = self._group.gather_json(tag, [mine, more])
        for worker, (theirs, _) in zip(self._group.members, of_all, strict=True):
            if theirs != of_all[0][0]:
                raise MismatchError(
                    f"worker {worker} prepares the optimizer {theirs} where worker 0 prepares {of_all[0][0]}: "
                    "all workers must build the same"
                )
        return [theirs for _, theirs in of_all]

    def update(self, sums: dict[int, Tensor | None]) -> News:
        """Save what the owned parameters are now, then step. Returns what is new in the optimizer's state."""
        touched = [i for i, gradient in sums.items() if gradient is not None]
        self._undo = {i: dict(self.optimizer.state.get(self.parameters[i], {})) for i in touched}
        entries = [self._state.entries[self.names[i]] for i in touched]
        self._state.save(entries + [entry for i in touched for entry in self._entries.get(i, {}).values()])
        for i in touched:
            self.parameters[i].grad = sums[i]
        points.reach("inside update")
        options, attributes = self.hyperparameters(), self._attributes()
        self._undo_options = options if self._whole else None
        try:
            if self.gradients.plan.owned or not self._whole:
                self.optimizer.step()
            else:
                self.stepped_elsewhere()
        finally:
            for p in self.parameters:
                p.grad = None
        for name, value in self._attributes().items():
            if value != attributes.get(name, value):
                raise UnsupportedError(
                    f"{type(self.optimizer).__name__} counts in its attribute '{name}', which a worker that replaces "
                    "another would not have; keep it in the state of a parameter, or in its group with whole=True"
                )
        news = self._news(touched)
        if (changed := self._changed_by_itself(options)) is not None:
            first = next((item for item in news if item[0] == 0), None)
            if first is None:
                news.append(first := [0, {}, {}])
            first[2][_OPTIONS] = changed
        return news

    def _attributes(self) -> dict[str, Any]:
        """What the optimizer holds beside its state and options, as far as it is plain."""
        plain = self.optimizer.__dict__.items()
        return {name: v for name, v in plain if name[0] != "_" and isinstance(v, int | float | str)}

    def _changed_by_itself(self, before: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The options of the groups, if the optimizer's own step has changed them.

        Raises:
            UnsupportedError: It did, or it keeps state elsewhere, and has seen only some of the parameters.
        """
        strange = [key for key in self.optimizer.state if not isinstance(key, Tensor)]
        now = self.hyperparameters()
        if now == before and not strange:
            return None
        if strange or not self._whole:
            what = f"keeps state under {strange[0]!r}" if strange else "changes the options of its groups in its step"
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} {what}, so it looks at all parameters at once; "
                + ("state belongs to a parameter" if strange else "pass prepare(..., whole=True)")
            )
        return now

    def edit(self) -> "Edit":
        """While it is open, user code may change state and options of the optimizer; see `Edit`. One worker's."""
        self._undo = {i: dict(self.optimizer.state.get(p, {})) for i, p in enumerate(self.parameters)}
        self._undo_options = self.hyperparameters()
        return Edit(self.optimizer, self._save_all)

    def _save_all(self) -> None:
        self._state.save(self.entries())

    def changes(self, edit: Edit) -> list[Any]:
        """What an edit, which is over, has changed: [news, [parameter, keys that are gone], options or None].

        Raises:
            UnsupportedError: A tensor got another shape or type.
        """
        options = self.hyperparameters()
        changed = options if options != self._undo_options else None
        if not edit.touched:
            return [[], [], changed]
        news = self._news(range(len(self.parameters)))
        for i, tensors, _ in news:
            for key, packed in tensors.items():
                known, form = self._entries.get(i, {}).get(key), Form.unpack(packed)
                if known is not None and (known.live.shape, known.live.dtype) != (form.shape, form.dtype):
                    raise UnsupportedError(
                        f"run.edit turned '{key}' of '{self.names[i]}' in {type(self.optimizer).__name__} into "
                        f"{form.dtype} {tuple(form.shape)}; expected {known.live.dtype} {tuple(known.live.shape)} as "
                        "before"
                    )
        gone = []
        for i, before in self._undo.items():
            now = self.optimizer.state.get(self.parameters[i], {})
            if keys := [key for key in before if key not in now]:
                gone.append([i, keys])
        return [news, gone, changed]

    def adopt_changes(self, changes: list[Any], took_part: bool) -> None:
        """An edit with these changes is committed."""
        news, gone, options = changes
        for i, keys in gone:
            held = self.optimizer.state[self.parameters[i]]
            for key in keys:
                held.pop(key, None)
                self._values.get(i, {}).pop(key, None)
                self._state.values.pop(f"{self._prefix}.{self.names[i]}.{key}", None)
                if key in self._entries.get(i, {}):
                    self._entries[i][key].counts = False
        self.adopt(news, took_part)
        if options is not None:
            self.set_hyperparameters(options)

    def remember(self) -> None:
        """Note what the state is, now that nobody should change it but a step or an edit."""
        self._left = []
        for p in self.parameters:
            held = self.optimizer.state.get(p)
            if held:
                tensors = {key: (t, t._version) for key, t in held.items() if isinstance(t, Tensor)}
                self._left.append((held, tensors))
        self._held_by = self.optimizer.state

    def check_untouched(self) -> None:
        """Say so if user code changed the optimizer's state between steps.

        Raises:
            NondeterminismError: It did.
        """
        same = self.optimizer.state is self._held_by and all(
            held.get(key) is tensor and tensor._version == version
            for held, tensors in self._left
            for key, (tensor, version) in tensors.items()
        )
        if not same:
            raise NondeterminismError(
                f"the state of {type(self.optimizer).__name__} was changed between steps; the workers share it, so it "
                "is changed once for all of them: run.edit(lambda: optimizer.load_state_dict(...)), or load it before "
                "run.prepare"
            )

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
            self._hold(i, tensors)

    def _reserve(self, i: int, tensors: dict[str, Any]) -> None:
        """Make room for state that has none. Trying an operation again makes the same room, so it may stay."""
        known = self._entries.setdefault(i, {})
        fresh = {
            f"{self._prefix}.{self.names[i]}.{key}": Form.unpack(packed)
            for key, packed in sorted(tensors.items())
            if key not in known
        }
        if not fresh:  # even an empty reservation takes room, and whoever tries again would take it once more
            return
        for entry in self._state.add(fresh):
            known[entry.name.rpartition(".")[2]] = entry

    def _hold(self, i: int, keys: Iterable[str]) -> None:
        """Let the optimizer use the state that all share."""
        held = self.optimizer.state[self.parameters[i]]
        for key in keys:
            held[key] = self._entries[i][key].working

    def adopt(self, news: News, took_part: bool) -> None:
        """An operation with this news is committed."""
        for i, tensors, values in news:
            held = self.optimizer.state[self.parameters[i]]
            if not took_part:
                self._reserve(i, tensors)
                self._hold(i, tensors)
            for key in tensors:
                self._entries[i][key].counts = True
            for key, value in values.items():
                if key == _OPTIONS:
                    self.set_hyperparameters(value)
                    continue
                held[key] = value
                self._values.setdefault(i, {})[key] = value
                self._state.values[f"{self._prefix}.{self.names[i]}.{key}"] = value
        self._undo, self._undo_options = {}, None

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
        if self._undo_options is not None:
            self.set_hyperparameters(self._undo_options)
        self._undo, self._undo_options = {}, None

    def in_tree(self, spans: Sequence[Span], parts: Sequence[Sequence[int]] | None = None) -> tuple[Summing, Delivery]:
        """How the workers of a run add up gradients among themselves.

        Args:
            spans: The shards of each worker.
            parts: Which parameters are added up together, where that is given.
        """
        sizes = [p.numel() * p.element_size() for p in self.parameters]
        plan = plan_summing(sizes, spans, self._group.rank, parts, whole=self._whole)
        if not self._state.memory.shared:  # every site adds up, and updates, all of them
            return replace(plan, owners=(plan.rank,) * len(sizes)), Local(plan)
        if len(spans) == 1:
            return plan, Local(plan)
        leaves = [Leaves.of(span, spans[-1][1]) for span in spans]
        return plan, SharedAreas(plan, self._state.memory, self.parameters, self._words, leaves)

    def alone(self, span: Span, num_shards: int, *, add: bool) -> tuple[Summing, Delivery]:
        """How a worker adds up the gradients of its own shards if the others are not there; see `plan_nodes`."""
        plan = plan_nodes([p.numel() * p.element_size() for p in self.parameters], span, num_shards, add=add)
        return plan, Local(plan)

    def news_of(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> News:
        """A checkpoint's state of this optimizer, as news."""
        news = []
        for i, name in enumerate(self.names):
            head = f"{self._prefix}.{name}."
            mine = {key.removeprefix(head): Form.of(t).pack() for key, t in tensors.items() if key.startswith(head)}
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
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def release(self) -> None:
        """Give the optimizer its whole state as ordinary tensors, whoever owned it."""
        for i, entries in self._entries.items():
            for key, entry in entries.items():
                if entry.counts and self._state.memory.shared:
                    self.optimizer.state[self.parameters[i]][key] = entry.live.clone()

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
                        tensors[key] = Form.of(value).pack()
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


def _check_kind(optimizer: Optimizer, *, whole: bool) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{name} calls the model by itself (its step needs a closure), but a step is computed by all workers; use "
            "an optimizer that steps on gradients"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam wants sparse gradients, which evenstep does not add up; use Adam")
    if not whole and not type(optimizer).__module__.startswith("torch.optim"):
        warnings.warn(
            f"{name} is not from torch.optim: the result is the same for every number of workers only if it treats "
            "each parameter on its own. If it looks at all of them at once (as Lamb's global norm does), pass "
            "prepare(model, optimizer, whole=True): one worker then steps them all",
            stacklevel=4,
        )
