"""The parameters of a server: their values, versions and optimizer. No lock and no workers: those are the store's.

Values lie in *images* (`images.py`). What changes them is an `Applied`: the same whether it comes from workers or is
read back from a log, so that to read a log back is to have the same state.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.server.hyperparameters import set_options
from evenstep.server.images import Image, Images
from evenstep.server.recipes import Recipe, build
from evenstep.server.rounds import Tensors
from evenstep.server.stepping import Stepper
from evenstep.server.wire import Layout, Spec

__all__ = ["Applied", "MakeOptimizer", "State"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Applied:
    """An update that changed the parameters, as a journal keeps it.

    Attributes:
        kind: "gradient", "delta", "put"; or "peer", a delta that another server tells.
        version: The version it made.
        tensors: What the optimizer was given, what was subtracted, or the new values.
        buffers: New values of what the optimizer does not train.
        sequences: Whose updates these were.
        notes: What the contributors had to say.
        options: What the optimizer shall step with from now on; None: as before.
        sessions: Which life of each worker sent them, where it said so.
    """

    kind: str
    version: int
    tensors: Tensors
    buffers: Tensors
    sequences: Mapping[str, int]
    notes: list[Any]
    options: Any = None
    sessions: Mapping[str, str] = field(default_factory=dict)


class State:
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
        on_peer: Called with what another server told.
    """

    def __init__(self, make_optimizer: MakeOptimizer | None) -> None:
        self.make_optimizer = make_optimizer
        self.images: Images | None = None
        self.layout: Layout | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: Optimizer | None = None
        self._stepper: Stepper | None = None
        self._bound: Image | None = None
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
            given: The objects that an optimizer knows already; their memory becomes the image's.
            buffers: Which of the tensors the optimizer does not train.
            recipe: Which optimizer shall train the others.

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
        if recipe is not None:
            self.optimizer = build(recipe, trained)
        elif self.make_optimizer is not None:
            trainable = [p for p in trained.values() if p.requires_grad]
            self.optimizer = self.make_optimizer(
                trainable or [nn.Parameter(torch.zeros(1))]
            )  # none wants an empty list
        self._stepper = Stepper(self.optimizer) if self.optimizer is not None else None
        self.images, self.layout, self.parameters, self.buffers = images, Layout(specs), trained, untrained
        self.versions = dict.fromkeys(specs, 0)
        self.owner = owner

    def apply(self, applied: Applied, *, locked: bool) -> None:
        """Change the parameters.

        Args:
            applied: How.
            locked: Whether a reader's image must stay as it is.
        """
        assert self.images is not None, "there is something to update"
        self._bind(self.images.writable() if locked else self.images.current)
        with torch.no_grad():
            self._change(applied)
        self.version = applied.version
        self.versions.update(dict.fromkeys([*applied.tensors, *applied.buffers], self.version))

    def _bind(self, image: Image) -> None:
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
            assert self.optimizer is not None, "it was checked"
            assert self._stepper is not None, "it came with the optimizer"
            if applied.options is not None:
                set_options(self.optimizer, applied.options)
            for name, gradient in applied.tensors.items():
                self.parameters[name].grad = gradient
            try:
                self._stepper.step()
            finally:
                for name in applied.tensors:
                    self.parameters[name].grad = None

    @property
    def keeps_no_gradient(self) -> bool:
        """Whether no gradient is held after a step: torch's own optimizers hold none."""
        return self._stepper is None or self._stepper.is_torchs

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
