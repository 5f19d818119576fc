"""From the gradients of single shards to the tree sum at each parameter's owner, bucket by bucket, during backward.

Each worker adds up its own shards (`counter.py`). When all parameters of a bucket are there, they are handed to the
delivery (`delivery.py`); an owner adds the nodes of all workers in tree order as soon as one of its buckets is ready. A
parameter without a gradient in any shard has no sum.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.core.errors import UnsupportedError
from evenstep.engine.counter import Counter
from evenstep.engine.delivery import Delivery
from evenstep.exchange.group import tree_sum
from evenstep.plan import tree
from evenstep.plan.summing import Summing

__all__ = ["Gradients"]


class Gradients:
    """The gradients of one optimizer's parameters, step after step.

    Args:
        names: The names of the parameters.

    Attributes:
        plan: Who adds up what.
        delivery: How nodes travel.
        reduced: Called when the sums of a bucket that this worker owns are there, perhaps while backward still runs,
            with the bucket and all sums so far; None: not called.
        expects: Called with a parameter that has got a gradient; raises if it should not have.
    """

    plan: Summing
    delivery: Delivery

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._laid_out = False
        self.reduced: Callable[[int, dict[int, Tensor | None]], None] | None = None
        self.expects: Callable[[int], None] | None = None

    def lay_out(self, plan: Summing, delivery: Delivery) -> None:
        """Adopt a plan after the workers, or their shards, have changed."""
        self.plan, self.delivery = plan, delivery
        self._laid_out = True

    def begin(self, token: int, active: Sequence[int], shards: Sequence[int]) -> None:
        """Start a step; see `Delivery.begin`.

        Args:
            token: Larger than that of any earlier attempt at any step; the same on all workers.
            active: The ranks of the workers that compute something in this step.
            shards: The shards of this worker that have samples.
        """
        self.delivery.begin(token, active)
        self._counter = Counter(self.plan.leaves, len(self._names), shards, self.delivery.place)
        self._missing = [len(bucket) for bucket in self.plan.buckets]
        self._to_reduce = self.plan.owned_buckets
        self._sums: dict[int, Tensor | None] = {}
        self._advance(over=False)
        if not self.plan.leaves.shards:  # nothing will come of this worker
            for i in range(len(self._names)):
                self._complete(i)

    def arrive(self, i: int, shard: int, gradient: Tensor) -> None:
        """Take over the gradient of parameter i from a local shard; they may come in any order."""
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"parameter '{self._names[i]}' got a sparse gradient; evenstep adds only dense ones: "
                "build the embedding with sparse=False"
            )
        if self.expects is not None:
            self.expects(i)
        if self._counter.arrive(i, shard, gradient):
            self._complete(i)

    def _advance(self, *, over: bool) -> None:
        for i in range(len(self._names)):
            if self._counter.advance(i, over=over):
                self._complete(i)

    def _complete(self, i: int) -> None:
        bucket = self.plan.bucket_of[i]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self.delivery.give(bucket, [self._counter.nodes(j) for j in self.plan.buckets[bucket]])
            self._reduce_what_is_ready()

    def _reduce_what_is_ready(self) -> None:
        while self._to_reduce:
            bucket = self._to_reduce[0]
            if self._missing[bucket] or not self.delivery.ready(bucket):
                return
            for i in self.plan.buckets[bucket]:
                self._sums[i] = self._sum(i)
            self._to_reduce.pop(0)
            if self.reduced is not None:
                self.reduced(bucket, self._sums)

    def _sum(self, i: int) -> Tensor | None:
        nodes = self.delivery.nodes(i)
        inputs = [node for node in nodes if node is not None]
        if len(inputs) <= 1:
            return inputs[0] if inputs else None
        own = next((node for node in self._counter.nodes(i) if node is not None), None)
        out = torch.empty_like(inputs[0]) if own is None else own
        return tree_sum(inputs, tree.present_program(self.plan.program, tuple(n is not None for n in nodes)), out)

    def end_backward(self) -> None:
        """Note that backward is over on this worker: no more gradients will come."""
        self._advance(over=True)

    def finish(self) -> dict[int, Tensor | None]:
        """The sums of the parameters that this worker owns. Call when all workers have ended their backward."""
        self._reduce_what_is_ready()
        while self._to_reduce:
            self.delivery.wait(self._to_reduce[0])
            self._reduce_what_is_ready()
        self.delivery.settle()
        return self._sums

    def nodes(self) -> list[tuple[tuple[int, int], dict[int, Tensor]]]:
        """The sums over each tree node of this worker, by parameter, where there is a gradient."""
        found = []
        for n, span in enumerate(self.plan.leaves.nodes):
            held = {i: node for i in range(len(self._names)) if (node := self._counter.nodes(i)[n]) is not None}
            found.append((span, held))
        return found

    def close(self) -> None:
        """Nothing is open."""

    def clear(self) -> None:
        """Drop all gradients."""
        self._sums, self._to_reduce = {}, []
        if not self._laid_out:  # a worker that was let in while the others prepare catches up first
            return
        self.delivery.end()
        self._counter = Counter(self.plan.leaves, 0, (), lambda *_: None)
