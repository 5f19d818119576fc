"""A prepared optimizer: its parameters, who owns which, and what it keeps for them.

Every worker holds the whole optimizer object (so that schedulers work anywhere), but in a step only the owner of a
parameter gives it a gradient, so `optimizer.step()` changes owned parameters only.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import points
from evenstep.core.config import MAX_SHARDS
from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.across import AcrossMachines
from evenstep.engine.conduct import Conduct, StepGuard, check_kind, options_of
from evenstep.engine.delivery import Delivery, Local, SharedAreas
from evenstep.engine.edits import Edit
from evenstep.engine.flat import FlatGradients
from evenstep.engine.gradients import Gradients
from evenstep.engine.kept import OPTIONS, Kept, News
from evenstep.engine.peers import connect
from evenstep.engine.state import State
from evenstep.exchange.group import Group
from evenstep.plan.across import most_pieces, plan_across
from evenstep.plan.summing import Leaves, Span, Summing, plan_nodes, plan_summing
from evenstep.transport.memory import HostMemory

__all__ = ["PreparedOptimizer"]


class PreparedOptimizer:
    """An optimizer with the parameters that it trains.

    Making one takes room in the segment, so all workers must do it alike; it does not communicate.

    Args:
        group: The workers.
        state: Where parameters and optimizer state live; holds the parameters already.
        optimizer: The user's optimizer; it stays the user's object.
        names: The full name of every prepared parameter, by its id.
        prefix: What the names of the optimizer's state begin with.
        whole: Whether one worker steps all parameters, for optimizers that look at all of them at once.

    Raises:
        UnsupportedError: The optimizer cannot be split by parameter, or holds one that is in no prepared model.

    Attributes:
        optimizer: The user's optimizer.
        parameters: Those that it trains, in its order; parameters are numbered by it.
        names: Their full names.
        kept: What it keeps for them.
        gradients: Their gradients, on the way to the owners.
        guard: Keeps user code from stepping by itself.
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
        check_kind(optimizer, whole=whole)
        self.names = self._names_of(self.parameters, names)
        self.kept = Kept(state, optimizer, self.parameters, self.names, prefix)
        self._make_gradients()
        self._undo_options: list[dict[str, Any]] | None = None
        self.guard = StepGuard(optimizer)

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
        if self._group.puts is not None:  # other machines may come at any time
            sizes = [p.numel() * p.element_size() for p in self.parameters]
            shape = (max(most_pieces(sizes), 1), MAX_SHARDS + 1)  # a piece has no more nodes than there are shards
            self._piece_words = self._state.memory.words(shape[0] * shape[1]).view(shape)

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
        self.names += self._names_of(parameters, names)
        self.parameters += parameters
        self._make_gradients()

    def agree(self) -> News:
        """Check that all workers prepare the same; return the state that the first worker's optimizer already has.

        Raises:
            MismatchError: Another worker prepares another optimizer.
        """
        of_all = self.compare(f"{self._prefix}: optimizer", self.kept.news(range(len(self.names))))
        news: News = of_all[0]
        self.kept.settle(news, {i for i, _, _ in news} if self._group.rank == 0 else set())
        self._state.spread(f"{self._prefix}: values", self.kept.entries_of(news), 0)
        return news

    def compare(self, tag: str, more: Any = None) -> list[Any]:
        """Check that all workers have the same optimizer; return what else each of them says.

        Raises:
            MismatchError: Another worker has another.
        """
        mine = [type(self.optimizer).__name__, self.names, self.hyperparameters()]
        of_all = self._group.gather_json(tag, [mine, more])
        for worker, (theirs, _) in zip(self._group.members, of_all, strict=True):
            if theirs != of_all[0][0]:
                raise MismatchError(
                    f"worker {worker} prepares the optimizer {theirs} where worker 0 prepares {of_all[0][0]}: "
                    "all workers must build the same one"
                )
        return [theirs for _, theirs in of_all]

    def update(self, sums: dict[int, Tensor | None]) -> News:
        """Save the owned parameters, then step. Returns what is new in the optimizer's state."""
        touched = [i for i, gradient in sums.items() if gradient is not None]
        self.kept.begin(touched)
        self._state.save([self._state.entries[self.names[i]] for i in touched] + self.kept.entries(touched))
        for i in touched:
            self.parameters[i].grad = sums[i]
        points.reach("inside update")
        conduct = Conduct(self.optimizer, whole=self._whole)
        self._undo_options = conduct.options if self._whole else None
        try:
            if self.gradients.plan.owned or not self._whole:
                with self.guard.lifted():
                    self.optimizer.step()
            else:
                self.stepped_elsewhere()
        finally:
            for p in self.parameters:
                p.grad = None
        changed, news = conduct.changed_options(), self.kept.news(touched)
        if changed is not None:
            first = next((item for item in news if item[0] == 0), None)
            if first is None:
                news.append(first := [0, {}, {}])
            first[2][OPTIONS] = changed
        return news

    def settle(self, news: News, mine: Collection[int]) -> None:
        """Move what is new into the shared state; see `Kept.settle`."""
        self.kept.settle(news, mine)

    def adopt(self, news: News, took_part: bool) -> None:
        """Adopt the news of a committed operation."""
        self.kept.adopt(news, took_part)
        self._undo_options = None
        for _, _, values in news:
            if OPTIONS in values:
                self.set_hyperparameters(values[OPTIONS])

    def stepped_elsewhere(self) -> None:
        """Note that others did the optimizer's step; schedulers check that it was done."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own mark

    def rollback(self) -> None:
        """Undo what an abandoned operation did to the optimizer."""
        self.kept.rollback()
        if self._undo_options is not None:
            self.set_hyperparameters(self._undo_options)
        self._undo_options = None

    def edit(self) -> Edit:
        """While it is open, user code may change state and options of the optimizer; see `Edit`. For one worker."""
        self.kept.begin(range(len(self.parameters)))
        self._undo_options = self.hyperparameters()
        return Edit(self.optimizer, self.kept.save_all)

    def changes(self, edit: Edit) -> list[Any]:
        """What a finished edit has changed: [news, [parameter, keys that are gone], options or None].

        Raises:
            UnsupportedError: A tensor got another shape or type.
        """
        news, gone = self.kept.edited() if edit.touched else ([], [])
        options = self.hyperparameters()
        return [news, gone, options if options != self._undo_options else None]

    def adopt_changes(self, changes: list[Any], took_part: bool) -> None:
        """Adopt the changes of a committed edit."""
        news, gone, options = changes
        self.kept.drop(gone)
        self.adopt(news, took_part)
        if options is not None:
            self.set_hyperparameters(options)

    def hyperparameters(self) -> list[dict[str, Any]]:
        """The options of the parameter groups, such as learning rates, as plain values."""
        return options_of(self.optimizer)

    def set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Set the options of the parameter groups."""
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def in_tree(self, spans: Sequence[Span], parts: Sequence[Sequence[int]] | None = None) -> tuple[Summing, Delivery]:
        """How the workers of a run add up gradients among themselves.

        Args:
            spans: The shards of each worker.
            parts: Which parameters are added up together, if that is given.
        """
        sizes = [p.numel() * p.element_size() for p in self.parameters]
        if self._group.num_machines > 1:
            return self._across_machines(sizes, spans)
        plan = plan_summing(sizes, spans, self._group.rank, parts, whole=self._whole)
        if not self._state.memory.shared:  # every site adds up, and updates, all parameters
            return replace(plan, owners=(plan.rank,) * len(sizes)), Local(plan)
        return plan, self._around_memory(plan, spans, spans[-1][1])

    def _around_memory(self, plan: Summing, spans: Sequence[Span], num_shards: int) -> Delivery:
        """How workers that share memory add up the gradients of their shards."""
        if len(spans) == 1:
            return Local(plan)
        leaves = [Leaves.of(span, num_shards) for span in spans]
        return SharedAreas(plan, self._state.memory, self.parameters, self._words, leaves)

    def _across_machines(self, sizes: Sequence[int], spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        group, memory = self._group, self._state.memory
        assert isinstance(memory, HostMemory), "runs on several machines keep their state in host memory"
        assert group.puts is not None, "a group on several machines can put data on the others"
        plan = plan_across(sizes, spans, group.rank, group.machines, whole=self._whole)
        inside = self._around_memory(plan.local, [spans[rank] for rank in plan.workers], plan.num_shards)
        return plan.local, AcrossMachines(plan, inside, memory, self.parameters, self._piece_words, group.puts)

    def alone(self, span: Span, num_shards: int, *, add: bool) -> tuple[Summing, Delivery]:
        """How a worker adds up the gradients of its own shards without the others; see `plan_nodes`."""
        plan = plan_nodes([p.numel() * p.element_size() for p in self.parameters], span, num_shards, add=add)
        return plan, Local(plan)
