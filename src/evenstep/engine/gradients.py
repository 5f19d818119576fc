"""From the gradients of single shards to the tree sum at each parameter's owner, bucket by bucket, during backward.

Each worker adds up its own shards as far as the tree allows (a binary counter: about log2 K buffers) and is left with
the tree nodes that cover its span. For a parameter that somebody else owns these go into this worker's area of the
segment; when all parameters of a bucket are there, its ready word is set. The owner adds the nodes of all workers in
tree order as soon as it sees a bucket of its own ready everywhere. A shard that gave no gradient for a parameter is
absent from the sum, and a parameter absent everywhere has no gradient.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.group import Group, tree_sum
from evenstep.native import core
from evenstep.plan import tree
from evenstep.plan.placement import balance
from evenstep.transport.segment import ALIGNMENT, aligned

__all__ = ["Gradients"]

_BUCKET_BYTES = 1 << 20


class Gradients:
    """The gradients of one optimizer's parameters in one step after the other."""

    def __init__(self, group: Group, names: Sequence[str], like: Sequence[Tensor]) -> None:
        self._group, self._names, self._like = group, names, like
        # The ready words have a place of their own for good: whatever scratch memory holds, a word is a word.
        words = torch.Size([group.segment.num_workers, max(len(like), 1)])
        self._words = group.segment.reserve(8 * words.numel()).tensor(words, torch.int64)

    def replan(self, spans: Sequence[tuple[int, int]]) -> None:
        """The workers, or the shards of each, have changed: share out parameters and memory anew. Alike on all."""
        num_shards, me, like = spans[-1][1], self._group.rank, self._like
        self.owners = self._share_out([t.numel() * t.element_size() for t in like])
        self.owned = [i for i, owner in enumerate(self.owners) if owner == me]
        self._buckets = self._make_buckets()
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket}
        # the nodes of all workers, from left to right, and the program that adds them up
        covers = [tree.cover(span, num_shards) for span in spans]
        self._nodes = [(worker, n) for worker, nodes in enumerate(covers) for n in range(len(nodes))]
        self._program = tree.merge_program(tuple(node for nodes in covers for node in nodes), num_shards)
        # how the leaves of this worker become its nodes
        self._leaves = range(*spans[me])
        self._merges = tree.merge_program(tuple((k, k + 1) for k in self._leaves), num_shards)
        self._completes = {end - 1: n for n, (_, end) in enumerate(covers[me])}
        self._num_nodes = len(covers[me])
        self._areas, self._present, self._ready = self._reserve(covers)

    def _share_out(self, sizes: Sequence[int]) -> list[int]:
        """The owner of every parameter."""
        return balance(sizes, self._group.num_workers)

    def _make_buckets(self) -> list[list[int]]:
        """Parameters with one owner together, in the order in which backward reaches them."""
        buckets: list[list[int]] = []
        sizes: list[int] = []
        open_bucket: dict[int, int] = {}
        for i in reversed(range(len(self._like))):
            num_bytes = self._like[i].numel() * self._like[i].element_size()
            b = open_bucket.get(self.owners[i])
            if b is None or sizes[b] + num_bytes > _BUCKET_BYTES:
                b = open_bucket[self.owners[i]] = len(buckets)
                buckets.append([])
                sizes.append(0)
            buckets[b].append(i)
            sizes[b] += num_bytes
        return buckets

    def _reserve(self, covers: Sequence[Sequence[Any]]) -> tuple[list[list[list[Tensor]]], Any, list[list[int]]]:
        """Areas [rank][node][parameter], presence marks [node of all, parameter], addresses of ready words."""
        segment = self._group.segment
        if self._group.num_workers == 1:
            return [], np.zeros((len(self._nodes), len(self._like)), np.uint8), []
        per_node = sum(aligned(t.numel() * t.element_size()) for t in self._like) + ALIGNMENT
        areas = []
        for nodes in covers:
            region = segment.scratch(per_node * len(nodes))
            areas.append([[region.tensor(t.shape, t.dtype, t.stride()) for t in self._like] for _ in nodes])
        shape = torch.Size([len(self._nodes), len(self._like)])
        present = segment.scratch(shape.numel()).tensor(shape, torch.uint8)
        rows = self._words[: self._group.num_workers].unbind(0)
        addresses = [[row.data_ptr() + 8 * b for b in range(len(self._buckets))] for row in rows]
        return areas, present.numpy(), addresses

    @property
    def shared_bytes(self) -> int:
        """How many bytes of the segment this worker's gradients take: those of parameters that others own."""
        areas = self._areas[self._group.rank] if self._areas else []
        return sum(
            t.nbytes for node in areas for t, owner in zip(node, self.owners, strict=True) if owner != self._group.rank
        )

    def begin(self, token: int, active: Sequence[int], shards: Sequence[int]) -> None:
        """Start a step.

        Args:
            token: Larger than that of any earlier attempt at any step; alike on all workers.
            active: The ranks of the workers that compute something in this step.
            shards: The shards of this worker that have samples.
        """
        self._token, self._active, self._shards = token, active, set(shards)
        count = len(self._like)
        self._next = [self._leaves.start] * count
        self._stacks: list[list[Tensor | None]] = [[] for _ in range(count)]
        self._waiting: list[dict[int, Tensor]] = [{} for _ in range(count)]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._to_reduce = [b for b, bucket in enumerate(self._buckets) if self.owners[bucket[0]] == self._group.rank]
        self._sums: dict[int, Tensor | None] = {}
        for i in range(count):
            self._drain(i, over=False)

    def arrive(self, i: int, shard: int, gradient: Tensor) -> None:
        """Take in the gradient of parameter i from a local shard, in any order. Takes the tensor over."""
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"parameter '{self._names[i]}' got a sparse gradient; evenstep adds dense ones only: "
                "build the embedding with sparse=False"
            )
        self._waiting[i][shard] = gradient
        self._drain(i, over=False)

    def _drain(self, i: int, *, over: bool) -> None:
        """Add what has come, in leaf order. A shard without samples, or with backward over, is absent."""
        leaf = self._next[i]
        if leaf == self._leaves.stop:
            return
        waiting = self._waiting[i]
        while leaf < self._leaves.stop and (leaf in waiting or over or leaf not in self._shards):
            self._push(i, leaf, waiting.pop(leaf, None))
            leaf += 1
        self._next[i] = leaf
        if leaf == self._leaves.stop:
            self._complete(i)

    def _push(self, i: int, leaf: int, gradient: Tensor | None) -> None:
        stack = self._stacks[i]
        merges = self._merges[leaf - self._leaves.start]
        node = self._completes.get(leaf)
        area = self._area(i, node)
        entry = gradient
        for m in range(merges):
            left = stack.pop()
            if left is None or entry is None:
                entry = left if entry is None else entry
            elif area is not None and m + 1 == merges and left.device == area.device:
                entry = torch.add(left, entry, out=area)  # the last sum goes straight to the owner
            else:
                entry = left.add_(entry)
        if area is not None and entry is not None and entry is not area:
            entry = area.copy_(entry)
        stack.append(entry)

    def _area(self, i: int, node: int | None) -> Tensor | None:
        """Where a finished node of parameter i goes, if another worker has to see it."""
        me = self._group.rank
        if node is None or not self._areas or (self.owners[i] == me and self._like[i].device.type == "cpu"):
            return None
        return self._areas[me][node][i]

    def _complete(self, i: int) -> None:
        me = self._group.rank
        for n, (worker, node) in enumerate(self._nodes):
            if worker == me:
                self._present[n, i] = self._stacks[i][node] is not None
        bucket = self._bucket_of[i]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            if self._ready:
                core.store(self._ready[me][bucket], self._token)
            self._reduce_what_is_ready()

    def _reduce_what_is_ready(self) -> None:
        while self._to_reduce:
            bucket = self._to_reduce[0]
            others = self._active if self._ready else ()
            if self._missing[bucket] or any(core.load(self._ready[w][bucket]) < self._token for w in others):
                return
            for i in self._buckets[bucket]:
                self._sums[i] = self._reduce(i)
            self._to_reduce.pop(0)
            self._reduced(bucket)

    def _reduced(self, bucket: int) -> None:
        """The sums of a bucket that this worker owns are there, perhaps while backward still runs."""

    def _reduce(self, i: int) -> Tensor | None:
        me = self._group.rank
        inputs: list[Tensor] = []
        present = []
        mine: Tensor | None = None
        for n, (worker, node) in enumerate(self._nodes):
            here = worker in self._active and bool(self._present[n, i])
            present.append(here)
            if here:
                tensor = self._stacks[i][node] if worker == me else self._areas[worker][node][i]
                assert tensor is not None, "a node that is marked present is there"
                inputs.append(tensor)
                mine = tensor if worker == me else mine
        if not inputs:
            return None
        if len(inputs) == 1:
            total = inputs[0]
        else:
            out = (
                mine
                if mine is not None
                else torch.empty_strided(inputs[0].shape, inputs[0].stride(), dtype=inputs[0].dtype)
            )
            total = tree_sum(inputs, tree.present_program(self._program, tuple(present)), out)
        return total.to(self._like[i].device)

    def end_backward(self) -> None:
        """Backward is over on this worker: what has not come will not."""
        for i in range(len(self._like)):
            self._drain(i, over=True)

    def finish(self) -> dict[int, Tensor | None]:
        """The sums of the parameters that this worker owns. Call when all workers have ended their backward."""
        self._reduce_what_is_ready()
        assert not self._to_reduce, "every worker has ended its backward, so every bucket is ready"
        return self._sums

    def clear(self) -> None:
        """Let go of all gradients."""
        self._stacks, self._waiting, self._sums, self._to_reduce = [], [], {}, []
