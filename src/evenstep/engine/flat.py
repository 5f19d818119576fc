"""Gradients on a device: one flat buffer for all parameters of a type, added up in tree order by a few launches.

What `Gradients` does parameter by parameter while backward runs, this does for all parameters at once when a shard is
complete: on a device launches are what costs, and nobody waits for a single parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from evenstep.core.errors import UnsupportedError
from evenstep.engine.counter import Counter
from evenstep.engine.delivery import Delivery
from evenstep.plan.summing import Summing

__all__ = ["AddsUp", "Buffer", "Connect", "FlatGradients", "NodeSums", "ShardGradients"]

_ALIGNMENT = 128  # elements; whole cache lines of every type


class Buffer:
    """Room for one gradient of every parameter.

    Args:
        like: The parameters.

    Attributes:
        flats: One tensor for each dtype.
        views: The place of every parameter in it, laid out as the parameter is.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        used: dict[torch.dtype, int] = {}
        offsets = []
        for t in like:
            offsets.append(used.get(t.dtype, 0))
            used[t.dtype] = offsets[-1] + -(-t.numel() // _ALIGNMENT) * _ALIGNMENT
        self.flats = {
            dtype: torch.empty(max(size, 1), dtype=dtype, device=like[0].device) for dtype, size in used.items()
        }
        self.views = [
            self.flats[t.dtype].as_strided(t.shape, t.stride(), offset) for t, offset in zip(like, offsets, strict=True)
        ]

    def add_(self, other: "Buffer") -> "Buffer":
        """Add all gradients of another."""
        for dtype, flat in self.flats.items():
            flat.add_(other.flats[dtype])
        return self


@dataclass(frozen=True)
class _Contents:
    """Which gradients a shard has.

    Attributes:
        present: For each parameter, whether it has one.
        by_dtype: Those of one type each: the numbers of the parameters, and their gradients.
        sparse: A parameter whose gradient is sparse, if any.
    """

    present: tuple[bool, ...]
    by_dtype: list[tuple[list[int], list[Tensor]]]
    sparse: int | None

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None]) -> "_Contents":
        """Look at the gradients of a shard, or at what was seen of them before."""
        if isinstance(gradients, ShardGradients) and gradients.contents is not None:
            return gradients.contents
        kinds: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        sparse = None
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                numbers, there = kinds.setdefault(gradient.dtype, ([], []))
                numbers.append(i)
                there.append(gradient)
                sparse = i if gradient.layout != torch.strided else sparse
        found = cls(tuple(gradient is not None for gradient in gradients), list(kinds.values()), sparse)
        if isinstance(gradients, ShardGradients):
            gradients.contents = found
        return found


class ShardGradients(list[Tensor | None]):
    """The gradients of a shard, one for each parameter, or None.

    A graph gives the same ones at every replay, so they are looked at only once.
    """

    contents: _Contents | None = None


class NodeSums(NamedTuple):
    """The sums over one tree node.

    Attributes:
        buffer: The sums; None: there are none.
        present: Which parameters have one.
    """

    buffer: Buffer | None
    present: Sequence[bool]


class AddsUp(Protocol):
    """Adds up the nodes of several sites."""

    def add_up(self, nodes: Sequence[NodeSums]) -> list[Tensor | None]:
        """The sum of every parameter over all sites, given this one's nodes; meets the others."""

    def close(self) -> None:
        """Release everything."""


Connect = Callable[[Summing, Sequence[Tensor]], AddsUp]
"""Makes an `AddsUp` for a plan and parameters like these."""


