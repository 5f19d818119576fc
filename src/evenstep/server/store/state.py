"""The parameters of a server: their values, versions and optimizer. Locks and workers are the store's business.

Values are in *images* (`images.py`). What changes them is an `Applied`: the same whether it comes from workers or from
a log, so that replaying a log gives the same state.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.server.store.hyperparameters import Hyperparameters, set_hyperparameters, try_out
from evenstep.server.store.images import Images, ServerImage
from evenstep.server.store.optimizers import MakeOptimizer, Stepper, is_torchs
from evenstep.server.store.rounds import Tensors
from evenstep.server.wire.recipes import Recipe, build
from evenstep.server.wire.tensors import ParameterLayout, Spec, fresh

__all__ = ["Applied", "Before", "ParameterState"]


@dataclass(frozen=True)
class Applied:
    """An update that changed the parameters, as a journal keeps it.

    Attributes:
        kind: "gradient", "delta", "put"; or "peer", a delta from another server.
        version: The version it made.
        tensors: What the optimizer was given, what was subtracted, or the new values.
        buffers: New values of what the optimizer does not train.
        sequences: Whose updates these were.
        notes: The notes of the contributors.
        options: The optimizer's options from now on; None: unchanged.
        sessions: The life of each worker that sent them, if given.
    """

    kind: str
    version: int
    tensors: Tensors
    buffers: Tensors
    sequences: Mapping[str, int]
    notes: list[Any]
    options: Hyperparameters | None = None
    sessions: Mapping[str, str] = field(default_factory=dict)


class ParameterState:
    """Values, versions and the optimizer.

    Args:
        make_optimizer: Makes the optimizer from the parameters when they are put. None: only deltas can be applied.

    Attributes:
        layout: What the parameters are; None until they are put.
        parameters: Those that the optimizer may train, by name.
        buffers: The names of the others.
        version: How many updates there were.
        versions: When each parameter changed last.
        owner: Who put them.
        on_peer: Called with the deltas of another server.
    """

    def __init__(self, make_optimizer: MakeOptimizer | None) -> None:
        self.make_optimizer = make_optimizer
        self.images: Images | None = None
        self.layout: ParameterLayout | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: Optimizer | None = None
        self._stepper: Stepper | None = None
        self._bound: ServerImage | None = None
        self._proven: set[str] = set()  # parameters that the optimizer has stepped on with its present options
        self._options: Hyperparameters | None = None  # the options that came last
        self.buffers: frozenset[str] = frozenset()
        self.version = 0
        self.versions: dict[str, int] = {}
        self.owner: str | None = None
        self.on_peer: Callable[[Tensors], None] = lambda _: None

    def initialise(
        self,
        tensors: Tensors,
        owner: str,
        given: Mapping[str, nn.Parameter],
        buffers: Iterable[str],
        recipe: Recipe | None = None,
    ) -> None:
        """Give the parameters their first values.

        Args:
            tensors: All of them.
            owner: Who puts them.
            given: Parameter objects that an optimizer already knows; their memory becomes the image's.
            buffers: Which of the tensors the optimizer does not train.
            recipe: Which optimizer trains the others.

        Raises:
            RefusedError: The recipe describes none.
        """
        specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
        images, untrained = Images(specs), frozenset(buffers)
        for name, tensor in tensors.items():
            images.current.tensors[name].copy_(tensor.detach())
        trained = {
            name: given.get(
                name, nn.Parameter(images.current.tensors[name], requires_grad=spec.dtype.is_floating_point)
            )
            for name, spec in specs.items()
            if name not in untrained
        }
        for name, parameter in trained.items():
            parameter.data = images.current.tensors[name]
        optimizer = None
        if recipe is not None:
            optimizer = build(recipe, trained)
            try_out(optimizer)
        elif self.make_optimizer is not None:
            trainable = [p for p in trained.values() if p.requires_grad]
            optimizer = self.make_optimizer(
                trainable or [nn.Parameter(torch.zeros(1))]
            )  # no optimizer takes an empty list
        self.optimizer = optimizer
        self._stepper = Stepper(optimizer) if optimizer is not None else None
        self.images, self.layout, self.parameters, self.buffers = images, ParameterLayout(specs), trained, untrained
        self.versions = dict.fromkeys(specs, 0)
        self.owner = owner

    def forget(self) -> None:
        """Go back to before anything was put."""
        images, self.images, self.layout, self.optimizer, self._stepper = self.images, None, None, None, None
        self.parameters, self.buffers, self.versions, self.owner = {}, frozenset(), {}, None
        self._bound, self._proven, self._options = None, set(), None
        if images is not None:
            images.close()

    def is_proven(self, applied: Applied) -> bool:
        """Whether an update like this one has been applied before, so that it cannot fail.

        Changing values by what was checked cannot fail. A step can, for reasons that only the optimizer knows, so the
        first step on a parameter, and the first one with other options, are not proven.
        """
        if applied.kind != "gradient":
            return True
        return self.has_options(applied.options) and applied.tensors.keys() <= self._proven

    def has_options(self, options: Hyperparameters | None) -> bool:
        """Whether the optimizer already steps with these options; None means its present ones."""
        return options is None or options == self._options

    def doubt(self) -> None:
        """Consider nothing proven any more."""
        self._proven, self._options = set(), None

    def before(self, applied: Applied) -> "Before":
        """A copy of what an update is about to change."""
        return Before(self, applied)

    def apply(self, applied: Applied, *, locked: bool) -> None:
        """Change the parameters.

        Args:
            applied: The update.
            locked: Whether images that are being read must stay unchanged.
        """
        assert self.images is not None, "only parameters that were put are updated"
        self._bind(self.images.writable() if locked else self.images.current)
        with torch.no_grad():
            self._change(applied)
        self.version = applied.version
        self.versions.update(dict.fromkeys([*applied.tensors, *applied.buffers], self.version))

    def _bind(self, image: ServerImage) -> None:
        if image is self._bound:
            return
        for name, parameter in self.parameters.items():
            parameter.data = image.tensors[name]
        self._bound = image

    def _change(self, applied: Applied) -> None:
        values = self.tensors()
        for name, value in applied.buffers.items():
            values[name].copy_(value)
        if applied.kind == "put":
            for name, value in applied.tensors.items():
                values[name].copy_(value)
        elif applied.kind in ("delta", "peer"):
            for name, delta in applied.tensors.items():
                values[name].sub_(delta)
            if applied.kind == "peer":
                self.on_peer(applied.tensors)
        else:
            self._step(applied)

    def _step(self, applied: Applied) -> None:
        """Let the optimizer step on gradients."""
        assert self.optimizer is not None, "gradients are refused by a server without an optimizer"
        assert self._stepper is not None, "every optimizer has a stepper"
        if not self.has_options(applied.options):
            assert applied.options is not None, "options that differ from the present ones were given"
            set_hyperparameters(self.optimizer, applied.options)
            self._options = applied.options
            self._proven.clear()
        for name, gradient in applied.tensors.items():
            self.parameters[name].grad = gradient
        try:
            self._stepper.step()
        finally:
            for name in applied.tensors:
                self.parameters[name].grad = None
        self._proven.update(applied.tensors)

    @property
    def keeps_no_gradient(self) -> bool:
        """Whether no gradient is held after a step: torch's own optimizers hold none."""
        return self.optimizer is None or is_torchs(self.optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """The current values."""
        return dict(self.images.current.tensors) if self.images is not None else {}

    def close(self) -> None:
        """Give the parameters ordinary memory, and let go of the images."""
        if self.images is not None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
            self.images.close()
            self.images = self._bound = None


class Before:
    """A copy of everything that an update may change: values, and what the optimizer keeps.

    An optimizer that is not torch's may keep more than its state and options; that is not restored.
    """

    def __init__(self, state: ParameterState, applied: Applied) -> None:
        self._state = state
        values, optimizer = state.tensors(), state.optimizer
        self._values = {name: _copy(values[name]) for name in (*applied.tensors, *applied.buffers)}
        self._version, self._versions = state.version, {name: state.versions[name] for name in self._values}
        self._kept = {
            name: {key: _copy(value) for key, value in optimizer.state[state.parameters[name]].items()}
            for name in applied.tensors
            if optimizer is not None and state.parameters[name] in optimizer.state
        }
        self._names = list(applied.tensors)
        self._groups = [_options_of(group) for group in optimizer.param_groups] if optimizer is not None else []

    def restore(self) -> None:
        """Restore it."""
        state, values = self._state, self._state.tensors()
        state.doubt()
        state.version = self._version
        state.versions.update(self._versions)
        for name, value in self._values.items():
            values[name].copy_(value)
        optimizer = state.optimizer
        if optimizer is None:
            return
        for name in self._names:
            optimizer.state.pop(state.parameters[name], None)
            if name in self._kept:
                optimizer.state[state.parameters[name]] = self._kept[name]
        for group, options in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(options)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in group.items() if key != "params"}


def _copy(value: Any) -> Any:
    """A copy; a tensor's memory is returned to the system as soon as the copy is gone."""
    if not isinstance(value, Tensor) or not value.nbytes:
        return copy.deepcopy(value)
    flat = torch.frombuffer(fresh(value.nbytes), dtype=value.dtype, count=value.numel())
    return flat.view(value.shape).copy_(value)
