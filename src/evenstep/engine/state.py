"""The state of a site: parameters, buffers and optimizer state, once for all workers around its memory.

Every tensor is a `StateEntry` with a *live* image in the memory, a *backup* image beside it, and the *working* tensor
that the model or the optimizer holds. For a parameter or optimizer state it is the live image itself, so it exists once
however many workers there are; for buffers it is a private copy that is published and pulled.

Between operations the live images are what is committed. Before a worker changes an entry, it saves it and marks it
with the number of the operation. Once that is committed, the mark means nothing; if it fails, `rollback` restores what
was saved. Everyone around the memory sees images and marks, so any survivor can roll back what a dead owner had begun.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from evenstep.core.fingerprint import digest, fingerprint
from evenstep.engine.copies import Copies
from evenstep.engine.form import Form
from evenstep.engine.image import Image
from evenstep.engine.spreading import Spreading
from evenstep.native import core
from evenstep.plan.sites import Sites
from evenstep.transport.memory import ALIGNMENT, FlatRegion, Memory, aligned

__all__ = ["State", "StateEntry"]

_MAX_ENTRIES = 1 << 16
_MAX_SAVINGS = 8  # a run saves the same few lists of entries again and again


@dataclass
class StateEntry:
    """One tensor of the state."""

    name: str
    index: int
    live: Tensor
    backup: Tensor
    working: Tensor
    counts: bool = False  # whether the operation that made it is committed

    def publish(self) -> None:
        """Copy the working tensor to the live image."""
        if self.working is not self.live:
            self.live.copy_(self.working)

    def pull(self) -> None:
        """Copy the live image to the working tensor."""
        if self.working is not self.live:
            self.working.copy_(self.live)


@dataclass
class State:
    """All entries by name, and the plain values that optimizers keep besides tensors.

    Attributes:
        memory: Where it is.
        sites: The sites of the run, each with such a state.
        spreading: How values get from one site to the others; None: there is always one site.
        operation: The number of the operation that changes the state now.
        image: A copy that outlives all workers, where the memory does not.
        saved: Reads the checkpoint of a version, verified; empty: there is none. For the first worker.
    """

    memory: Memory
    sites: Sites = Sites.of(0, [0])  # noqa: RUF009  # a value
    spreading: Spreading | None = None
    operation: int = 0
    image: Image | None = None
    saved: Callable[[int], Mapping[str, Tensor]] | None = None
    entries: dict[str, StateEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._marks = self.memory.words(_MAX_ENTRIES)
        self._savings: dict[tuple[int, ...], tuple[Copies, tuple[int, ...]]] = {}  # by entries: backups and marks

    def _mark(self, entry: StateEntry) -> int:
        """The address of an entry's mark: 1 + the number of the operation before which it was last saved."""
        return self._marks.data_ptr() + 8 * entry.index

    def add(self, forms: Mapping[str, Form], working: Mapping[str, Tensor] | None = None) -> list[StateEntry]:
        """Make entries for new tensors. All workers must call this alike; no value is copied yet.

        Args:
            forms: Their forms, by name.
            working: What the user of each tensor holds. None: it will hold the live image itself.
        """
        num_bytes = sum(aligned(form.num_bytes) for form in forms.values()) + ALIGNMENT
        live, backup = self.memory.reserve(num_bytes), self.memory.reserve(num_bytes)
        added = []
        for name, form in forms.items():
            first, second = (r.tensor(form.shape, form.dtype, form.stride, form.on_host) for r in (live, backup))
            entry = StateEntry(name, len(self.entries), first, second, first if working is None else working[name])
            self.entries[name] = entry
            added.append(entry)
        if self.image is not None and isinstance(live, FlatRegion):
            self.image.cover(live)
        return added

    def save(self, entries: list[StateEntry]) -> None:
        """Keep the committed version of entries that this worker is about to change."""
        if self.image is not None:
            self.image.settle()
        key = tuple([entry.index for entry in entries])
        if key not in self._savings:
            if len(self._savings) >= _MAX_SAVINGS:
                self._savings.clear()
            copies = Copies((entry.backup, entry.live) for entry in entries)
            self._savings[key] = copies, tuple(self._mark(entry) for entry in entries)
        copies, marks = self._savings[key]
        copies.make()
        self.memory.fence()
        core.store_all(marks, 1 + self.operation)  # after the copy: a mark means a complete backup

    def take_image(self, operations: int) -> None:
        """Let the state, which contains this many committed operations, outlive all workers."""
        if self.image is not None:
            self.image.take(operations)

    def spread(self, tag: str, entries: Sequence[StateEntry], source: int, only: Collection[int] | None = None) -> None:
        """Give all sites the values that one worker has. All workers must call this alike, inside an operation.

        Args:
            tag: What is spread, in words.
            entries: Which values; those of other sites are replaced, and must have been saved if they count.
            source: The rank of the worker.
            only: The numbers of the sites that are given them; None: all.
        """
        if self.spreading is not None and not self.sites.are_one and entries:
            self.spreading.spread(tag, [entry.live for entry in entries], source, self.sites, only)

    def change_of(self, entry: StateEntry) -> Tensor | None:
        """What the last committed operation subtracted from an entry; None if it left it alone."""
        if core.load(self._mark(entry)) != 1 + self.operation:
            return None
        return entry.backup - entry.live

    def rollback(self) -> None:
        """Restore what is committed, whoever had begun to change it. For one worker, while nobody changes anything."""
        for entry in self.entries.values():
            if core.load(self._mark(entry)) == 1 + self.operation:
                entry.live.copy_(entry.backup)

    def pull(self) -> None:
        """Copy the live images to this worker's own copies, where they are committed.

        A model that is about to be prepared still holds the only values there are.
        """
        for entry in self.entries.values():
            if entry.counts:
                entry.pull()

    def tensors(self) -> dict[str, Tensor]:
        """The live images by name. Read them between steps only."""
        return {name: entry.live for name, entry in self.entries.items() if entry.counts}

    def names_in(self, parts: Sequence[Tensor]) -> list[str]:
        """The names of the tensors in some parts of the state, given as bytes, in the order of the parts."""
        ranges = [(part.data_ptr(), part.data_ptr() + part.numel()) for part in parts]
        lies = [(name, e.live.data_ptr(), e.live.data_ptr() + e.live.nbytes) for name, e in self.entries.items()]
        return [name for first, end in ranges for name, begin, stop in lies if begin < end and stop > first]

    def digests(self) -> dict[str, str]:
        """A digest for every tensor and plain value, by name."""
        found = {name: digest(name, tensor).hex() for name, tensor in self.tensors().items()}
        return {**found, **{name: repr(value) for name, value in self.values.items()}}

    def fingerprint(self) -> str:
        """The fingerprint of version v."""
        return fingerprint(self.tensors(), self.values)
