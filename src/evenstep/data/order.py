"""Which samples a step sees, in which shard: a pure function of seed, epoch and position, and of a sampler if any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from evenstep.core.checksum import checksum
from evenstep.core.errors import ConfigError
from evenstep.data.batch import Position
from evenstep.data.sampling import Sampling
from evenstep.engine.randomness import derive
from evenstep.native import core
from evenstep.plan.placement import cut

__all__ = ["BatchRequest", "Deal", "Indices", "Order"]

_MOST_BY_32_BITS = 2**27  # torch draws 64 bits for each of 2**32 / 20 samples or more

Deal = Literal["position", "round-robin"]
"""How the samples of a batch are dealt to its shards: neighbours together, or sample r to shard r mod K."""


Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Numbers of samples, in order."""


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """One global batch: the samples of every shard.

    Attributes:
        position: Where in the data it stands.
        shards: The sample indices of each shard, in order; some may be empty.
        order: Identifies the order of its epoch, in a few letters.
        is_compared: Whether all workers draw a few of its samples, to see that they have the same data.
    """

    position: Position
    shards: tuple[Indices, ...]
    order: str
    is_compared: bool = False

    @property
    def sizes(self) -> list[int]:
        """The number of samples of every shard."""
        return [len(indices) for indices in self.shards]

    @property
    def name(self) -> str:
        """Which batch this is, in words; workers compare it."""
        return f"epoch {self.position.epoch} batch {self.position.number} (order {self.order})"

    def probes(self, count: int) -> Indices:
        """So many samples of it, from its first to its last; fewer if it is smaller."""
        everything = np.concatenate(self.shards)
        count = min(count, len(everything))
        return everything[np.arange(count) * (len(everything) - 1) // max(count - 1, 1)]


@dataclass(frozen=True)
class Order:
    """How a data set becomes batches.

    Both ways of dealing give every shard the same number of samples; which ones is part of the arithmetic. Of several
    groups that do not step together, group g has batches g, g + groups, ...: every sample once over all groups.

    Attributes:
        num_samples: Samples in the data set.
        batch_size: Samples in a global batch; None: the sampler gives whole batches.
        num_shards: Parts of every batch.
        seed: The run's seed.
        shuffle: Whether every epoch has an order of its own; not with a sampler.
        drop_last: Whether a short last batch is left out.
        deal: How a batch becomes shards.
        group: Whose batches these are.
        groups: How many groups there are.
        sampler: Says which samples in which order; None: all of them.
    """

    num_samples: int
    batch_size: int | None
    num_shards: int
    seed: int
    shuffle: bool
    drop_last: bool
    deal: Deal = "position"
    group: int = 0
    groups: int = 1
    sampler: Sampling | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError("the data set is empty; expected at least one sample")
        size = self.batch_size
        if (size is None and self.sampler is None) or (size is not None and (not isinstance(size, int) or size < 1)):
            raise ConfigError(f"batch_size={size!r}, expected a whole number above 0")
        if self.deal not in ("position", "round-robin"):
            raise ConfigError(f"deal={self.deal!r}, expected 'position' or 'round-robin'")
        if self.sampler is not None and (self.shuffle or (size is None and self.drop_last)):
            raise ConfigError(
                "shuffle=True and a sampler, expected one of them: both decide on the order"
                if self.shuffle
                else "drop_last=True and a sampler of whole batches, which decides on their sizes; leave drop_last out"
            )
        if self.sampler is None:
            if self.drop_last and size is not None and self.num_samples < size:
                raise ConfigError(
                    f"drop_last with {self.num_samples} samples and batch_size={size} leaves no batch at all; "
                    "use a smaller batch_size, or drop_last=False: a short last batch is exact"
                )
            self._check_count(self.num_batches)

    def _check_count(self, num_batches: int) -> None:
        if not num_batches:
            raise ConfigError("the sampler gave no batch at all; expected at least one in every epoch")
        if num_batches < self.groups:
            raise ConfigError(
                f"{self.groups} groups but only {num_batches} batches of {self.batch_size} in an epoch: every group "
                "needs one; use a smaller batch_size, or fewer groups"
            )

    def times(self, num_workers: int) -> "Order":
        """The same with global batches `num_workers` times as large.

        Raises:
            ConfigError: A sampler decides on their sizes.
        """
        if self.batch_size is None:
            raise ConfigError("batch_per_worker=True needs a batch_size, and so a sampler of single samples")
        return replace(self, batch_size=self.batch_size * num_workers)

    @property
    def num_dealt(self) -> int:
        """How many samples the batches of this group have in an epoch; not with a sampler."""
        size = self.batch_size or 0
        return sum(min(size, self.num_samples - n * size) for n in range(self.group, self.num_batches, self.groups))

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, of all groups.

        Raises:
            TypeError: The sampler does not know.
        """
        count = self.num_samples if self.sampler is None else len(self.sampler)
        if self.batch_size is None:
            return count
        whole, rest = divmod(count, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def count(self, first: int = 0) -> int:
        """Batches of this group in an epoch, from number `first` on. Raises as `num_batches`."""
        return sum(number >= first for number in range(self.group, self.num_batches, self.groups))

    def requests(self, epoch: int, first: int = 0) -> Iterator[BatchRequest]:
        """The batches of this group in an epoch, from number `first` on."""
        batches, order = self._batches(epoch)
        numbers = range(self.group, len(batches), self.groups)
        for before, number in enumerate(numbers):
            if number >= first:
                is_last = number == numbers[-1]
                after = {"epoch": epoch + is_last, "batch": 0 if is_last else number + 1}
                position = Position(epoch, number, before, len(numbers), after)
                yield BatchRequest(position, self._deal(batches[number]), order)

    def _batches(self, epoch: int) -> tuple[Sequence[Sequence[int] | Indices], str]:
        """The samples of every batch of an epoch, and a few letters that identify their order."""
        if self.sampler is not None:
            drawn = self.sampler.draw(epoch, in_batches=self.batch_size is None)
            batches = drawn if self.batch_size is None else self._chop([index for (index,) in drawn])
            self._check_count(len(batches))
            flat = torch.tensor([number for batch in batches for number in (len(batch), *batch)])
            return batches, f"{checksum(flat):016x}"
        if not self.shuffle:
            return self._chop(range(self.num_samples)), str(self.num_samples)
        order = _permutation(self.num_samples, derive("order", self.seed, epoch))
        return self._chop(order.numpy()), f"{checksum(order):016x}"

    def _chop(self, indices: Sequence[int] | Indices) -> list[Sequence[int] | Indices]:
        size = self.batch_size or 0
        batches = [indices[first : first + size] for first in range(0, len(indices), size)]
        return batches[:-1] if self.drop_last and batches and len(batches[-1]) < size else batches

    def _deal(self, indices: Sequence[int] | Indices) -> tuple[Indices, ...]:
        numbers = np.asarray(indices, np.int64)
        if self.deal == "round-robin":
            return tuple(numbers[shard :: self.num_shards].copy() for shard in range(self.num_shards))
        return tuple(numbers[a:b] for a, b in cut(len(numbers), self.num_shards))


def _permutation(count: int, seed: int) -> Tensor:
    """What `torch.randperm` gives after this seed, sooner."""
    if count > _MOST_BY_32_BITS:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    order = torch.empty(count, dtype=torch.int64, device="cpu")
    core.permutation(order.data_ptr(), count, seed & 0xFFFFFFFF)
    return order
