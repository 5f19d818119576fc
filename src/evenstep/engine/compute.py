"""Forward and backward of one worker's shards in one step.

If no layer spans shards they run one after another on the model itself, so only one shard's activations are alive at a
time. If one does, each shard has a lane; they go forward in turns, meet in the layer, and go backward together. Either
way hooks on the leaves carry every gradient away as it comes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenstep.core import points
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.engine.alone import Alone, Meets
from evenstep.engine.clipping import Clipping
from evenstep.engine.context import Context
from evenstep.engine.flat import FlatGradients
from evenstep.engine.lanes import Lanes
from evenstep.engine.leftovers import Leftovers
from evenstep.engine.loss import PartLoss, split
from evenstep.engine.models import Models
from evenstep.engine.optimizer_set import Trained
from evenstep.engine.randomness import Stream, preserved
from evenstep.engine.results import ShardResult
from evenstep.engine.slots import Lane, spanning_layers
from evenstep.engine.strangers import Strangers
from evenstep.engine.witness import Witness
from evenstep.exchange.surroundings import inside
from evenstep.exchange.tracing import Kind

__all__ = ["Compute", "Samples", "StepFunction", "Work"]

StepFunction = Callable[[Any], Any]


class Samples(Protocol):
    """A global batch, of which any worker can get any part.

    Attributes:
        name: Which samples these are, in words.
        sizes: The number of samples in every shard of the run.
        is_last: Whether an epoch ends with it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102  # an attribute, documented with the class

    @property
    def sizes(self) -> Sequence[int]: ...  # noqa: D102  # an attribute too

    @property
    def is_last(self) -> bool: ...  # noqa: D102  # an attribute too

    def part(self, shard: int) -> Any:
        """The samples of a shard, on the device of the run; the same whenever it is called."""

    def check(self) -> None:
        """Raise UnsupportedError if they were changed and cannot be loaded again."""

    def contents(self, *, alone: bool = False) -> dict[str, str]:
        """What must be the same on all workers besides the sizes: descriptions by path.

        Args:
            alone: Whether there is only one worker now, so that only those who come later can compare.
        """


@dataclass(frozen=True)
class Work:
    """The work of one worker in one step.

    Attributes:
        version: The version that the step reads.
        number: The step's number among those of all that train the model; seeds its random numbers.
        parts: The samples of this worker's shards, for those that have any.
        sizes: The number of samples in every shard of the run.
        samples: Which samples these are, in words; the workers compare this.
        function: Called with a part; returns its mean loss or a `Loss`, or (loss, {metric: value}).
        prepared: The optimizer whose parameters are trained.
        clipping: The limits of their gradients.
        scale: What losses are multiplied by before backward; None: nothing.
        keeps: The shard whose values of buffers that a forward changes are kept here.
        witness: Records the computation, if it is to be compared with another.
        counts: Whether gradients go on to be added up; otherwise only the witness sees them.
        part: Gives the samples of a shard again, unaltered.
    """

    version: int
    number: int
    parts: dict[int, Any]
    sizes: Sequence[int]
    samples: str
    function: StepFunction
    prepared: Trained
    clipping: Clipping
    scale: float | None = None
    keeps: int | None = None
    witness: Witness | None = None
    counts: bool = True
    part: Callable[[int], Any] | None = None

    @property
    def where(self) -> str:
        """The beginning of the tags of this step's exchanges."""
        return f"step {self.version}: "

    def begun_again(self) -> "Work":
        """The same, with samples that no step function has changed."""
        return self if self.part is None else replace(self, parts={shard: self.part(shard) for shard in self.parts})

    def rows(self, shard: int) -> range:
        """The rows of a shard in the batch, counted through all shards."""
        before = sum(self.sizes[:shard])
        return range(before, before + self.sizes[shard])

    def share(self, shard: int, loss: PartLoss) -> list[Tensor]:
        """What backward starts from in a shard, if anything."""
        found = loss.share(self.sizes[shard], sum(self.sizes))
        if found is None:
            return []
        return [found if self.scale is None else found * self.scale]


