"""Forward and backward of one worker's shards on a GPU: everything is launched, nothing is waited for.

As on the CPU (`compute.py`), shards run one after the other on the model itself, or side by side in lanes if a layer
spans them. But gradients leave autograd as a list when a shard, or all of them, have gone backward, and go into flat
buffers; and what can be is replayed from CUDA graphs (`graphs.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.core import points
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.engine.compute import Alone, Shards, Work
from evenstep.engine.flat import FlatGradients
from evenstep.engine.graphs import Graphs, Products, Recorder, Task
from evenstep.engine.guards import look
from evenstep.engine.lanes import Lanes
from evenstep.engine.loss import PartLoss, split
from evenstep.engine.models import Models
from evenstep.engine.randomness import Stream, on_host, preserved
from evenstep.engine.results import Reading, ShardResult
from evenstep.engine.slots import Lane, spanning_layers
from evenstep.exchange.surroundings import inside

__all__ = ["DeviceCompute"]


class DeviceCompute:
    """Runs the step function for every part, and backward; see `Compute`.

    Args:
        shards: Which shards there are, where, and how to begin with one.
        models: All prepared models.
        timeout_s: How long lanes wait for each other.
        graphs: Computes or replays; None where nothing is replayed.
    """

    def __init__(self, shards: Shards, models: Models, timeout_s: float, graphs: Graphs) -> None:
        self.shards, self._models, self._graphs = shards, models, graphs
        self._stream = Stream()
        self._lanes = Lanes(timeout_s)
        self._lane_of: list[Lane] = []
        self._numbers: list[tuple[Tensor, Products, list[int]]] = []  # on their way to the host

    def run(self, work: Work) -> Callable[[], dict[int, ShardResult]]:
        """Launch the shards of this worker; return how to wait for their results. The gradients are on their way then.

        Leaves the random generators of the caller as they were. Where a layer spans the shards of several workers this
        blocks in exchanges with them.
        """
        gradients = work.prepared.gradients
        assert isinstance(gradients, FlatGradients), "on a device gradients are flat"
        for parameter in work.prepared.parameters:  # what user code left there is none of this step's
            parameter.grad = None
        spanning = bool(spanning_layers(self._models.slots.modules))
        pieces = [list(work.parts)] if spanning else [[shard] for shard in work.parts]
        self._numbers = []
        with preserved():
            for shards in pieces:
                products = self._run(work, shards, spanning=spanning)
                for shard, found in zip(shards, products.gradients, strict=True):
                    gradients.take(shard, found)
                if products.buffers is not None:
                    self._models.keep_buffers(products.buffers)
        arrived = torch.cuda.Event() if torch.cuda.is_available() else None
        return self._waiter(work, arrived)

    def _run(self, work: Work, shards: list[int], *, spanning: bool) -> Products:
        leaves, spec = pytree.tree_flatten([work.parts[shard] for shard in shards])
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[n] for n in places]
        trained = [name for name, p in zip(work.prepared.names, work.prepared.parameters, strict=True) if p.requires_grad]
        kind = _Joint if spanning else _Single

        def make(given: Sequence[Tensor], generators: Sequence[torch.Generator] | None) -> "_Piece":
            filled = list(leaves)
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            parts = pytree.tree_unflatten(filled, spec)
            return kind(self, work, dict(zip(shards, parts, strict=True)), trained, generators)

        def between(numbers: Tensor) -> None:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.device.type == "cuda")
            host.copy_(numbers, non_blocking=True)
            pending[0] = host

        pending: list[Tensor] = [torch.empty(0)]
        rest = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        signature = (
            repr(spec), tuple((tuple(t.shape), t.dtype, t.stride(), str(t.device)) for t in inputs), repr(rest),
            tuple(shards) if spanning else (0 in shards), tuple(work.sizes), tuple(trained), id(work.prepared),
        )  # fmt: skip
        seeds = [self.shards.seed_of(work.version, shard) for shard in shards]
        modules = self._models.slots.modules
        task = Task(signature, inputs, seeds, lambda: look(work.function, modules), make, between)
        for shard in shards:
            self.shards.begins(shard)
        try:
            products = self._graphs.run(task) if self._can_be_captured(work, spanning) else self._graphs.compute(task)
        except Exception as error:
            where = f"shard {shards[0]} of worker" if len(shards) == 1 else "worker"
            error.add_note(f"in {where} {self.shards.worker}, step {work.version}")
            raise
        self._numbers.append((pending[0], products, shards))
        return products

    def _can_be_captured(self, work: Work, spanning: bool) -> bool:
        """Whether nobody else has to be met inside."""
        return not spanning or self.shards.crew(work.sizes).alone

    def _waiter(self, work: Work, arrived: "torch.cuda.Event | None") -> Callable[[], dict[int, ShardResult]]:
        numbers, self._numbers = self._numbers, []

        def wait() -> dict[int, ShardResult]:
            results = {}
            for host, products, shards in numbers:
                values = host.tolist()
                for shard, reading in zip(shards, products.readings, strict=True):
                    count = len(reading.tensors)
                    results[shard] = reading.result(values[:count])
                    values = values[count:]
            return results

        return wait

    def lane(self, number: int) -> Lane:
        """A lane: 0 is the model itself, the others have leaves of their own."""
        while len(self._lane_of) <= number:
            self._lane_of.append(Lane(self._models.slots, own=bool(self._lane_of)))
        return self._lane_of[number]

    def forget_lanes(self) -> None:
        """Let go of all leaves and graphs: the models have changed, or the run is over."""
        self._lane_of = []
        self._graphs.forget()

    def close(self) -> None:
        """End the threads."""
        self._lanes.close()
        self.forget_lanes()
