"""Pieces of a step captured as CUDA graphs: forward and backward separately, so that results are known early."""

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from evenstep.engine.graphs import Products, Task
from evenstep.transport import pinned
from evenstep.transport.driver import Driver

__all__ = ["CudaRecorder"]

_MOST_QUEUED = 4  # replays; if the device is given more graphs than twice this, launching one burns processor time


class CudaRecorder:
    """Captures on one device.

    Args:
        device: Which device. Captured work must be launched on a stream other than the default.
        overlap: Whether two pieces of a step run at the same time, if it has several.
    """

    def __init__(self, device: torch.device, *, overlap: bool = False) -> None:
        self._device = device
        queue: deque[torch.cuda.Event] = deque()
        self._alone = [_Track(device, None, queue)]
        self._pair, self._turns = self._alone, cycle((0, 1))
        if overlap and device.type == "cuda":
            streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]  # torch's
            self._pair = [_Track(device, stream, queue) for stream in streams]

    def record(self, task: Task) -> "_Recording":
        """See `Recorder`."""
        tracks = self._pair if task.is_one_of_many else self._alone
        return _Recording([self._record(task, track) for track in tracks], self._turns)

    def _record(self, task: Task, track: "_Track") -> "_TrackGraphs":
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
            with torch.cuda.stream(track.stream):
                for graph, function in ((forward, piece.forward), (backward, piece.backward)):
                    self._capture(graph, track, function)
                    _check(graph)
        finally:
            generator.graphsafe_set_state(before)
        num_bytes = torch.cuda.memory_reserved(self._device) - before_bytes
        return _TrackGraphs(track, forward, backward, inputs, own, piece.products, num_bytes)

    def _capture(self, graph: torch.cuda.CUDAGraph, track: "_Track", function: Callable[[], None]) -> None:
        graph.capture_begin(pool=track.pool, capture_error_mode="thread_local")
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


class _Track:
    """A stream on which graphs are captured and replayed, and the memory that they share.

    Args:
        device: The device.
        stream: The stream; None: the current one, whichever that is.
        queue: The ends of replays that were launched last, on all tracks.
    """

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream | None, queue: "deque[torch.cuda.Event]"
    ) -> None:
        self._device, self._stream, self._queue = device, stream, queue
        self.pool = torch.cuda.graph_pool_handle()

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream."""
        return self._stream or torch.cuda.current_stream(self._device)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """What is launched inside runs on the stream, after everything that was launched before on the current one.

        Waits while the device has much to do: launching would wait too, but not leave the processor to others.
        """
        if len(self._queue) == _MOST_QUEUED:
            self._queue.popleft().synchronize()
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        self._queue.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]  # torch's
        self._queue[-1].record(stream)

    @property
    def join(self) -> Callable[[], None] | None:
        """Makes the stream that is current then wait for the last replay; None: it is on the current one anyway."""
        if self._stream is None:
            return None
        return partial(self._wait_for, self._queue[-1])

    def _wait_for(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


@dataclass(frozen=True)
class _TrackGraphs:
    """The graphs of a piece on one track, and what they read and write."""

    track: _Track
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    generators: Sequence[torch.Generator]
    products: Products
    num_bytes: int


class _Recording:
    """See `Recording`."""

    def __init__(self, copies: Sequence[_TrackGraphs], turns: Iterator[int]) -> None:
        self._copies, self._turns = copies, turns  # the turns of all recordings, so no two replays use one track
        self.num_copies, self.num_bytes = len(copies), copies[0].num_bytes

    def replay(self, inputs: Sequence[Tensor], seeds: Sequence[int], between: Callable[[Tensor], None]) -> Products:
        """See `Recording`."""
        copy = self._copies[next(self._turns) % len(self._copies)]
        with copy.track.replaying():
            for own, given in zip(copy.inputs, inputs, strict=True):
                own.copy_(given, non_blocking=True)
            for generator, seed in zip(copy.generators, seeds, strict=True):
                generator.manual_seed(seed)
            copy.forward.replay()
            between(copy.products.numbers)
            copy.backward.replay()
        return replace(copy.products, join=copy.track.join)
