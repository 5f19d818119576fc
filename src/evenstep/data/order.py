"""Which samples a step sees, in which shard: a pure function of seed, epoch and position."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from evenstep.core.errors import ConfigError
from evenstep.engine.randomness import derive
from evenstep.plan.placement import cut

__all__ = ["Deal", "Plan", "Request"]

Deal = Literal["position", "round-robin"]
"""How the samples of a batch are dealt to its shards: neighbours together, or sample r to shard r mod K."""


@dataclass(frozen=True)
class Request:
    """One global batch: the samples of every shard.

    Attributes:
        epoch: Counted from 0.
        number: The batch's number in its epoch.
        shards: The sample indices of each shard, in order; some may be empty.
    """

    epoch: int
    number: int
    shards: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """The number of samples of every shard."""
        return [len(indices) for indices in self.shards]


@dataclass(frozen=True)
class Plan:
    """How a data set becomes batches.

    Either way of dealing gives every shard as many samples; which samples they are is part of the arithmetic. Of
    several groups that do not step together, group g has batches g, g + groups, ...: every sample once over all groups.
    """

    num_samples: int
    batch_size: int
    num_shards: int
    seed: int
    shuffle: bool
    drop_last: bool
    deal: Deal = "position"
    group: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError("the data set is empty; expected at least one sample")
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size!r}, expected a whole number above 0")
        if self.deal not in ("position", "round-robin"):
            raise ConfigError(f"deal={self.deal!r}, expected 'position' or 'round-robin'")
        if self.drop_last and self.num_samples < self.batch_size:
            raise ConfigError(
                f"drop_last with {self.num_samples} samples and batch_size={self.batch_size} leaves no batch at all; "
                "use a smaller batch_size, or drop_last=False: a short last batch is exact"
            )

    @property
    def numbers(self) -> range:
        """The batches of this group in an epoch."""
        return range(self.group, self.num_batches, self.groups)

    @property
    def num_dealt(self) -> int:
        """How many samples those have."""
        return sum(min(self.batch_size, self.num_samples - number * self.batch_size) for number in self.numbers)

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, of all groups."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def requests(self, epoch: int, first: int = 0) -> Iterator[Request]:
        """The batches of this group in an epoch, from number `first` on."""
        order: Sequence[int] = range(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(derive("order", self.seed, epoch))
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for number in self.numbers:
            if number < first:
                continue
            indices = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield Request(epoch, number, self._deal(indices))

    def _deal(self, indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        if self.deal == "round-robin":
            return tuple(tuple(indices[shard :: self.num_shards]) for shard in range(self.num_shards))
        return tuple(tuple(indices[a:b]) for a, b in cut(len(indices), self.num_shards))
