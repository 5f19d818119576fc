"""The slots of a model that hold its parameters and buffers, and lanes that fill them in turn.

Several shards of one worker can be alive at once, and their gradients must not mix. So each gets a *lane*: leaf tensors
of its own over the same parameter memory, and buffers of its own. Whichever shard runs has its lane bound to the model.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from evenstep.core.errors import UnsupportedError
from evenstep.engine.copies import Copier

__all__ = ["Lane", "ModelSlots"]


class ModelSlots:
    """The slots of some models that hold parameters and buffers. A shared (tied) tensor has several places."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.modules: list[nn.Module] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._names: list[str] = []  # the name of the tensor at each place
        self.places: set[tuple[int, str]] = set()  # the same, by the id of the dict
        self._flat: list[nn.Module] = []
        self._found: list[bool] | None = None
        self._structure: list[tuple[str, nn.Module, list[nn.Module | None], list[str]]] = []  # children and names

    def add(self, model: nn.Module, prefix: str) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Take in a model; return its parameters and buffers that were not known yet, by full name."""
        names = {id(p): name for name, p in self.parameters.items()} | {id(b): name for name, b in self.buffers.items()}
        added: tuple[dict[str, nn.Parameter], dict[str, Tensor]] = ({}, {})
        known = set(map(id, self.modules))
        for path, module in model.named_modules(prefix=prefix):
            if id(module) in known:
                continue
            self.modules.append(module)
            self._structure.append((path, module, [*module._modules.values()], [*dict.keys(module._parameters)]))
            if isinstance(module, nn.RNNBase):
                self._flat.append(module)
            for kind, tensors in ((0, module._parameters), (1, module._buffers)):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{key}")
                    if name not in self.parameters and name not in self.buffers:
                        added[kind][name] = tensor
                        (self.parameters, self.buffers)[kind][name] = tensor
                    self._places.append((tensors, key))
                    self.places.add((id(tensors), key))
                    self._names.append(name)
        return added

    def check(self) -> None:
        """Check that the models still consist of the layers and parameters they had when they were added.

        Raises:
            UnsupportedError: A layer or a parameter was replaced, added or taken away.
        """
        for path, module, children, names in self._structure:
            if [*module._modules.values()] != children:
                _say_children(path, module, children)
            if [*dict.keys(module._parameters)] != names:
                raise UnsupportedError(
                    f"'{path}' ({type(module).__name__}) has parameters {sorted(module._parameters)}, not "
                    f"{sorted(names)} as in run.prepare; pruning, weight norm and other parametrizations come before it"
                )
        for (place, key), name in zip(self._places, self._names, strict=True):
            if name in self.parameters and dict.__getitem__(place, key) is not self.parameters[name]:
                raise UnsupportedError(
                    f"parameter '{name}' was replaced by another after run.prepare, which no step would train; put "
                    "values into it instead: run.edit(lambda: parameter.copy_(values))"
                )

    def spanning_buffers(self) -> set[str]:
        """The buffers of layers that combine something over all shards: equal on all that compute any."""
        spanning = {id(m._buffers) for m in self.modules if getattr(m, "spans_shards", False)}
        places = zip(self._places, self._names, strict=True)
        return {name for (place, _), name in places if id(place) in spanning}

    def in_eval_mode(self) -> list[str]:
        """The paths of the modules that are in eval mode."""
        return [path for path, module, _, _ in self._structure if not module.training]

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """While this is open, every shard begins with the modules in the modes they are in now."""
        self._found = self.modes()
        try:
            yield
        finally:
            self._found = None

    def modes(self) -> list[bool]:
        """The mode of every module: whether it is training."""
        return [module.training for module in self.modules]

    def first_modes(self) -> list[bool]:
        """Those that a shard begins with."""
        return self.modes() if self._found is None else self._found

    def set_modes(self, modes: list[bool]) -> None:
        """Put every module into a mode."""
        for module, training in zip(self.modules, modes, strict=True):
            if module.training is not training:
                module.training = training

    def in_place_order(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """One tensor for every place."""
        return [tensors[name] for name in self._names]

    def bind(self, tensors: list[Tensor]) -> None:
        """Put one tensor into every place."""
        for (place, key), tensor in zip(self._places, tensors, strict=True):
            place[key] = tensor
        for module in self._flat:  # an RNN keeps a list of its weights besides the places
            held = dict(zip(module._parameters, dict.values(module._parameters), strict=True))
            names: Any = module._flat_weights_names
            weights: Any = [held[key] if key in held else getattr(module, key, None) for key in names]
            module._flat_weights = weights
            # Otherwise it would take them for new ones, and on a GPU move them into memory that no update reaches.
            refs: Any = [None if weight is None else weakref.ref(weight) for weight in weights]
            module._flat_weight_refs = refs

    def bound(self) -> list[Tensor]:
        """The tensor at every place now: a forward may have put another buffer there."""
        return [dict.__getitem__(place, key) for place, key in self._places]  # a subclass may wait on access

    def named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        """Tensors in place order, by name; of a tied one, the first place counts."""
        return dict(zip(reversed(self._names), reversed(tensors), strict=True))

    def bound_buffers(self) -> dict[str, Tensor]:
        """The tensors that hang where the buffers belong, by the names of these."""
        bound = self.named(self.bound())
        return {name: bound[name] for name in self.buffers}

    def bind_base(self) -> None:
        """Put in what the user's model holds between steps."""
        self.bind(self.in_place_order({**self.parameters, **self.buffers}))


