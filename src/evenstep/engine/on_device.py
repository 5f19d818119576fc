"""Forward and backward of one worker's shards on a GPU: everything is launched, nothing is waited for.

As on the CPU (`compute.py`), shards run one after another on the model itself, or side by side in lanes if a layer
spans them. But gradients leave autograd as a list when a piece has gone backward, and go into flat buffers; and where
possible pieces are replayed from CUDA graphs (`graphs.py`). A *piece* is one shard, or all of this worker's shards if a
layer spans them.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.core import points
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.engine.alone import Alone, Meets
from evenstep.engine.carries import Carries
from evenstep.engine.compute import Work
from evenstep.engine.context import Context
from evenstep.engine.flat import ShardGradients
from evenstep.engine.gradients import Gradients
from evenstep.engine.graphs import Graphs, Products, Task
from evenstep.engine.guards import Look, Modules, look
from evenstep.engine.lanes import Lanes
from evenstep.engine.loss import PartLoss, split
from evenstep.engine.models import Models
from evenstep.engine.randomness import Stream, on_host, preserved
from evenstep.engine.results import Note, Reading, ShardResult
from evenstep.engine.slots import Lane, spanning_layers
from evenstep.engine.strangers import Strangers
from evenstep.exchange.meetings import Meetings
from evenstep.exchange.surroundings import inside

__all__ = ["DeviceCompute"]


class DeviceCompute:
    """Runs the step function for every part, and backward; see `Compute`.

    Args:
        context: The shards of the run.
        models: All prepared models.
        carries: What steps hand on.
        timeout_s: How long lanes wait for each other.
        graphs: Computes or replays pieces.
    """

    def __init__(self, context: Context, models: Models, carries: Carries, timeout_s: float, graphs: Graphs) -> None:
        self.context, self.models, self.carries, self._graphs = context, models, carries, graphs
        self.lanes = Lanes(timeout_s, context.tracer)
        self._lane_of: list[Lane] = []
        self.strangers = Strangers()
        self._meeting: set[int] = set()  # the optimizers in whose steps shards were seen to meet
        self._modules = Modules(())
        self._seen: Look | None = None
        self._meetings: Meetings | None = None  # those that captured graphs contain
        device = models.state.memory.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's

    def run(self, work: Work) -> Callable[[], dict[int, ShardResult]]:
        """Launch the shards of this worker; return a function that waits for their results. Gradients are on their way.

        Restores the caller's random generators. Where a layer spans the shards of several workers this blocks in
        exchanges with them.
        """
        for parameter in work.prepared.parameters:  # gradients that user code left do not belong to this step
            parameter.grad = None
        self._seen, begin = None, time.perf_counter()
        if self._meetings is not self.context.meetings:
            self._graphs.forget()
            self._meetings = self.context.meetings
        with preserved():
            if id(work.prepared) not in self._meeting and not spanning_layers(self.models.slots.modules):
                try:
                    return self._run_pieces(work, [[shard] for shard in work.parts], spanning=False)
                except Meets:  # in the first shard: nothing of the step is done yet
                    self._meeting.add(id(work.prepared))
                    work = work.begun_again()
            try:
                return self._run_pieces(work, [list(work.parts)], spanning=True)
            finally:
                self.strangers.took(time.perf_counter() - begin)

    def _run_pieces(
        self, work: Work, pieces: Sequence[list[int]], *, spanning: bool
    ) -> Callable[[], dict[int, ShardResult]]:
        arrivals = _Arrivals(self.context.wait, self._stream)
        waiting: list[tuple[list[int], Products]] = []  # one piece at most: it runs at the same time as the next
        for shards in pieces:
            products = self._run(work, shards, arrivals, len(pieces), spanning=spanning)
            if waiting:
                self._take(work, *waiting.pop())
            waiting.append((shards, products))
            if products.join is None:
                self._take(work, *waiting.pop())
        if waiting:
            self._take(work, *waiting.pop())
        return arrivals.wait

    def _take(self, work: Work, shards: list[int], products: Products) -> None:
        """Pass on what a piece gives; call it in the order of the shards."""
        gradients = work.prepared.gradients
        assert not isinstance(gradients, Gradients), "on a device gradients come all at once"
        if products.join is not None:
            products.join()
        for shard, found in zip(shards, products.gradients, strict=True):
            points.touch("gradient", *found)
            if work.witness is not None:
                work.witness.gradients(shard, work.prepared.names, found)
            if work.counts:
                gradients.take(shard, found)
        if products.buffers is not None:
            self._keep_buffers(work, shards[0], products.buffers)

    def _keep_buffers(self, work: Work, shard: int, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            points.touch("buffer", buffer)
        if work.witness is not None:
            work.witness.buffers(shard, buffers)
        self.models.keep_buffers(buffers)

    def _run(
        self, work: Work, shards: list[int], arrivals: "_Arrivals", num_pieces: int, *, spanning: bool
    ) -> Products:
        for shard in shards:
            self.context.begins(shard)
        task = self._task(work, shards, arrivals, num_pieces, spanning=spanning)
        captures = not spanning or self.context.crew(work.sizes).in_queue  # otherwise the host meets others during it
        try:
            products = self._graphs.run(task) if captures else self._graphs.compute(task).products
        except Exception as error:
            where = f"shard {shards[0]} of worker" if len(shards) == 1 else "worker"
            error.add_note(f"in {where} {self.context.worker}, step {work.version}")
            raise
        arrivals.expect(shards, products.readings)
        return products

    def _task(self, work: Work, shards: list[int], arrivals: "_Arrivals", num_pieces: int, *, spanning: bool) -> Task:
        leaves, spec = pytree.tree_flatten([work.parts[shard] for shard in shards])
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        inputs = [leaves[n] for n in places]
        trained = [n for n, p in zip(work.prepared.names, work.prepared.parameters, strict=True) if p.requires_grad]
        seeds = [self.context.seed_of(work.number, shard) for shard in shards]
        kind: type[_Piece] = _Joint if spanning else _Single

        def make(
            given: Sequence[Tensor], seeds: Sequence[int], generators: Sequence[torch.Generator] | None
        ) -> "_Piece":
            filled = list(leaves)
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            parts = pytree.tree_unflatten(filled, spec)
            streams = [Stream(device=None if generators is None else generators[n]) for n in range(len(shards))]
            for stream, seed in zip(streams, seeds, strict=True):
                stream.reseed(seed)
            given_parts = dict(zip(shards, parts, strict=True))
            return kind(self, work, given_parts, trained, streams, captures=generators is not None)

        signature = (
            repr(spec),
            tuple((tuple(t.shape), t.dtype, t.stride(), str(t.device)) for t in inputs),
            repr([leaf for leaf in leaves if not isinstance(leaf, Tensor)]),
            tuple(shards) if spanning else (work.keeps in shards, work.sizes[shards[0]], sum(work.sizes)),
            tuple(work.sizes) if spanning else (),
            tuple(trained),
            id(work.prepared),
            work.scale,  # a replay would repeat that of the capture
        )
        agree = partial(self.context.agree, work.sizes, work.where + "graphs") if spanning else _as_it_is
        look_now = partial(self._look, work.function)
        return Task(signature, inputs, seeds, look_now, make, arrivals.take, agree, is_one_of_many=num_pieces > 1)

    def _look(self, function: Callable[..., Any], anew: bool) -> Look:
        """What user code can see. Replays run no Python that could change it, so one look serves many of them."""
        if anew or self._seen is None:
            self._seen = look(function, self._modules)
        return self._seen

    def lane(self, number: int) -> Lane:
        """A lane: 0 is the model itself, the others have leaves of their own."""
        while len(self._lane_of) <= number:
            self._lane_of.append(Lane(self.models.slots, own=bool(self._lane_of)))
        return self._lane_of[number]

    def committed_buffers(self) -> dict[str, Tensor]:
        """The buffers that a step begins with."""
        return {name: self.models.state.entries[name].live for name in self.models.slots.buffers}

    def forget_lanes(self) -> None:
        """Drop all leaves and graphs: the models have changed, or the run is over."""
        self._lane_of = []
        self._modules, self._seen = Modules(self.models.slots.modules), None
        self._graphs.forget()

    def close(self) -> None:
        """End the threads."""
        self.lanes.close()
        self.forget_lanes()


def _as_it_is(mine: bool) -> bool:
    return mine


class _Arrivals:
    """The numbers of a step's results on their way to the host."""

    def __init__(self, wait: Callable[[torch.cuda.Event], None], stream: torch.cuda.Stream | None) -> None:
        self._wait, self._stream = wait, stream
        self._latest: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._expected: list[tuple[Tensor, list[int], list[Reading]]] = []

    def take(self, numbers: Tensor) -> None:
        """Send numbers to the host; a later call replaces what the same piece sent before."""
        if self._stream is None:
            self._latest = numbers.clone()
            return
        self._latest = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        kept = numbers.clone()  # the next replay writes there
        self._stream.wait_stream(torch.cuda.current_stream(numbers.device))
        with torch.cuda.stream(self._stream):  # only this stream waits for an image on its way to the host
            self._latest.copy_(kept, non_blocking=True)
            kept.record_stream(self._stream)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record()

    def expect(self, shards: list[int], readings: list[Reading]) -> None:
        """Note that the numbers sent last are the results of these shards."""
        assert self._latest is not None, "a piece has sent its numbers by the end of its forward"
        self._expected.append((self._latest, shards, readings))

    def wait(self) -> dict[int, ShardResult]:
        """Wait for them: for the forward of the last piece, not for its backward."""
        if self._event is not None:
            self._wait(self._event)
        results = {}
        for numbers, shards, readings in self._expected:
            values = numbers.tolist()
            for shard, reading in zip(shards, readings, strict=True):
                count = len(reading.tensors)
                results[shard], values = reading.result(values[:count]), values[count:]
        return results


