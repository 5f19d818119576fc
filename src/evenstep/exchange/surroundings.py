"""The surroundings of a layer that spans shards: who else computes it, and how to meet them.

The engine, `nn.DataParallel` and a process group are such surroundings. A layer asks `current()`; if there are none, it
is alone.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from evenstep.exchange.rendezvous import Lead

__all__ = ["Surroundings", "Workers", "current", "inside"]


class Surroundings(Protocol):
    """The participants of one forward: some in this process (local), perhaps more elsewhere.

    Attributes:
        token: What the last joint autograd node left for the next one to attach to; None before the first.
        alone: Whether all participants are known to be local.
    """

    token: Tensor | None
    alone: bool

    def meet(self, tag: str, value: Any, lead: Lead) -> Any:
        """Offer a value to the local participants; the first of them leads and answers each (see `Rendezvous`)."""

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        """Offer one row for each local participant; return one row [K, n] for each of all, in fixed order.

        Participants that compute nothing in this step have a row of zeros.
        """

    def call_number(self, layer: object) -> int:
        """How often the local participant has already called this layer in this forward."""


@runtime_checkable
class Workers(Surroundings, Protocol):
    """Surroundings in which a layer can share out its work: the workers that compute shards in a step of a run.

    Attributes:
        shards: The shards of each of them that have samples.
        me: Which of them this one is.
        num_shards: K; those without samples count too.
        is_whole: Whether every shard with samples is computed by one of them.
    """

    shards: Sequence[Sequence[int]]
    me: int
    num_shards: int
    is_whole: bool

    def swap(self, tag: str, mine: Tensor) -> Sequence[Tensor]:
        """Offer some bytes, at least one; return those of all these workers, in order."""


_local = threading.local()


def current() -> Surroundings | None:
    """The surroundings of the calling thread, if any."""
    return getattr(_local, "surroundings", None)


@contextmanager
def inside(surroundings: Surroundings | None) -> Iterator[None]:
    """Make `surroundings` current for the calling thread."""
    before = current()
    _local.surroundings = surroundings
    try:
        yield
    finally:
        _local.surroundings = before