def _say_children(path: str, module: nn.Module, before: list[nn.Module | None]) -> None:
    now = dict(module._modules)
    odd = next((f"'{path}.{name}' is a new {type(m).__name__}" for name, m in now.items() if m not in before), None)
    raise UnsupportedError(
        f"the layers of '{path}' are not those of run.prepare: {odd or 'one is missing'}, which steps would neither "
        "train nor share; build the whole model first, with its adapters and parametrizations, then call run.prepare"
    )


class Lane:
    """One shard's own leaves and buffers, or (`own` false) the model's, for shards that run one after another."""

    def __init__(self, slots: ModelSlots, *, own: bool) -> None:
        self._slots = slots
        self.leaves: dict[str, nn.Parameter] = slots.parameters
        self._buffers = slots.buffers
        if own:
            self.leaves = {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in slots.parameters.items()}
            self._buffers = {name: b.detach().clone() for name, b in slots.buffers.items()}
        self._copier = Copier()
        self._bound: list[Tensor] = []
        self._modes: list[bool] = []
        self._versions: dict[str, int] = {}

    def begin(self, buffers: dict[str, Tensor]) -> None:
        """Start a shard's step with the buffers of version v; what is frozen by now stays frozen."""
        for name, parameter in self._slots.parameters.items():
            leaf = self.leaves[name]
            if leaf.data_ptr() != parameter.data_ptr():
                leaf.data = parameter.detach()  # even if user code moved it: this is where it is trained
            if leaf.requires_grad != parameter.requires_grad:
                leaf.requires_grad_(parameter.requires_grad)
            if leaf._backward_hooks is not parameter._backward_hooks:
                leaf._backward_hooks = parameter._backward_hooks  # what the user has registered there
            leaf.grad = None
        self._copier.copy(buffers, self._buffers)
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}
        self._bound = self._slots.in_place_order({**self.leaves, **self._buffers})
        self._modes = self._slots.first_modes()

    def resume(self) -> None:
        """Bind this lane to the model."""
        self._slots.bind(self._bound)
        self._slots.set_modes(self._modes)

    def pause(self) -> None:
        """Remember what is bound now, before another lane takes its place."""
        self._bound, self._modes = self._slots.bound(), self._slots.modes()

    def changed_buffers(self) -> set[str]:
        """The buffers that this shard's forward has written to."""
        bound = self._slots.named(self._bound)
        began = self._buffers.items()
        return {name for name, b in began if bound[name] is not b or b._version != self._versions[name]}

    def buffers_after(self) -> dict[str, Tensor]:
        """The buffers as this shard's forward left them.

        Raises:
            UnsupportedError: The forward changed the shape or type of a buffer.
        """
        bound = self._slots.named(self._bound)
        after = {name: bound[name] for name in self._slots.buffers}
        _check_buffers(after, self._slots.buffers)
        return after


def _check_buffers(after: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    for name, tensor in after.items():
        old = before[name]
        if tensor is None or tensor.shape != old.shape or tensor.dtype != old.dtype:
            found = "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise UnsupportedError(
                f"the forward turned buffer '{name}' from {tuple(old.shape)} {old.dtype} into {found}; "
                "a buffer must keep its shape and type: allocate it at its full size, or keep it as a plain attribute"
            )


def spanning_layers(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that combine something over all shards (they say so by `spans_shards`) and are training now."""
    return [m for m in modules if m.training and getattr(m, "spans_shards", False)]
