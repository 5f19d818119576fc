"""What a step function hands on to the next step, shard by shard: hidden states of truncated backpropagation.

It is part of the state of the run and committed with the step, so what a failed step leaves is not seen, and a worker
that takes over a shard finds what the previous one left.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.engine.form import Form
from evenstep.engine.state import State, StateEntry
from evenstep.engine.structure import describe, fill, specs
from evenstep.exchange.journal import Entry as JournalEntry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.exchange.surroundings import current

__all__ = ["Carried", "Carries", "Carry"]

Carried = list[Any]
"""What a step has set: [slot, shard, description of the value, forms of its tensors], in order."""


@dataclass
class _Held:
    """What one shard has in one slot."""

    description: Any
    forms: list[Form]
    entries: list[StateEntry]
    counts: bool = False  # whether a committed step has set it, and it was not reset since


@dataclass
class Carry:
    """One value for every shard, from step to step. Made by `Run.carry`."""

    _slot: int
    _initial: Callable[[int], Any]
    _carries: "Carries"
    _held: dict[int, _Held] = field(default_factory=dict)  # by shard
    _set: dict[int, tuple[Any, list[Tensor]]] = field(default_factory=dict)  # in the step being tried, by shard

    def get(self) -> Any:
        """Inside a step function: what the last step set for this shard, or the initial value.

        Raises:
            ConfigError: This is not inside a step function.
        """
        shard, rows = _shard_here()
        self._carries.uses += 1
        held = self._held.get(shard)
        if held is None or not held.counts:
            return pytree.tree_map_only(Tensor, self._carries.to_device, self._initial(len(rows)))
        return fill(held.description, (entry.live.clone() for entry in held.entries))

    def set(self, value: Any) -> None:
        """Inside a step function: hand a value on to the next step of this shard, without its graph.

        Args:
            value: Tensors in tuples, lists and dicts; of the same shapes and types in every step.

        Raises:
            ConfigError: It is something else, or this is not inside a step function.
        """
        shard, _ = _shard_here()
        self._carries.uses += 1
        leaves: list[Tensor] = []
        description = describe(value, leaves, "what was passed to carry.set")
        self._set[shard] = (description, [leaf.detach() for leaf in leaves])

    def reset(self) -> None:
        """Between steps: forget what was set, in all shards. All workers must call this alike."""
        self._carries.reset(self)


def _shard_here() -> tuple[int, range]:
    around = current()
    shard, rows = getattr(around, "shard", None), getattr(around, "rows", None)
    if shard is None or rows is None:
        raise ConfigError("a carry was used outside a step function; use it inside one: it belongs to a shard")
    return shard, rows


class Carries:
    """Everything that steps hand on.

    Args:
        state: Where it is kept.
        ledger: The workers' ledger.
        version: Says how many steps have been committed.

    Attributes:
        uses: How often a step function has read or set a carry.
    """

    def __init__(self, state: State, ledger: Ledger, version: Callable[[], int]) -> None:
        self._state, self._ledger, self._version = state, ledger, version
        self._slots: list[Carry] = []
        self.uses = 0

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor on the device of the state."""
        return tensor.to(self._state.memory.device)

    def add(self, initial: Callable[[int], Any]) -> Carry:
        """Make another carry. All workers must call this alike."""
        self._slots.append(Carry(len(self._slots), initial, self))
        return self._slots[-1]

    def begin(self) -> None:
        """Begin to try a step: forget what an earlier attempt has set."""
        for carry in self._slots:
            carry._set.clear()

    def set_here(self) -> Iterator[tuple[int, str, Tensor]]:
        """What was set here in this step: shards, names and tensors."""
        for carry in self._slots:
            for shard, (_, leaves) in sorted(carry._set.items()):
                for n, leaf in enumerate(leaves):
                    yield shard, f"{_head(carry._slot)}[{n}]", leaf

    def news(self) -> Carried:
        """What was set here in this step."""
        return [
            [carry._slot, shard, description, [Form.of(leaf).pack() for leaf in leaves]]
            for carry in self._slots
            for shard, (description, leaves) in sorted(carry._set.items())
        ]

    def settle(self, news: Carried, owner_of: Callable[[int], int] | None = None) -> None:
        """Put what was set where everyone finds it. All workers must call this alike, with the news of all.

        Args:
            news: What was set.
            owner_of: The rank of the worker that computed a shard, whose values all sites get. None: all have them.
        """
        for slot, shard, description, forms in news:
            carry = self._slots[slot]
            held = self._room(carry, shard, description, [Form.unpack(form) for form in forms])
            if shard in carry._set:
                if held.counts:
                    self._state.save(held.entries)
                with torch.no_grad():
                    for entry, leaf in zip(held.entries, carry._set[shard][1], strict=True):
                        entry.live.copy_(leaf)
        if owner_of is not None and not self._state.sites.are_one:
            self._spread(news, owner_of)

    def _spread(self, news: Carried, owner_of: Callable[[int], int]) -> None:
        """Give all sites what the shards of each worker have set."""
        of_owners: dict[int, list[_Held]] = {}
        for slot, shard, *_ in news:
            of_owners.setdefault(owner_of(shard), []).append(self._slots[slot]._held[shard])
        for owner, theirs in sorted(of_owners.items()):
            if self._state.sites.takes(owner):
                self._state.save([entry for held in theirs if held.counts for entry in held.entries])
            entries = [entry for held in theirs for entry in held.entries]
            self._state.spread(f"carried by worker {owner}", entries, owner)

    def adopt(self, news: Carried) -> None:
        """Adopt the news of a committed step."""
        for slot, shard, description, forms in news:
            carry = self._slots[slot]
            held = self._room(carry, shard, description, [Form.unpack(form) for form in forms])
            held.counts = True
            for entry in held.entries:
                entry.counts = True
            self._state.values[_name(slot, shard)] = json.dumps(description)
        self.begin()

    def reset(self, carry: Carry) -> None:
        """See `Carry.reset`. An operation like any other: a checkpoint comes before or after it."""
        kind = f"reset of {_head(carry._slot)}"

        def attempt() -> JournalEntry:
            self._ledger.group.barrier(kind)
            return JournalEntry(kind)

        self._ledger.perform(Operation(kind, self._version()), attempt, lambda *_: self._forget(carry))

    def _forget(self, carry: Carry) -> None:
        for shard, held in carry._held.items():
            held.counts = False
            for entry in held.entries:
                entry.counts = False
            self._state.values.pop(_name(carry._slot, shard), None)

    def news_of(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Carried:
        """The carries of a checkpoint, as news."""
        news: Carried = []
        for carry in self._slots:
            for name, text in values.items():
                head, _, shard = name.partition(".")
                if head == _head(carry._slot) and shard.isdigit():
                    description = json.loads(text)
                    found = (tensors[f"{name}.{n}"] for n in range(len(specs(description))))
                    news.append([carry._slot, int(shard), description, [Form.of(tensor).pack() for tensor in found]])
        return sorted(news, key=lambda item: item[:2])

    def replace(self, news: Carried) -> None:
        """Adopt the news of a committed checkpoint, and drop everything else."""
        for carry in self._slots:
            self._forget(carry)
        self.adopt(news)

    def _room(self, carry: Carry, shard: int, description: Any, forms: list[Form]) -> _Held:
        """Room for the value of a shard. Trying an operation again makes the same room, so it may stay."""
        held = carry._held.get(shard)
        if held is not None and (held.description, held.forms) == (description, forms):
            return held
        if held is not None:
            raise UnsupportedError(
                f"a carry had {_shapes(held.forms)} in shard {shard} and now gets {_shapes(forms)}: every batch must "
                "have as many samples as the first; leave out a last batch that is short (drop_last=True)"
            )
        name = _name(carry._slot, shard)
        entries = self._state.add({f"{name}.{n}": form for n, form in enumerate(forms)})
        carry._held[shard] = _Held(description, forms, entries)
        return carry._held[shard]


def _head(slot: int) -> str:
    return "carry" if slot == 0 else f"carry{slot + 1}"


def _name(slot: int, shard: int) -> str:
    return f"{_head(slot)}.{shard}"


def _shapes(forms: list[Form]) -> str:
    return ", ".join(f"{str(form.dtype).removeprefix('torch.')} {tuple(form.shape)}" for form in forms)
