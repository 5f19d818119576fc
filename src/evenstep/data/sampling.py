"""The user's sampler: which samples an epoch has, the same on every worker and every time it is asked."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from evenstep.core.errors import ConfigError
from evenstep.engine.randomness import derive, preserved, seed_all

__all__ = ["Sampling"]


class Sampling:
    """Draws from a sampler, with random numbers that (seed, epoch) fixes.

    torch's, NumPy's and Python's own generators are seeded, and so is a `generator` attribute of the sampler, as those
    of `torch.utils.data` have. Any other generator is the user's: workers that draw differently get an error.

    Args:
        sampler: A sampler like those of `torch.utils.data`, a sequence of indices, or a function of the epoch that
            returns either. It gives indices, or lists of indices: whole batches.
        num_samples: Samples in the data set.
        seed: The run's seed.

    Raises:
        ConfigError: It deals the samples to workers itself, or can be iterated over only once.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        if any(isinstance(each, DistributedSampler) for each in _chain(sampler)):
            raise ConfigError(
                f"the sampler is a {type(sampler).__name__}, which deals samples to ranks; evenstep does that itself: "
                "leave it out (shuffle=True is the default), or pass a sampler over the whole data set"
            )
        if not isinstance(sampler, Iterable) and not callable(sampler):
            raise ConfigError(
                f"sampler is a {type(sampler).__name__}; expected indices, a sampler, or a function of the epoch that "
                "returns either"
            )
        if isinstance(sampler, Iterator) and not isinstance(sampler, Sized):
            raise ConfigError(
                f"sampler is a {type(sampler).__name__}, which is exhausted after one epoch; pass a list, or a "
                "function of the epoch that returns a new one"
            )

    def __len__(self) -> int:
        """How many indices, or batches, an epoch has, if the sampler knows.

        Raises:
            TypeError: It does not know.
        """
        return len(self._sampler)

    def draw(self, epoch: int, *, in_batches: bool) -> list[Sequence[int]]:
        """The batches of an epoch; a sampler of single indices gives batches of one.

        Args:
            epoch: Counted from 0.
            in_batches: Whether it is expected to give whole batches.

        Raises:
            ConfigError: It gives the other kind, or a sample that does not exist.
        """
        with preserved():
            seed_all(derive("sampler", self._seed, epoch))
            for each in _chain(self._sampler):
                if isinstance(generator := getattr(each, "generator", None), torch.Generator):
                    generator.manual_seed(derive("sampler's generator", self._seed, epoch))
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(epoch)
            items = self._sampler if isinstance(self._sampler, Iterable) else self._sampler(epoch)
            return [self._batch(item, in_batches) for item in items]

    def _batch(self, item: Any, in_batches: bool) -> Sequence[int]:
        is_batch = isinstance(item, Iterable) and not (isinstance(item, torch.Tensor) and item.ndim == 0)
        if is_batch != in_batches:
            raise ConfigError(
                f"the sampler gives whole batches, such as {list(item)!r:.60}; leave batch_size out"
                if is_batch
                else f"the sampler gives single samples, such as {item!r:.60}; say batch_size=..."
            )
        indices = [int(index) for index in (item if is_batch else (item,))]
        for index in indices:
            if not 0 <= index < self._num_samples:
                raise ConfigError(
                    f"the sampler gave sample {index} of a data set with {self._num_samples}; expected 0 to "
                    f"{self._num_samples - 1}"
                )
        return indices


def _chain(sampler: Any) -> Iterator[Any]:
    """A sampler and those it wraps, as `BatchSampler` does."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)
