"""Pieces of a step captured as CUDA graphs: forward and backward separately, so that results are known early."""

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from evenstep.engine.graphs import Products, Task
from evenstep.transport import pinned
from evenstep.transport.driver import Driver

__all__ = ["CudaRecorder"]


class CudaRecorder:
    """Captures on one device.

    Args:
        device: Which device. Captured work must be launched on a stream other than the default.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, task: Task) -> "_Recording":
        """See `Recorder`."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        before = generator.graphsafe_get_state()
        own = [generator.clone_state() for _ in task.seeds]
        inputs = [t.detach().clone() for t in task.inputs]
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what eager computing has cached is needed again, in the graphs' own pool
        before_bytes = torch.cuda.memory_reserved(self._device)
        forward, backward = _graph(), _graph()
        try:
            # A failed capture leaves its generators unusable, so none of them may be the device's default.
            generator.graphsafe_set_state(own[0])
            for graph in (forward, backward):
                for state in own:
                    graph.register_generator_state(state)
            piece = task.piece(inputs, task.seeds, own)
            for graph, function in ((forward, piece.forward), (backward, piece.backward)):
                self._capture(graph, function)
                _check(graph)
        finally:
            generator.graphsafe_set_state(before)
        num_bytes = torch.cuda.memory_reserved(self._device) - before_bytes
        return _Recording(forward, backward, inputs, own, piece.products, num_bytes)

    def _capture(self, graph: torch.cuda.CUDAGraph, function: Callable[[], None]) -> None:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            function()
        except BaseException:
            with suppress(RuntimeError), warnings.catch_warnings():  # ending an invalid capture raises again
                warnings.simplefilter("ignore")
                graph.capture_end()
            raise
        graph.capture_end()

    def has_room(self, num_bytes: int) -> bool:
        """See `Recorder`."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free > 1.2 * num_bytes

    def release(self) -> None:
        """See `Recorder`."""
        torch.cuda.empty_cache()


def _graph() -> torch.cuda.CUDAGraph:
    """A graph that can be inspected, if this torch allows it."""
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return torch.cuda.CUDAGraph()


def _check(graph: torch.cuda.CUDAGraph) -> None:
    """Check that a graph touches only its device.

    A copy from the host is captured with the address of its source, and reads whatever lies there at every replay.
    Older versions of CUDA refuse to capture it.

    Raises:
        RuntimeError: It touches the host.
    """
    if not hasattr(graph, "raw_cuda_graph"):
        return
    for address in Driver().touches_host(graph.raw_cuda_graph()):
        if address is None or not pinned.holds(address):
            raise RuntimeError(
                "it copies between host and device inside: a tensor that is made on the CPU, or an operation that does "
                "so by itself, as cuDNN's recurrent layers do"
            )
    graph.instantiate()


class _Recording:
    """See `Recording`."""

    def __init__(
        self,
        forward: torch.cuda.CUDAGraph,
        backward: torch.cuda.CUDAGraph,
        inputs: Sequence[Tensor],
        generators: Sequence[torch.Generator],
        products: Products,
        num_bytes: int,
    ) -> None:
        self._forward, self._backward = forward, backward
        self._inputs, self._generators = inputs, generators
        self.products, self.num_bytes = products, num_bytes

    def replay(self, inputs: Sequence[Tensor], seeds: Sequence[int], between: Callable[[Tensor], None]) -> None:
        """See `Recording`."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        for generator, seed in zip(self._generators, seeds, strict=True):
            generator.manual_seed(seed)
        self._forward.replay()
        between(self.products.numbers)
        self._backward.replay()
