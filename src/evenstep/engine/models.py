"""The prepared models: their parameters and buffers, moved into the state alike on all workers."""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from evenstep.core.config import RunConfig
from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.core.fingerprint import fingerprint
from evenstep.core.octets import octets
from evenstep.engine.copies import Copier
from evenstep.engine.form import Form
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.randomness import preserved, seed_all
from evenstep.engine.slots import ModelSlots
from evenstep.engine.state import State, StateEntry
from evenstep.engine.untouched import Strays, Untouched
from evenstep.exchange.group import Group
from evenstep.transport.memory import Memory

__all__ = ["Models", "check_model"]

_GRADIENT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Added:
    """A model that was added: its tensors by name, as the user built them, and the room for them."""

    prefix: str
    tensors: dict[str, Tensor]
    entries: list[StateEntry]


class Models:
    """All models of a run.

    Attributes:
        state: Where their values lie.
        slots: Where their tensors hang.
        untouched: Notices if user code changes parameters.
        strays: Notices if it changes buffers.
    """

    def __init__(self, config: RunConfig, group: Group, memory: Memory) -> None:
        self._config, self._group = config, group
        self.state = State(memory)
        self.slots = ModelSlots()
        self._roots: list[nn.Module] = []
        self._kept: dict[str, Tensor] | None = None
        self._room: dict[str, Tensor] = {}  # where buffers are kept, again and again
        self._keeping, self._publishing, self._pulling = Copier(), Copier(), Copier()
        self.untouched = Untouched(self.slots.parameters)
        self.strays = Strays(self.slots.bound_buffers)

    def add(self, model: nn.Module) -> "Added":
        """Make room for a model. All workers must call this alike; it talks to nobody."""
        if any(model is root for root in self._roots):
            return Added("", {}, [])
        self._roots.append(model)
        prefix = "model" if len(self._roots) == 1 else f"model{len(self._roots)}"
        model.to(self._config.device)
        parameters, buffers = self.slots.add(model, prefix)
        tensors: dict[str, Tensor] = {**parameters, **buffers}
        entries = self.state.add({name: Form.of(p) for name, p in parameters.items()})
        entries += self.state.add({name: Form.of(b) for name, b in buffers.items()}, buffers)
        return Added(prefix, tensors, entries)

    def agree(self, added: "Added") -> None:
        """Give everyone the first worker's values.

        Raises:
            MismatchError: Another worker prepares a model with other parameters or buffers.
        """
        if not added.entries:
            return
        self._compare(added.prefix, added.tensors)
        if self._group.rank == 0:
            with torch.no_grad():
                for entry in added.entries:
                    entry.live.copy_(added.tensors[entry.name])
        self.state.spread(f"{added.prefix}: values", added.entries, 0)

    def bind(self, added: "Added") -> None:
        """Make the model use the shared values."""
        with torch.no_grad():
            for entry in added.entries:
                entry.counts = True
                if entry.working is entry.live:
                    added.tensors[entry.name].data = entry.live
                entry.pull()

    def _compare(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        layout = [[n, list(t.shape), str(t.dtype), list(t.stride()), t.requires_grad] for n, t in tensors.items()]
        of_all = self._group.gather_json(f"{prefix}: prepare", [layout, fingerprint(tensors)])
        first = of_all[0]
        for worker, (theirs, _) in zip(
            self._group.members, of_all, strict=True
        ):  # every worker sees every difference, so all raise alike
            for here, there in zip([*first[0], None], [*theirs, None], strict=False):
                if here != there:
                    raise MismatchError(
                        f"worker {worker} prepares {there or 'nothing more'} where worker 0 prepares "
                        f"{here or 'nothing more'}: all workers must build the same model"
                    )
        if self._group.rank == 0 and any(other[1] != first[1] for other in of_all):
            warnings.warn(
                "the workers built different initial weights; worker 0's are used, but another run would begin "
                "elsewhere: build the model inside `with evenstep.Run(...)`, or call torch.manual_seed before it",
                stacklevel=4,
            )

    def keep_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Remember the buffers as the first shard with samples left them; they are what the step will commit."""
        if self._room.keys() != buffers.keys():
            self._room = {name: torch.empty_like(buffer) for name, buffer in buffers.items()}
        self._keeping.copy(buffers, self._room)
        self._kept = self._room

    @property
    def kept_buffers(self) -> dict[str, Tensor]:
        """The buffers as the first shard with samples left them, if it was computed here: what the step will commit."""
        return self._kept or {}

    def take_buffers(self) -> dict[str, Tensor]:
        """As `kept_buffers`, for a caller to whom they belong from now on."""
        kept = self.kept_buffers
        self._room = {}
        self.drop_buffers()
        return kept

    def drop_buffers(self) -> None:
        """Forget the kept buffers."""
        self._kept = None

    def changed_buffers(self) -> list[str]:
        """The buffers that this site's first shard has changed, among those that may differ between sites.

        On a device this does not wait for the answer, and returns all that may have been changed.
        """
        spanning, entries = self.slots.spanning_buffers(), self.state.entries
        found = [(name, buffer) for name, buffer in self.kept_buffers.items() if name not in spanning]
        if not self.state.memory.shared:
            return [name for name, _ in found]
        return [name for name, buffer in found if not _same_bits(buffer, entries[name].live)]

    def buffers_to_spread(self, changed: Collection[str], *, everywhere: bool) -> list[StateEntry]:
        """The buffers whose values may differ between sites after a step.

        Every site has those of its own first shard. Layers that span shards leave the same values in all of them; for
        any other buffer that a forward changes, the values of the run's first shard count.

        Args:
            changed: Those that any site has changed, besides those of layers that span shards.
            everywhere: Whether every site computed a shard; a site that did not has none of them.
        """
        return [self.state.entries[name] for name in self.slots.buffers if not everywhere or name in changed]

    def publish_buffers(self, tag: str, owner: int, others: list[StateEntry], *, idle: bool) -> None:
        """Save version v of the buffers and put in what the first shard with samples left.

        Args:
            tag: The step, in words.
            owner: The rank of the worker that computed the run's first shard.
            others: The buffers that it gives to other sites.
            idle: Whether this site computed no shard.
        """
        entries = [self.state.entries[name] for name in self.slots.buffers]
        if self._kept is not None:
            self.state.save(entries)
            self._publishing.copy(self._kept, {entry.name: entry.live for entry in entries})
            self.drop_buffers()
        if not self.state.sites.are_one:
            if idle and self.state.sites.is_first:
                self.state.save(others)
            self.state.spread(tag + "buffers", others, owner)

    def pull(self) -> None:
        """Bring this worker's own copies up to the committed version."""
        entries = self.state.entries
        self._pulling.copy({name: entries[name].live for name in self.slots.buffers}, self.slots.buffers)
        self.strays.remember(self.slots.buffers)

    def remember(self) -> None:
        """Remember the models, now that only a step should change them."""
        self.untouched.remember()
        self.strays.remember(self.slots.buffers)

    def check(self, when: str, *, values: bool = True) -> None:
        """Report it if user code changed a model since it was remembered; raises as `slots` and `untouched` do."""
        self.slots.check()
        self.untouched.check(when, values=values)
        self.strays.look()

    def restore_buffers(self) -> None:
        """Undo what a forward outside a step did to the buffers: restore the committed ones."""
        self.slots.bind_base()
        self.pull()

    def editable(self) -> list[StateEntry]:
        """What user code may change."""
        return [self.state.entries[name] for name in (*self.slots.parameters, *self.slots.buffers)]

    def edit(self, function: Callable[[], None], seed: int, optimizers: Sequence[PreparedOptimizer]) -> list[Any]:
        """Let user code change parameters, buffers and optimizers. For the first worker.

        Returns:
            What it changed in each optimizer: see `PreparedOptimizer.changes`.
        """
        entries = self.editable()
        self.state.save(entries)
        with torch.no_grad():
            edits = [prepared.edit() for prepared in optimizers]
            with preserved(), ExitStack() as open_edits:
                for edit in edits:
                    open_edits.enter_context(edit)
                seed_all(seed)
                function()
            for entry in entries:
                entry.publish()
            return [prepared.changes(edit) for prepared, edit in zip(optimizers, edits, strict=True)]

    def release(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        """Copy everything out of the segment, so that models and optimizers are ordinary ones again."""
        self.slots.bind_base()
        with torch.no_grad():
            for name, parameter in self.slots.parameters.items():
                entry = self.state.entries.get(name)  # None: prepare failed half-way
                if entry is not None and self.state.memory.shared:
                    parameter.data = parameter.data.clone()
            for prepared in optimizers:
                prepared.kept.release()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one form have the same bytes: equal values need not, and NaNs can."""
    return torch.equal(octets(one), octets(other))


def check_model(model: Any) -> None:
    """Raise UnsupportedError for a model that cannot be trained exactly, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"prepare got a {type(model).__name__} as model, expected a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UnsupportedError(
            f"prepare got a model wrapped in {type(model).__name__}; pass the bare model (model.module): "
            "evenstep does the parallel part itself"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UnsupportedError(
                f"layer '{name or type(module).__name__}' was built with sparse=True; evenstep adds only dense "
                "gradients: build it with sparse=False"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_tensor(name, tensor)
    _check_memory(dict(model.named_parameters()), dict(model.named_buffers()))


def _check_memory(parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
    """Raise UnsupportedError if a parameter lies in the memory of another tensor: each will get its own."""
    spans = sorted(
        (
            begin,
            begin + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size(),
            name,
        )
        for name, t in (*parameters.items(), *buffers.items())
        if t.numel() and (begin := t.data_ptr())
    )
    last = (0, "")  # of those so far, what reaches furthest
    for begin, end, name in spans:
        if begin < last[0] and (name in parameters or last[1] in parameters):
            raise UnsupportedError(
                f"'{last[1]}' and '{name}' share memory, but are two tensors; in a run each has its own, so they would "
                "diverge. Tie them by one parameter (layer.weight = other.weight), or give one a copy (.clone())"
            )
        last = max(last, (end, name))


def _check_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise UnsupportedError(f"'{name}' has no shape yet; call the lazy model once before prepare")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"'{name}' is on the meta device; give it memory and values before prepare")
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"'{name}' is a DTensor, which the ranks of a mesh share; in a run the workers share the whole model: "
            "use partition(model, marks, parts=P), without a mesh"
        )
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"'{name}' is a {tensor.layout} tensor; evenstep trains only dense ones")
    if tensor.requires_grad and tensor.dtype not in _GRADIENT_DTYPES:
        raise UnsupportedError(f"'{name}' has dtype {tensor.dtype}; evenstep trains {_GRADIENT_DTYPES}")