class Compute:
    """Runs the step function for every part, and backward."""

    def __init__(self, context: Context, models: Models, timeout_s: float) -> None:
        self.context, self._models = context, models
        self._stream = Stream()
        self._lanes = Lanes(timeout_s, context.tracer)
        self._lane_of: list[Lane] = []  # [0] is the model itself, the others have leaves of their own
        self._hooks: list[Any] = []
        self._calling = False
        self._strangers = Strangers()
        self._leftovers = Leftovers(models.slots.modules, models.slots.places)
        self._meeting: set[int] = set()  # the optimizers in whose steps shards were seen to meet
        self._arrivals: dict[int, tuple[Work, dict[str, int], int]] = {}  # by lane: whose gradients, of which shard

    def run(self, work: Work) -> Callable[[], dict[int, ShardResult]]:
        """Compute the shards of this worker; return a function that gives their results. The gradients are delivered.

        Restores the caller's random generators. In models whose layers span shards this blocks in exchanges with the
        other workers that have samples.
        """
        buffers = {name: self._models.state.entries[name].live for name in self._models.slots.buffers}
        self._check_hooks(work.prepared)
        for parameter in work.prepared.parameters:  # gradients that user code left do not belong to this step
            parameter.grad = None
        begin = time.perf_counter()
        with preserved():
            if id(work.prepared) in self._meeting or spanning_layers(self._models.slots.modules):
                values = self._side_by_side(work, buffers)
            else:
                try:
                    values = self._one_after_the_other(work, buffers)
                except Meets:  # in the first shard: nothing of the step is done yet
                    self._meeting.add(id(work.prepared))
                    values = self._side_by_side(work.begun_again(), buffers)
        self._strangers.took(time.perf_counter() - begin)
        results = {k: ShardResult.of(loss, metrics, work.sizes[k]) for k, (loss, metrics) in values.items()}
        return lambda: results

    def _check_hooks(self, prepared: Trained) -> None:
        """Check that nobody else takes gradients as they come.

        Raises:
            UnsupportedError: Somebody does.
        """
        self._lane(0)
        for name, parameter in zip(prepared.names, prepared.parameters, strict=True):
            if len(parameter._post_accumulate_grad_hooks or ()) > 1:  # one is ours
                raise UnsupportedError(
                    f"parameter '{name}' has a post-accumulate-grad hook, which would see the gradient of one part of "
                    "the batch; use parameter.register_hook, which changes the gradient of each part, or "
                    "run.step(..., clip_norm=, clip_value=)"
                )

    def _one_after_the_other(self, work: Work, buffers: dict[str, Tensor]) -> dict[int, Any]:
        lane = self._lane(0)
        values: dict[int, Any] = {}
        for shard in work.parts:
            self.context.begins(shard)
            lane.begin(buffers)
            lane.resume()
            self._stream.reseed(self.context.seed_of(work.number, shard))
            self._stream.resume()
            try:
                with inside(Alone(shard, work.rows(shard), None if not values else next(iter(values)))):
                    with self._user_code(), self.context.tracer.span(Kind.FORWARD, number=shard):
                        value = self._called(work, shard)
                    loss, metrics = split(value)
                    losses = work.share(shard, loss)
                    self._look_for_strangers(work, losses, [lane])
                    self._backward(losses, [lane], work, [shard])
            except Exception as error:
                error.add_note(f"in shard {shard} of worker {self.context.worker}, step {work.version}")
                raise
            lane.pause()
            if not values:
                self._models.strays.check(lane.changed_buffers())
            self._keep_buffers(work, shard, lane)
            values[shard] = (loss.detached(), metrics)
        return values

    def _side_by_side(self, work: Work, buffers: dict[str, Tensor]) -> dict[int, Any]:
        shards = list(work.parts)
        lanes = [self._lane(1 + n) for n in range(len(shards))]
        for lane in lanes:
            lane.begin(buffers)

        functions = [partial(self._call, work, shard) for shard in shards]
        streams = [Stream() for _ in shards]
        for stream, shard in zip(streams, shards, strict=True):
            stream.reseed(self.context.seed_of(work.number, shard))
        try:
            with self._user_code():
                crew, rows = self.context.crew(work.sizes), [work.rows(shard) for shard in shards]
                if work.witness is not None:
                    crew = work.witness.around(crew, work.where)
                values = self._lanes.run(shards, lanes, streams, work.where, crew, rows, functions)
            losses = [share for k, (loss, _) in zip(shards, values, strict=True) for share in work.share(k, loss)]
            token, self._lanes.token = self._lanes.token, None
            if token is not None:  # other workers wait for a layer's backward even if no shard here uses its output
                losses.append(token.sum())
            self._look_for_strangers(work, losses, lanes)
            self._backward(losses, lanes, work, shards)
        except Exception as error:
            error.add_note(f"in worker {self.context.worker}, step {work.version}")
            raise
        self._models.strays.check(lanes[0].changed_buffers())
        for shard, lane in zip(shards, lanes, strict=True):
            self._keep_buffers(work, shard, lane)
        return {shard: (loss.detached(), metrics) for shard, (loss, metrics) in zip(shards, values, strict=True)}

    def _call(self, work: Work, shard: int) -> Any:
        """Call the step function for a shard."""
        self.context.begins(shard)
        return split(self._called(work, shard))

    def _called(self, work: Work, shard: int) -> Any:
        """What the step function gives for a shard; for the first one here, looks at what it leaves behind."""
        is_first = shard == next(iter(work.parts))
        before = self._leftovers.before(work.function, work.version) if is_first else None
        value = work.function(work.parts[shard])
        self._leftovers.after(work.function, before)
        return value

    def _keep_buffers(self, work: Work, shard: int, lane: Lane) -> None:
        """Keep the buffers that a shard has left, if it is the one whose buffers count."""
        if shard != work.keeps and work.witness is None:
            return
        buffers = lane.buffers_after()
        for buffer in buffers.values():
            points.touch("buffer", buffer)
        if work.witness is not None:
            work.witness.buffers(shard, buffers)
        if shard == work.keeps:
            self._models.keep_buffers(buffers)

    def _look_for_strangers(self, work: Work, losses: Sequence[Tensor], lanes: Sequence[Lane]) -> None:
        if self._strangers.is_due(work.function, work.version):
            known = [*self._models.slots.parameters.values(), *(p for lane in lanes for p in lane.leaves.values())]
            self._strangers.look(work.function, work.version, work.parts, losses, known)

    @contextmanager
    def _user_code(self) -> Iterator[None]:
        """While this is open, step functions run: a gradient that arrives does not come from our backward."""
        self._calling = True
        try:
            yield
        finally:
            self._calling = False

    def _backward(self, losses: list[Tensor], lanes: Sequence[Lane], work: Work, shards: Sequence[int]) -> None:
        """One backward for some shards."""
        prepared = work.prepared
        leaves = [leaf for lane in lanes for name in prepared.names if (leaf := lane.leaves[name]).requires_grad]
        own = [
            p for p in prepared.parameters if p.requires_grad and lanes[0].leaves is not self._models.slots.parameters
        ]
        losses = [loss for loss in losses if loss.requires_grad]
        if not leaves or not losses:
            return
        points.reach("backward")
        index = {name: i for i, name in enumerate(prepared.names)}
        self._arrivals = {id(lane): (work, index, shard) for lane, shard in zip(lanes, shards, strict=True)}
        try:
            with self.context.tracer.span(Kind.BACKWARD, number=shards[0] if len(shards) == 1 else -1):
                torch.autograd.backward(losses, inputs=leaves + own)
        finally:
            self._arrivals = {}
        for name, p in zip(prepared.names, prepared.parameters, strict=True):
            if own and p.grad is not None:
                p.grad = None
                raise UnsupportedError(
                    f"the step function used parameter '{name}' through a reference kept outside the model; "
                    "in a model with synchronized batch norm take it from the module, as in model.layer.weight"
                )

    def _lane(self, number: int) -> Lane:
        while len(self._lane_of) <= number:
            lane = Lane(self._models.slots, own=bool(self._lane_of))
            for name, leaf in lane.leaves.items():
                if leaf.requires_grad or leaf.is_floating_point():
                    self._hook(lane, name, leaf)
            self._lane_of.append(lane)
        return self._lane_of[number]

    def _hook(self, lane: Lane, name: str, leaf: nn.Parameter) -> None:
        def arrived(_: Tensor) -> None:
            found = self._arrivals.get(id(lane))
            if found is None and self._calling:
                leaf.grad = None
                raise ConfigError(
                    "the step function called backward() by itself; expected it to return the mean loss of its "
                    "part, on which run.step calls backward (for smaller micro-batches use more shards)"
                )
            if found is not None and leaf.grad is not None:
                work, index, shard = found
                gradient, leaf.grad = leaf.grad, None
                points.touch("gradient", gradient)
                if work.witness is not None:
                    work.witness.gradient(shard, name, gradient)
                if work.counts:
                    gradients = work.prepared.gradients
                    assert not isinstance(gradients, FlatGradients), "in shared memory gradients come one by one"
                    gradients.arrive(index[name], shard, gradient)

        requires_grad = leaf.requires_grad
        leaf.requires_grad_(True)  # a hook needs it, and a frozen parameter may be unfrozen later
        self._hooks.append(leaf.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]  # torch's
        leaf.requires_grad_(requires_grad)

    def forget_lanes(self) -> None:
        """Drop all leaves: the models have changed, or the run is over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._lane_of = [], []

    def close(self) -> None:
        """End the threads and take the hooks off the user's parameters."""
        self._lanes.close()
        self.forget_lanes()
