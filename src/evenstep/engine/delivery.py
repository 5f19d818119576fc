"""How the nodes of a bucket of gradients reach the worker that adds them up."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenstep.native import core
from evenstep.plan.summing import Leaves, Summing
from evenstep.transport.memory import ALIGNMENT, Memory, aligned

__all__ = ["Delivery", "Local", "SharedAreas"]


class Delivery(Protocol):
    """Moves the nodes of one plan's workers, step after step. All workers must make theirs alike."""

    def begin(self, token: int, active: Sequence[int]) -> None:
        """Start a step.

        Args:
            token: Larger than that of any earlier attempt at any step; the same on all workers.
            active: The ranks of the workers that compute something in it.
        """

    def place(self, i: int, node: int) -> Tensor | None:
        """Where to put this worker's node of parameter i; None: anywhere, nobody else reads it."""

    def give(self, bucket: int, nodes: Sequence[Sequence[Tensor | None]]) -> None:
        """Deliver this worker's nodes of a bucket, all of which are in place."""

    def ready(self, bucket: int) -> bool:
        """Whether the nodes of a bucket are here from all active workers. Does not wait."""

    def wait(self, bucket: int) -> None:
        """Wait until a bucket is ready. Called when all workers have ended their backward.

        Raises:
            PeerError: A worker failed or died.
            SilenceError: It did not become ready within the timeout.
        """

    def nodes(self, i: int) -> list[Tensor | None]:
        """The nodes of a parameter whose bucket is ready, of all workers, from left to right."""

    def settle(self) -> None:
        """Wait until nobody reads the nodes of this worker's buckets any more, so that their sums may be changed."""

    def end(self) -> None:
        """End the step, and drop its nodes."""


class Local:
    """The delivery of a worker that computes alone: the nodes are its own."""

    def __init__(self, plan: Summing) -> None:
        self._plan = plan

        self._nodes: dict[int, Sequence[Tensor | None]] = {}

    def begin(self, token: int, active: Sequence[int]) -> None:
        """See `Delivery`."""
        self._nodes = {}

    def place(self, i: int, node: int) -> Tensor | None:
        """See `Delivery`."""
        return None

    def give(self, bucket: int, nodes: Sequence[Sequence[Tensor | None]]) -> None:
        """See `Delivery`."""
        self._nodes.update(zip(self._plan.buckets[bucket], nodes, strict=True))

    def ready(self, bucket: int) -> bool:
        """See `Delivery`."""
        return self._plan.buckets[bucket][0] in self._nodes

    def wait(self, bucket: int) -> None:
        """There is nothing to wait for."""
        raise AssertionError(f"every worker has ended its backward, so bucket {bucket} is ready")

    def settle(self) -> None:
        """There is nothing to wait for."""

    def nodes(self, i: int) -> list[Tensor | None]:
        """See `Delivery`."""
        return list(self._nodes[i])

    def end(self) -> None:
        """See `Delivery`."""
        self._nodes = {}


class SharedAreas:
    """Delivery through shared memory: every worker has an area, and a word for each bucket says that it is there.

    Args:
        plan: Who adds up what.
        memory: The memory that the workers share.
        like: The parameters.
        words: A row of words for each worker, a word for each parameter; permanent, since scratch memory may hold
            anything when it is laid out again.
        covers: How the shards of every worker become nodes.
    """

    def __init__(
        self, plan: Summing, memory: Memory, like: Sequence[Tensor], words: Tensor, covers: Sequence[Leaves]
    ) -> None:
        self._plan = plan
        self._own = Local(plan)
        per_node = sum(aligned(t.numel() * t.element_size()) for t in like) + ALIGNMENT
        self._areas = []
        for leaves in covers:
            region = memory.scratch(per_node * len(leaves.nodes))
            self._areas.append([[region.tensor(t.shape, t.dtype, t.stride()) for t in like] for _ in leaves.nodes])
        shape = torch.Size([len(plan.nodes), len(like)])
        self._present = memory.scratch(shape.numel()).tensor(shape, torch.uint8).numpy()
        self._words = words  # the addresses below are within it
        rows = words[: len(covers)].unbind(0)
        self._ready = [[row.data_ptr() + 8 * b for b in range(len(plan.buckets))] for row in rows]

    def begin(self, token: int, active: Sequence[int]) -> None:
        """See `Delivery`."""
        self._token, self._active = token, active
        self._own.begin(token, active)

    def place(self, i: int, node: int) -> Tensor | None:
        """See `Delivery`."""
        return None if self._plan.owners[i] == self._plan.rank else self._areas[self._plan.rank][node][i]

    def give(self, bucket: int, nodes: Sequence[Sequence[Tensor | None]]) -> None:
        """See `Delivery`."""
        plan = self._plan
        self._own.give(bucket, nodes)
        for n, (worker, node) in enumerate(plan.nodes):
            if worker == plan.rank:
                for i, theirs in zip(plan.buckets[bucket], nodes, strict=True):
                    self._present[n, i] = theirs[node] is not None
        core.store(self._ready[plan.rank][bucket], self._token)

    def ready(self, bucket: int) -> bool:
        """See `Delivery`."""
        return all(core.load(self._ready[rank][bucket]) >= self._token for rank in self._active)

    def wait(self, bucket: int) -> None:
        """There is nothing to wait for."""
        raise AssertionError(f"every worker has ended its backward, so bucket {bucket} is ready")

    def settle(self) -> None:
        """There is nothing to wait for."""

    def nodes(self, i: int) -> list[Tensor | None]:
        """See `Delivery`."""
        own = self._own.nodes(i)
        found: list[Tensor | None] = []
        for n, (worker, node) in enumerate(self._plan.nodes):
            if worker == self._plan.rank:
                found.append(own[node])
            else:
                here = worker in self._active and bool(self._present[n, i])
                found.append(self._areas[worker][node][i] if here else None)
        return found

    def end(self) -> None:
        """See `Delivery`."""
        self._own.end()

    @property
    def shared_bytes(self) -> int:
        """How many bytes of shared memory this worker's nodes take: those of parameters that others own."""
        own = enumerate(self._plan.owners)
        others = [i for i, owner in own if owner != self._plan.rank]
        return sum(node[i].nbytes for node in self._areas[self._plan.rank] for i in others)