class FlatGradients:
    """The gradients of one optimizer's parameters, step after step; see `Gradients`.

    Args:
        names: The names of the parameters.
        like: The parameters.
        connect: Makes what adds up the nodes of several sites.

    Attributes:
        plan: How shards become nodes.
        peers: Adds up the nodes of several sites; None: there is only one.
        reduced: See `Gradients`; called when all sums are there.
        expects: See `Gradients`.
    """

    plan: Summing
    peers: AddsUp | None = None
    reduced: Callable[[int, dict[int, Tensor | None]], None] | None = None
    expects: Callable[[int], None] | None = None

    def __init__(self, names: Sequence[str], like: Sequence[Tensor], connect: Connect) -> None:
        self._names, self._like, self._connect = names, like, connect
        self._free: list[Buffer] = []
        self._held: list[Buffer | None] = []
        self._lent: list[Buffer] = []  # buffers in which sums of single parameters were gathered

    def lay_out(self, plan: Summing, delivery: Delivery) -> None:
        """Adopt a plan after the workers, or their shards, have changed. The delivery is not used."""
        del delivery
        self.plan = plan
        if self.peers is not None:
            self.peers.close()
        self.peers = None if len({rank for rank, _ in plan.nodes}) == 1 else self._connect(plan, self._like)

    def begin(self, token: int, active: Sequence[int], shards: Sequence[int]) -> None:
        """Start a step; see `Gradients.begin`."""
        del token
        self.clear()
        self.active = active
        self._shards, self._next = set(shards), self.plan.leaves.shards.start
        self._present: tuple[bool, ...] | None = None
        self._singly: Counter | None = None

    def take(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """Take in a copy of the gradients of a shard; call it in the order of the shards.

        Raises:
            UnsupportedError: One of them is sparse.
        """
        contents = _Contents.of(gradients)
        if contents.sparse is not None:
            raise UnsupportedError(
                f"parameter '{self._names[contents.sparse]}' got a sparse gradient; evenstep adds only dense ones: "
                "build the embedding with sparse=False"
            )
        if self.expects is not None:
            for i in compress(range(len(gradients)), contents.present):
                self.expects(i)
        self._skip_to(shard)
        if self._present is None and self._singly is None:
            self._present = contents.present
        if contents.present != self._present and self._singly is None:
            self._go_on_singly()
        self._push(gradients)

    def _skip_to(self, shard: int) -> None:
        while self._next < shard:
            self._push(None)

    def _push(self, gradients: Sequence[Tensor | None] | None) -> None:
        leaf, self._next = self._next, self._next + 1
        if self._singly is not None:
            for i in range(len(self._names)):
                gradient = None if gradients is None else gradients[i]
                self._singly.arrive(i, leaf, None if gradient is None else gradient.clone())
            return
        merges = self.plan.leaves.merges[leaf - self.plan.leaves.shards.start]
        entry: Buffer | None = None
        if gradients is not None:
            if merges and self._held[-1] is not None:
                entry, merges = self._held.pop(), merges - 1
                self._each(torch._foreach_add_, entry, gradients)
            else:
                entry = self._free.pop() if self._free else Buffer(self._like)
                self._each(torch._foreach_copy_, entry, gradients)
        for _ in range(merges):
            left = self._held.pop()
            if left is not None and entry is not None:
                left.add_(entry)
                self._free.append(entry)
            entry = entry if left is None else left
        self._held.append(entry)

    def _each(self, function: Callable[..., object], entry: Buffer | None, gradients: Sequence[Tensor | None]) -> None:
        assert entry is not None, "gradients have come, so there is a buffer for them"
        for numbers, there in _Contents.of(gradients).by_dtype:
            function([entry.views[i] for i in numbers], there)

    def _go_on_singly(self) -> None:
        """Switch to single parameters: one has a gradient in some shards only, so its sums have other terms."""
        present = self._present or ()
        stacks = [
            [buffer.views[i] if buffer is not None and present[i] else None for buffer in self._held]
            for i in range(len(self._names))
        ]
        self._singly = Counter(self.plan.leaves, len(self._names), self._shards, lambda *_: None)
        self._singly.go_on(self._next, stacks)

    def end_backward(self) -> None:
        """Note that no more shards of this worker will come."""
        self._skip_to(self.plan.leaves.shards.stop)
        self._next = self.plan.leaves.shards.stop

    def finish(self) -> dict[int, Tensor | None]:
        """The sums of all parameters over all shards; with several sites, this meets the others."""
        sums = self._sums()
        if self.reduced is not None:
            for bucket in self.plan.owned_buckets:
                self.reduced(bucket, sums)
        return sums

    def _sums(self) -> dict[int, Tensor | None]:
        if self.peers is not None:
            return dict(enumerate(self.peers.add_up(self._nodes())))
        if self._singly is not None:
            return {i: _added(self._singly.nodes(i), self.plan.program) for i in range(len(self._names))}
        while len(self._held) > 1:  # the nodes of a worker that is alone with some shards, from left to right
            left, right = self._held[0], self._held.pop(1)
            if left is not None and right is not None:
                self._free.append(right)
                left.add_(right)
            self._held[0] = right if left is None else left
        (root,) = self._held
        present = self._present or (False,) * len(self._names)
        return {i: root.views[i] if root is not None and here else None for i, here in enumerate(present)}

    def _nodes(self) -> list[NodeSums]:
        none = (False,) * len(self._names)
        if self._singly is None:
            present = self._present or none
            return [NodeSums(buffer, none if buffer is None else present) for buffer in self._held]
        found = []
        for n in range(len(self.plan.leaves.nodes)):
            sums = [self._singly.nodes(i)[n] for i in range(len(self._names))]
            buffer = self._free.pop() if self._free else Buffer(self._like)
            self._each(torch._foreach_copy_, buffer, sums)
            self._lent.append(buffer)
            found.append(NodeSums(buffer, [total is not None for total in sums]))
        return found

    def nodes(self) -> list[tuple[tuple[int, int], dict[int, Tensor]]]:
        """See `Gradients.nodes`."""
        found: list[tuple[tuple[int, int], dict[int, Tensor]]] = []
        for n, span in enumerate(self.plan.leaves.nodes):
            if self._singly is not None:
                each = {i: self._singly.nodes(i)[n] for i in range(len(self._names))}
            else:
                buffer, present = self._held[n], self._present or ()
                each = {i: None if buffer is None else buffer.views[i] for i, here in enumerate(present) if here}
            found.append((span, {i: node for i, node in each.items() if node is not None}))
        return found

    def close(self) -> None:
        """Disconnect from the other sites."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    def clear(self) -> None:
        """End the step, and free its buffers."""
        self._free += [buffer for buffer in (*self._held, *self._lent) if buffer is not None]
        self._held, self._lent = [], []
        self._singly = None


def _added(nodes: Sequence[Tensor | None], program: bytes) -> Tensor | None:
    """The sum of the nodes of one parameter, in the order of a stack program."""
    stack: list[Tensor | None] = []
    for node, merges in zip(nodes, program, strict=True):
        stack.append(node)
        for _ in range(merges):
            right, left = stack.pop(), stack.pop()
            stack.append(
                left.add_(right) if left is not None and right is not None else left if right is None else right
            )
    (total,) = stack
    return total