class _Piece:
    """Some shards, computed from given parts; see `Piece`."""

    def __init__(
        self,
        compute: DeviceCompute,
        work: Work,
        parts: dict[int, Any],
        trained: Sequence[str],
        streams: Sequence[Stream],
        *,
        captures: bool,
    ) -> None:
        self._compute, self._work, self._parts = compute, work, parts
        self._trained, self._streams, self._captures = trained, streams, captures
        self._losses: list[Tensor] = []
        self.products: Products
        self.drew = self.carried = False

    def forward(self) -> None:
        """See `Piece`."""
        raise NotImplementedError

    def backward(self) -> None:
        """See `Piece`."""
        raise NotImplementedError

    def _call(self, shard: int) -> tuple[PartLoss, dict[str, Any]]:
        """Call user code for a shard whose lane and random numbers are in place."""
        before, carries = on_host(), self._compute.carries
        uses = carries.uses
        value = self._work.function(self._parts[shard])
        self.drew |= on_host() != before
        loss, metrics = split(value)
        self.carried |= carries.uses != uses or any(isinstance(metric, Note) for metric in metrics.values())
        return loss, metrics

    def _conclude(self, values: Sequence[tuple[PartLoss, dict[str, Any]]], lane: Lane) -> None:
        """Collect the results of a forward."""
        work, shards = self._work, list(self._parts)
        for shard, (loss, _) in zip(shards, values, strict=True):
            self._losses += work.share(shard, loss)
        readings = [
            Reading(loss.detached(), metrics, work.sizes[shard])
            for shard, (loss, metrics) in zip(shards, values, strict=True)
        ]
        numbers = torch.stack([t for reading in readings for t in reading.tensors])
        buffers = lane.buffers_after() if shards[0] == work.keeps else None
        self.products = Products(numbers, readings, [], buffers)

    def _go_backward(self, lanes: Sequence[Lane]) -> None:
        """One backward for all shards; the gradients are left in the products."""
        leaves = [lane.leaves[name] for lane in lanes for name in self._trained]
        strangers, base, work = self._compute.strangers, self._compute.models.slots.parameters, self._work
        if not self._captures and strangers.is_due(work.function, work.version):
            known = [*base.values(), *(p for lane in lanes for p in lane.leaves.values())]
            strangers.look(work.function, work.version, self._parts, self._losses, known)
        if any(leaf.grad is not None for leaf in leaves):
            raise ConfigError(
                "the step function called backward() by itself; expected it to return the mean loss of its "
                "part, on which run.step calls backward (for smaller micro-batches use more shards)"
            )
        own = [] if lanes[0].leaves is base else [base[name] for name in self._trained]
        found: Sequence[Tensor | None] = [None] * (len(leaves) + len(own))
        if leaves and self._losses:
            found = torch.autograd.grad(self._losses, leaves + own, allow_unused=True)
        for name, gradient in zip(self._trained, found[len(leaves) :], strict=False):
            if gradient is not None:
                raise UnsupportedError(
                    f"the step function used parameter '{name}' through a reference kept outside the model; "
                    "in a model with synchronized batch norm take it from the module, as in model.layer.weight"
                )
        for number in range(len(lanes)):
            named = dict(zip(self._trained, found[number * len(self._trained) :], strict=False))
            self.products.gradients.append(ShardGradients(named.get(name) for name in self._work.prepared.names))
        self._losses = []


