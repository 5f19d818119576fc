"""The step as a transaction: it reads version v of the state and commits version v + 1, or leaves v untouched.

How one step goes, on every worker alike:

1. compute (`compute.py`): this worker's shards run forward and backward; gradients flow to their owners meanwhile.
2. result round: everyone's backward is over (so nobody reads version v any more), losses and metrics are shared.
3. update: each owner saves version v of what it owns, then lets the optimizer change it.
4. update round: everyone has updated, and knows what is new in the optimizers' state.
5. commit (`exchange/ledger.py`): the first worker writes the result into the journal; version v + 1 is what there is.

Whatever happens before the end of 5, version v can be had back.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import points
from evenstep.core.config import RunConfig
from evenstep.core.errors import MismatchError, UnsupportedError
from evenstep.engine.capture import CudaRecorder
from evenstep.engine.clipping import Clipping, norms_of, total_norm
from evenstep.engine.compute import Compute, Samples, StepFunction, Work
from evenstep.engine.context import Context
from evenstep.engine.determinism import Determinism
from evenstep.engine.graphs import Graphs
from evenstep.engine.models import Models
from evenstep.engine.on_device import DeviceCompute
from evenstep.engine.pace import Pace
from evenstep.engine.prepared import News, PreparedOptimizer
from evenstep.engine.results import Results, ShardResult, merge
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.native import core
from evenstep.plan.placement import share
from evenstep.transport.memory import DeviceMemory, Memory
from evenstep.transport.segment import Segment

__all__ = ["Engine", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What a committed step tells the user: means over all samples of the batch."""

    loss: Tensor
    metrics: dict[str, float]
    grad_norm: float | None


