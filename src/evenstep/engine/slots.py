"""The places in a model where its parameters and buffers hang, and lanes that hang there in turn.

Several shards of one worker can be alive at once, and their gradients must not mix. So each gets a *lane*: leaf tensors
of its own over the same parameter memory, and buffers of its own. Whichever shard runs has its lane bound to the model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.core.errors import UnsupportedError

__all__ = ["Lane", "Slots"]


class Slots:
    """Where the parameters and buffers of some models hang. A shared (tied) tensor has several places."""

    def __init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, Tensor] = {}
        self.modules: list[nn.Module] = []
        self._places: list[tuple[dict[str, Any], str, str]] = []
        self._buffer_places: dict[str, tuple[dict[str, Any], str]] = {}
        self._flat: list[nn.Module] = []

    def add(self, model: nn.Module, prefix: str) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Take in a model; return its parameters and buffers that were not known yet, by full name."""
        names = {id(p): name for name, p in self.parameters.items()} | {id(b): name for name, b in self.buffers.items()}
        added: tuple[dict[str, nn.Parameter], dict[str, Tensor]] = ({}, {})
        known = set(map(id, self.modules))
        for path, module in model.named_modules(prefix=prefix):
            if id(module) in known:
                continue
            self.modules.append(module)
            if isinstance(module, nn.RNNBase):
                self._flat.append(module)
            for kind, tensors in ((0, module._parameters), (1, module._buffers)):
                for key, tensor in tensors.items():
                    if tensor is None:
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{key}")
                    if name not in self.parameters and name not in self.buffers:
                        added[kind][name] = tensor  # type: ignore[assignment]  # kind 0 are parameters
                        (self.parameters, self.buffers)[kind][name] = tensor  # type: ignore[index]  # likewise
                    self._places.append((tensors, key, name))
                    if kind:
                        self._buffer_places.setdefault(name, (tensors, key))
        return added

    def bind(self, tensors: dict[str, Tensor]) -> None:
        """Hang tensors into their places."""
        for place, key, name in self._places:
            place[key] = tensors[name]
        for module in self._flat:  # an RNN keeps a list of its weights beside the places
            module._flat_weights = [getattr(module, key, None) for key in module._flat_weights_names]  # type: ignore[union-attr,has-type,assignment]  # RNNBase's own fields

    def bound_buffers(self) -> dict[str, Tensor]:
        """The buffers as they hang there now: a forward may have put others in their place."""
        return {name: place[key] for name, (place, key) in self._buffer_places.items()}

    def base(self) -> dict[str, Tensor]:
        """The tensors that the user's model holds between steps."""
        return {**self.parameters, **self.buffers}


class Lane:
    """One shard's own leaves and buffers, or (with `own` false) the model's, for shards that run one after the other."""

    def __init__(self, slots: Slots, *, own: bool) -> None:
        self._slots = slots
        self.leaves: dict[str, nn.Parameter] = slots.parameters
        self._buffers = slots.buffers
        if own:
            self.leaves = {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in slots.parameters.items()}
            self._buffers = {name: b.detach().clone() for name, b in slots.buffers.items()}
        self._bound: dict[str, Tensor] = {}

    def begin(self, buffers: dict[str, Tensor]) -> None:
        """Start a shard's step: the buffers of version v, and whatever is frozen by now stays frozen."""
        for name, parameter in self._slots.parameters.items():
            leaf = self.leaves[name]
            if leaf.requires_grad != parameter.requires_grad:
                leaf.requires_grad_(parameter.requires_grad)
            leaf.grad = None
        copy_into(buffers, self._buffers)
        self._bound = {**self.leaves, **self._buffers}

    def resume(self) -> None:
        """Hang this lane into the model."""
        self._slots.bind(self._bound)

    def pause(self) -> None:
        """Remember the buffers that hang there now, before another lane takes the place."""
        self._bound.update(self._slots.bound_buffers())

    def buffers_after(self) -> dict[str, Tensor]:
        """The buffers as this shard's forward left them.

        Raises:
            UnsupportedError: The forward changed the shape or type of a buffer.
        """
        after = {name: self._bound[name] for name in self._slots.buffers}
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


@torch.no_grad()
def copy_into(tensors: dict[str, Tensor], to: dict[str, Tensor]) -> None:
    """Copy each tensor into its namesake, in place."""
    for name, tensor in tensors.items():
        if to[name] is not tensor:
            to[name].copy_(tensor)