class _Single(_Piece):
    """One shard, on the model itself."""

    def forward(self) -> None:
        ((shard, _),) = self._parts.items()
        lane = self._compute.lane(0)
        lane.begin(self._compute.committed_buffers())
        lane.resume()
        self._streams[0].resume()
        torch.clear_autocast_cache()  # what was cast outside a graph would not be cast again in its replays
        before = None if shard == next(iter(self._work.parts)) else next(iter(self._work.parts))
        with inside(Alone(shard, self._work.rows(shard), before)):
            value = self._call(shard)
        lane.pause()
        self._conclude([value], lane)

    def backward(self) -> None:
        ((shard, _),) = self._parts.items()
        with inside(Alone(shard, range(0), next(iter(self._work.parts)))):
            self._go_backward([self._compute.lane(0)])
        torch.clear_autocast_cache()  # nor may what was cast in a graph be used outside


class _Joint(_Piece):
    """All shards of this worker, side by side in lanes."""

    def forward(self) -> None:
        shards, lanes = list(self._parts), self._lanes()
        buffers = self._compute.committed_buffers()
        for lane in lanes:
            lane.begin(buffers)
        work = self._work
        functions = [lambda shard=shard: self._call(shard) for shard in shards]
        crew = self._compute.context.crew(work.sizes)
        if work.witness is not None:
            crew = work.witness.around(crew, work.where)
        rows = [work.rows(shard) for shard in shards]
        values = self._compute.lanes.run(shards, lanes, self._streams, work.where, crew, rows, functions)
        self._conclude(values, lanes[0])
        token, self._compute.lanes.token = self._compute.lanes.token, None
        if token is not None:  # where no shard here uses a layer's output, other workers still wait for its backward
            self._losses.append(token.sum())

    def backward(self) -> None:
        self._go_backward(self._lanes())

    def _lanes(self) -> list[Lane]:
        return [self._compute.lane(1 + n) for n in range(len(self._parts))]
