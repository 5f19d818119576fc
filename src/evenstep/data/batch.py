"""A global batch, of which every worker holds the parts of its own shards."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.data.contents import contents_of
from evenstep.data.nested import tensors_in, to_device

__all__ = ["Batch", "Position"]


@dataclass(frozen=True)
class Position:
    """Where in the data a batch stands.

    Attributes:
        epoch: Counted from 0.
        number: The batch's number in its epoch, over all groups.
        before: How many batches of its group came before it in its epoch.
        count: How many its group has in its epoch; None: nobody knows yet.
        after: Where the data go on after it, as a checkpoint keeps it.
    """

    epoch: int
    number: int
    before: int
    count: int | None
    after: dict[str, Any]

    @property
    def is_last(self) -> bool:
        """Whether its epoch ends with it, as far as is known."""
        return self.count == self.before + 1


@dataclass(frozen=True)
class Batch:
    """One global batch as one worker has it: the sizes of all shards, the samples of its own.

    Attributes:
        name: Which batch this is, in words; workers compare it.
        sizes: The number of samples in every shard.
        load: Loads the samples of any shard: a worker may have to take over the shards of another.
        parts: The collated samples of the shards that were loaded so far.
        device: Where the samples go.
        position: Where in the data it stands; None: the script brought it.
        whole: All samples, if every worker has all of them.
        sent: Gives the parts that are on their way to the device, if any are.
        probes: Describes a few samples that every worker draws, if workers compare them in this batch.
        handed: The tensors of each shard that were handed out, and how often each had been changed by then.
    """

    name: str
    sizes: list[int]
    load: Callable[[int], Any]
    parts: dict[int, Any]
    device: str = "cpu"
    position: Position | None = None
    whole: Any = None
    sent: Callable[[], dict[int, Any]] | None = None
    probes: Callable[[], dict[str, str]] | None = None
    handed: dict[int, list[tuple[Tensor, int]]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Its number in its epoch; 0 where the script brought it."""
        return 0 if self.position is None else self.position.number

    @property
    def is_last(self) -> bool:
        """Whether an epoch ends with it."""
        return self.position is not None and self.position.is_last

    def contents(self, *, alone: bool = False) -> dict[str, str]:
        """A summary of what must be the same on every worker: all of it, or a few samples if each loads its own.

        Args:
            alone: Whether there is only one worker now, so that only those who come later can compare.
        """
        if self.probes is not None:
            return self.probes()
        return {} if self.whole is None or alone else contents_of(self.whole)

    def part(self, shard: int) -> Any:
        """The samples of a shard, on the device, unaltered: if a step function has changed them, they are loaded again.

        Raises:
            UnsupportedError: They were changed and cannot be loaded again.
        """
        if self._is_changed(shard):
            self.check()
            self.parts[shard] = self.load(shard)
        elif shard not in self.parts:
            self.parts[shard] = self.load(shard)
        elif self.sent is not None and shard not in self.handed:
            self.parts[shard] = self.sent().get(shard, self.parts[shard])
        held = self.parts[shard]
        self.handed[shard] = [(tensor, _version(tensor)) for tensor in tensors_in(held)]
        return to_device(held, self.device)

    def _is_changed(self, shard: int) -> bool:
        """Whether the tensors of a shard were changed in place since they were handed out."""
        return any(_version(tensor) != version for tensor, version in self.handed.get(shard, ()))

    def check(self) -> None:
        """Check that the samples are unchanged where they cannot be loaded again.

        Raises:
            UnsupportedError: The step function has changed them.
        """
        if self.whole is not None and any(map(self._is_changed, self.handed)):
            raise UnsupportedError(
                "the step function has changed the batch in place, so that a step that has to be done again, because a "
                "worker died, would begin from other samples; work on a copy (x = x * 2 instead of x.mul_(2), or "
                "x.clone() first), or load by run.batches"
            )

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> NoReturn:
        """Refuse, with the remedy: only some parts of the batch are on this worker.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "a batch of run.batches cannot be unpacked: its parts lie on different workers; pass it whole, as in "
            "run.step(batch, lambda part: ...), which calls the function with one collated part after another"
        )


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; torch does not count this in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