class Engine:
    """Computes steps for one worker, in lock-step with the others.

    Attributes:
        spans: The shards of each worker, by rank.
        mine: The shards of this worker.
        version: How many steps have been committed.
    """

    weighs = True  # whether losses can be weighted by something else than rows
    has_optimizer = True  # whether the optimizer that steps is here

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self.config, self.ledger, self.group = config, ledger, ledger.group
        self.memory = _memory_of(config.device, self.group.segment)
        self.models = Models(config, self.group, self.memory)
        self.state = self.models.state
        self.optimizers: list[PreparedOptimizer] = []
        self.version = 0
        self.determinism = Determinism(config)
        core.keep_memory()  # activations come and go in every step: giving their pages back and forth costs time
        self.context = Context(self.group, config.seed)
        self.compute = self._make_compute()
        self._replan()
        ledger.holder = self

    def _make_compute(self) -> Compute | DeviceCompute:
        config = self.config
        if self.memory.shared:
            return Compute(self.context, self.models, config.timeout_s)
        graphs = Graphs(config.graphs, CudaRecorder(self.memory.device), lambda why: warnings.warn(why, stacklevel=2))
        return DeviceCompute(self.context, self.models, config.timeout_s, graphs)

    def _replan(self, spans: list[tuple[int, int]] | None = None) -> None:
        """Share out shards, parameters and scratch memory among the workers of this generation."""
        self.memory.clear_scratch()
        if spans is None:
            self._pace = Pace(self.group.num_workers)
            spans = share(self.config.shards, self.group.weights or self._pace.weights)
        self.spans = spans
        self.mine = range(*self.spans[self.group.rank])
        self.context.spans = self.spans
        for prepared in self.optimizers:
            prepared.replan(self.spans)

    def begin(self, operation: int) -> None:
        """See `Undecided`."""
        self.state.operation = operation

    def abandon(self) -> None:
        """See `Undecided`."""
        for prepared in self.optimizers:
            prepared.rollback()
        if not self.group.elastic:  # else the next generation does it, when nobody changes anything any more
            self.state.rollback()
            self._pull()
        self._settled()

    def recover(self) -> None:
        """See `Undecided`."""
        points.reach("recover")
        self._replan()
        if self.group.rank == 0 or not self.memory.shared:
            self.state.rollback()
        self.group.barrier("recovered")
        self._pull()
        self._settled()

    def _pull(self) -> None:
        with torch.no_grad():
            self.state.pull()

    def _settled(self) -> None:
        """No operation is under way on this worker."""
        for prepared in self.optimizers:
            prepared.gradients.clear()
            prepared.remember()
        self.models.slots.bind_base()
        self.models.remember_versions()

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take a model, and the optimizer that trains it, into the run. All workers must call this alike."""
        added = self.models.add(model)
        self.compute.forget_lanes()
        prepared = None
        if optimizer is not None:
            prefix = "optimizer" if not self.optimizers else f"optimizer{len(self.optimizers) + 1}"
            names = {id(p): name for name, p in self.models.slots.parameters.items()}
            prepared = PreparedOptimizer(self.group, self.state, optimizer, names, prefix)
            prepared.replan(self.spans)
            self.optimizers.append(prepared)

        def attempt() -> Entry:
            self.models.agree(added)
            news = prepared.agree() if prepared else []
            self.group.barrier("state moved")
            return Entry("prepare", news)

        def adopt(entry: Entry, took_part: bool) -> None:
            self.models.bind(added)
            if prepared is not None:
                prepared.adopt(entry.value, took_part)
            self._settled()

        self.ledger.perform(Operation("prepare", self.version), attempt, adopt)

    def step(
        self,
        samples: Samples,
        function: StepFunction,
        prepared: PreparedOptimizer,
        clipping: Clipping,
    ) -> Outcome:
        """Do one step. All workers must call this alike; blocks until all have committed.

        Args:
            samples: The global batch.
            function: Called with every part of this worker; returns its mean loss, or (loss, {metric: value}).
            prepared: Whose parameters are trained.
            clipping: What gradients are limited to.
        """
        kind = f"step {self.version}"

        def adopt(entry: Entry, took_part: bool) -> Outcome:
            loss, metrics, norm, news, contents = entry.value
            if not took_part and contents:
                _compare_contents(self.version, [(0, contents), (self.group.worker, samples.contents())])
            prepared.adopt(news, took_part)
            if took_part:
                self.models.pull()
                if all(samples.sizes):  # a shard without samples takes no time
                    self._keep_pace()
            else:
                prepared.stepped_elsewhere()
            self._settled()
            self.version += 1
            return Outcome(torch.tensor(loss, dtype=torch.float64), metrics, norm)

        self.determinism.check()
        if not self.ledger.catching_up:
            self.models.check_versions()
            prepared.check_untouched()
        self._take_in(prepared)
        with self.memory.at_work():
            return self.ledger.perform(
                Operation(kind, self.version, is_step=True),
                lambda: self._try(kind, samples, function, prepared, clipping),
                adopt,
            )

    def _take_in(self, prepared: PreparedOptimizer) -> None:
        """Train what user code has added to an optimizer since it was prepared."""
        added = prepared.added()
        if not added:
            return
        if not self.has_optimizer:
            raise UnsupportedError(
                "parameters were added to an optimizer after it was prepared, but the servers have theirs already; add "
                "them before run.prepare"
            )
        prepared.extend(added, {id(p): name for name, p in self.models.slots.parameters.items()})
        prepared.replan(self.spans)
        kind = "parameters added"

        def attempt() -> Entry:
            prepared.compare(kind)
            return Entry(kind)

        self.ledger.perform(Operation(kind, self.version), attempt, lambda *_: None)

    def _try(
        self,
        kind: str,
        samples: Samples,
        function: StepFunction,
        prepared: PreparedOptimizer,
        clipping: Clipping,
    ) -> Entry:
        points.reach("step begins")
        self.models.take_buffers()  # of an attempt that came to nothing
        parts = {k: samples.part(k) for k in self.mine if samples.sizes[k]}
        work = Work(self.version, parts, samples.sizes, samples.name, function, prepared, clipping)
        active = [rank for rank, (first, end) in enumerate(self.spans) if any(work.sizes[first:end])]
        prepared.gradients.begin(1 + self.group.exchanges, active, list(work.parts))
        begin, waited_s = time.monotonic(), self.group.waited_s
        results = self.compute.run(work) if work.parts else dict
        prepared.gradients.end_backward()
        busy_s = time.monotonic() - begin - (self.group.waited_s - waited_s)
        contents = samples.contents() if self.group.num_workers > 1 else {}
        outcome = self._share_results(work, results(), contents, busy_s)
        sums = prepared.gradients.finish()
        self._check_weights(outcome.scale is not None)
        outcome.scale_gradients(sums)
        norm = self._clip(work, sums)
        points.reach("before update")
        news = self._update(prepared, sums)
        self.models.publish_buffers()
        points.reach("after update")
        return Entry(kind, [outcome.loss, outcome.metrics, norm, self._share_news(work, prepared, news), contents])

    def _update(self, prepared: PreparedOptimizer, sums: dict[int, Tensor | None]) -> News:
        """Change what this worker owns; return what is new in the optimizer's state."""
        return prepared.update(sums)

    def _share_news(self, work: Work, prepared: PreparedOptimizer, mine: News) -> News:
        """Everyone has updated; what is new in the optimizer's state is in the segment then."""
        of_all = self.group.gather_json(work.where + "update", mine)
        news = sorted(chain(*of_all))
        if news:
            prepared.settle(news, {i for i, _, _ in mine})
            self.group.barrier(work.where + "state moved")
        return news

    def _keep_pace(self) -> None:
        """Move shards away from a worker that is clearly slower than the others, unless the user shared them out."""
        if self.group.left or self.group.weights is not None:
            return
        before, spans = self.spans, self._pace.observe(self._seconds, self.spans)
        if spans is None:
            return
        self._replan(spans)
        if self.group.rank == 0:
            shares = zip(self.group.members, self._seconds, before, spans, strict=True)
            told = (f"worker {w}: {s:.3f} s for {b[1] - b[0]} shards, now {n[1] - n[0]}" for w, s, b, n in shares)
            self.group.tell({"slow": "shards move to faster workers: " + "; ".join(told)})

    def _share_results(
        self,
        work: Work,
        results: dict[int, ShardResult],
        contents: dict[str, str],
        busy_s: float,
    ) -> Results:
        """Losses and metrics over all shards; and all workers must be doing the same step."""
        mine = {k: result.pack() for k, result in results.items()}
        facts = {
            "batch": list(work.sizes),
            "samples": work.samples,
            "optimizer": self.optimizers.index(work.prepared),
            "options": work.prepared.hyperparameters(),
            "clipping": [work.clipping.norm, work.clipping.value],
        }
        of_all = self.group.gather_json(work.where + "result", [facts, contents, mine, busy_s])
        self._seconds = [theirs[3] for theirs in of_all]
        for worker, (theirs, *_) in zip(self.group.members, of_all, strict=True):
            for key, value in theirs.items():
                if value != (expected := of_all[0][0][key]):
                    raise MismatchError(
                        f"in step {work.version} worker {worker} has {key} {value} but worker 0 has {expected}: "
                        "all workers must do the same step"
                    )
        _compare_contents(work.version, [(w, theirs[1]) for w, theirs in zip(self.group.members, of_all, strict=True)])
        by_shard = {int(k): ShardResult.unpack(value) for theirs in of_all for k, value in theirs[2].items()}
        return merge(by_shard, work.sizes)

    def _check_weights(self, weighted: bool) -> None:
        """Refuse a loss that is weighted by something else than rows where its gradients cannot be scaled.

        Raises:
            UnsupportedError: It is one, and they cannot.
        """
        if weighted and not self.weighs:
            raise UnsupportedError(
                "the step function returned an evenstep.Loss, but in this run gradients leave the workers before the "
                "weights of all parts are known; train without servers, or with aggregate=True"
            )

    def _clip(self, work: Work, sums: dict[int, Tensor | None]) -> float | None:
        """Limit the gradients; return their norm before, if that is limited."""
        gradients = {i: gradient for i, gradient in sums.items() if gradient is not None}
        work.clipping.clip_elements(gradients.values())
        if work.clipping.norm is None:
            return None
        of_all = self.group.gather_json(work.where + "gradient norms", norms_of(gradients))
        total = total_norm(of_all, work.prepared.parameters[0].dtype)
        work.clipping.scale_down(gradients.values(), total)
        return float(total)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        return self.state.tensors()

    def whole(self) -> AbstractContextManager[None]:
        """While this is open, the shards of this worker are those it has when everyone evaluates together."""
        return nullcontext()

    def refusal(self, what: str) -> str | None:
        """Why `run.what` cannot be had from this engine; None: it can."""
        del what
        return None

    def collect(self) -> None:
        """Wait until every parameter is that of the last committed step."""

    def level(self, tag: str) -> None:
        """Inside of an operation: let all groups have one model."""

    def merge(self, tag: str, means: dict[str, float], num_samples: int) -> dict[str, float]:
        """Inside of an operation: the means over all groups, of means over so many samples of this one."""
        del tag, num_samples
        return means

    def conclude(self) -> None:
        """The script is done: take home what others hold of the state."""

    def end_of_epoch(self) -> None:
        """The last batch of an epoch was a step."""

    def edit(self, function: Callable[[], None], seed: int) -> None:
        """Let the first worker change parameters, buffers and optimizers; everyone has the result afterwards."""

        def attempt() -> Entry:
            self.group.barrier("edit begins")
            mine = self.models.edit(function, seed, self.optimizers) if self.group.rank == 0 else None
            changes = self.group.gather_json("edit ends", mine)[0]
            for prepared, (news, gone, _) in zip(self.optimizers, changes, strict=True):
                if (news or gone) and not self.has_optimizer:
                    raise UnsupportedError(
                        "run.edit changed the state of an optimizer, but the one that steps is the server's; change "
                        "parameters and learning rates only"
                    )
                prepared.settle(news, {i for i, _, _ in news} if self.group.rank == 0 else set())
            self.group.barrier("state moved")
            return Entry("edit", changes)

        def adopt(entry: Entry, took_part: bool) -> None:
            for prepared, changes in zip(self.optimizers, entry.value, strict=True):
                prepared.adopt_changes(changes, took_part)
            with torch.no_grad():
                self.models.pull()
            self._settled()

        self.ledger.perform(Operation("edit", self.version), attempt, adopt)

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> list[News]:
        """Put a checkpoint's state in place of the current one. All workers must call this alike, in an operation."""
        news = [prepared.news_of(tensors, values) for prepared in self.optimizers]
        with torch.no_grad():
            for prepared, theirs in zip(self.optimizers, news, strict=True):
                prepared.settle(theirs, set())
            if self.group.rank == 0:
                entries = [entry for name, entry in self.state.entries.items() if name in tensors]
                self.state.save(entries)
                for entry in entries:
                    entry.live.copy_(tensors[entry.name])
            self.group.barrier("checkpoint restored")
        return news

    def restored(self, news: list[News], version: int, took_part: bool) -> None:
        """A checkpoint's state is committed."""
        for prepared, theirs in zip(self.optimizers, news, strict=True):
            prepared.adopt(theirs, took_part)
        self._pull()
        self._settled()
        self.version = version

    def finish(self, took_part: bool) -> None:
        """The last operation is committed: whoever came to it through the journal alone takes over what came of it."""
        if not took_part:
            self._pull()

    def close(self) -> None:
        """Give the models back to the user as ordinary ones, and the process its settings."""
        self.ledger.holder = None
        self.compute.close()
        self.models.release(self.optimizers)
        self.determinism.restore()


def _compare_contents(version: int, of_workers: list[tuple[int, dict[str, str]]]) -> None:
    """See that all workers came with the same batch.

    Raises:
        MismatchError: They did not. All workers see the same, so all raise alike.
    """
    first, expected = of_workers[0]
    for worker, found in of_workers:
        for where in [*expected, *found]:
            here, there = expected.get(where, "nothing"), found.get(where, "nothing")
            if here != there:
                raise MismatchError(
                    f"in step {version} worker {worker} came with another batch than worker {first}: {where} is "
                    f"{there}, not {here} (type, shape, checksum), but run.step takes the whole global batch, the same "
                    "on every worker. The usual cause is a branch that only one worker takes and that draws random "
                    "numbers, such as `if run.worker == 0: evaluate()`: let every worker take it, or draw batches from "
                    "a torch.Generator of their own"
                )


def _memory_of(device: str, segment: Segment) -> Memory:
    """Where a site on this device has its state."""
    where = torch.device(device)
    if where.type == "cpu":
        return segment.memory
    return DeviceMemory(where)
