"""The step as a transaction: it reads version v of the state and commits version v + 1, or leaves v untouched.

One step, alike on every worker:

1. compute (`compute.py`): this worker's shards run forward and backward; gradients flow to their owners meanwhile.
   Now and then twice, each time by different workers (`recheck.py`).
2. result round: everyone's backward is over (so nobody reads version v any more), losses and metrics are shared.
3. update (`updates.py`): each owner saves version v of what it owns, then lets the optimizer change it.
4. update round: everyone has updated, and knows what is new in the optimizers' state.
5. commit (`exchange/ledger.py`): the first worker of each machine writes the result into the journal; now the state is
   version v + 1.

Whatever happens before the end of 5, version v can be restored.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from evenstep.core import points
from evenstep.core.errors import ConfigError, EvenstepError, MismatchError
from evenstep.engine.capture import CudaRecorder
from evenstep.engine.carries import Carried
from evenstep.engine.circumstances import Circumstances, Facts, compare_past
from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Compute, Samples, StepFunction, Work
from evenstep.engine.context import Context
from evenstep.engine.determinism import Determinism
from evenstep.engine.graphs import Graphs
from evenstep.engine.holdings import Holdings
from evenstep.engine.intake import Intake
from evenstep.engine.kept import News
from evenstep.engine.limiting import Limiting
from evenstep.engine.logged import Logged, mean_of_all
from evenstep.engine.on_device import DeviceCompute
from evenstep.engine.optimizer_set import Trained
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.recheck import Recheck, Trial
from evenstep.engine.reports import Report, compare, compare_contents
from evenstep.engine.results import Results, merge
from evenstep.engine.scaling import Scaling
from evenstep.engine.sharing import Sharing
from evenstep.engine.stopwatch import Stopwatch
from evenstep.engine.updates import OwnUpdates, Updates
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Operation
from evenstep.exchange.tracing import Kind
from evenstep.native import core

__all__ = ["Engine", "Outcome", "StepTask"]


@dataclass(frozen=True)
class Outcome:
    """The result of a committed step for the user: means over all samples of the batch."""

    loss: Tensor
    metrics: dict[str, Any]
    grad_norm: float | None


@dataclass(frozen=True)
class StepTask:
    """What a step is asked to do.

    Attributes:
        samples: The global batch.
        function: Called with every part of this worker; returns its mean loss, or (loss, {metric: value}).
        trained: The optimizers whose parameters are trained.
        clipping: The limits of gradients.
        scaling: How losses are scaled.
    """

    samples: Samples
    function: StepFunction
    trained: Trained
    clipping: Clipping
    scaling: Scaling


class Engine:
    """Computes steps for one worker, in lock-step with the others.

    Args:
        holdings: What the workers hold together.
        updates: What becomes of the sums of a step.

    Attributes:
        sharing: Which shards each worker has.
        intake: Takes in models and optimizers.
        logged: What the script logs until the next step.
        told_of_changes: Whether `check_untouched` has raised.
    """

    def __init__(self, holdings: Holdings, updates: Updates) -> None:
        self.holdings, self.updates = holdings, updates
        self.config, self.ledger, self.group = holdings.config, holdings.ledger, holdings.group
        self.models, self.state, self.optimizers = holdings.models, holdings.state, holdings.optimizers
        core.keep_memory()  # activations come and go in every step: returning their pages each time is slow
        self.context = Context(self.group, self.config.seed)
        self.compute = _compute_for(holdings, self.context)
        self.sharing = Sharing(holdings, updates, self.context)
        self.recheck = Recheck(holdings, self.sharing, self.compute)
        self.intake = Intake(holdings, updates, self.sharing, self.compute.forget_lanes)
        self._limiting, self._stopwatch = Limiting(holdings), Stopwatch(self.group)
        self._seconds: list[float] = []  # how long each worker has computed in this step, if anybody has
        self._said_without_mean = False
        self.circumstances = Circumstances(self.models)
        self.determinism = Determinism(self.config)  # last: what fails before it leaves the process unchanged
        self.logged = Logged()
        self.told_of_changes = False
        self._of_all: dict[str, float] = {}  # what was logged before this step
        self.ledger.holder = self
        self.models.untouched.alone = isinstance(updates, OwnUpdates)
        self.models.untouched.kept = bool(self.config.recheck)

    @property
    def version(self) -> int:
        """How many steps have been committed."""
        return self.holdings.version

    # ---- what the ledger asks of the holder of the state ----

    def begin(self, operation: int) -> None:
        """See `Undecided`."""
        self.state.operation = operation

    def abandon(self) -> None:
        """See `Undecided`."""
        self.updates.abandon()
        for prepared in self.optimizers:
            prepared.rollback()
        if not self.group.elastic:  # otherwise the next generation does it, when nobody changes anything any more
            self.state.rollback()
            self.holdings.pull()
        self.holdings.settle()

    def recover(self) -> None:
        """See `Undecided`."""
        points.reach("recover")
        with self.updates.recovery():
            self.sharing.replan()
            if self.state.sites.is_first:
                self.state.rollback()
            self.group.barrier("recovered")
            self.holdings.catch_up()
            self.holdings.pull()
            self.holdings.settle()

    def step(self, task: StepTask) -> Outcome:
        """Do one step. All workers must call this alike; blocks until all have committed."""
        kind, trained = f"step {self.version}", task.trained

        def adopt(entry: Entry, took_part: bool) -> Outcome:
            loss, metrics, norm, news, carried, skipped = entry.value
            if not took_part:
                self._compare_past(entry, task, facts)
            trained.adopt(news, took_part)
            self.holdings.carries.adopt(carried)
            task.scaling.settle(skipped=skipped)
            if took_part:
                self.state.take_image(self.ledger.done + 1)
                self.models.pull()
                if self._seconds and all(task.samples.sizes):  # a shard without samples takes no time
                    self.sharing.keep_pace(self._seconds)
            if skipped or not took_part:
                trained.stepped_elsewhere()
            self.holdings.settle()
            if took_part:
                self.models.untouched.remember_values()
            self.holdings.version += 1
            self.recheck.committed(self.version)
            self.logged.settle()
            return Outcome(torch.tensor(loss, dtype=torch.float64), metrics, norm)

        self._check(task)
        for prepared in trained.optimizers:
            self.intake.take_in_added(prepared)
        operation = Operation(kind, self.version, is_step=True)
        facts = self.circumstances.of(task.function, trained, task.clipping, task.scaling.scale, self.version)
        with (
            self.models.slots.as_found(),
            self.holdings.memory.at_work(),
            self._stopwatch.step(lambda: self.ledger.took_part),
        ):
            outcome = self.ledger.perform(operation, lambda: self._try(kind, task, facts), adopt)
        self.updates.settle(trained, task.samples)
        return outcome

    def _compare_past(self, entry: Entry, task: StepTask, facts: Facts) -> None:
        """Check that a step which others have done is the one that the script comes to here."""
        compare_past(entry.kind, entry.aside.get("facts", {}), facts)
        if contents := entry.aside["contents"]:
            both = [(0, contents), (self.group.worker, task.samples.contents())]
            compare_contents(self.version, both, strict=self.config.on_nondeterminism == "error")

    def _check(self, task: StepTask) -> None:
        """Check that a step can be done, and that nothing was changed since the last."""
        self.determinism.check()
        if task.scaling.scale is not None:
            self.updates.refuse("scaled loss")
        if self.config.recheck:
            self.updates.refuse("recheck")
        self.check_untouched(task.trained.optimizers, values=True)

    def check_untouched(self, optimizers: Sequence[PreparedOptimizer], *, values: bool = False) -> None:
        """Check that user code has changed nothing since the last operation.

        Args:
            optimizers: Those whose state is looked at.
            values: Whether parameters are also compared by value, if their values were remembered.

        Raises:
            NondeterminismError: It has.
            UnsupportedError: It has moved or replaced something.
        """
        if self.ledger.catching_up:
            return
        try:
            self.models.check("between steps", values=values)
            for prepared in optimizers:
                prepared.kept.check_untouched()
        except EvenstepError:
            self.told_of_changes = True
            raise

    def _try(self, kind: str, task: StepTask, facts: Facts) -> Entry:
        """Go through a step up to its commit, which is the ledger's; see the module's docstring for its parts."""
        points.reach("step begins")
        points.touch("parameter", *task.trained.parameters)
        self.models.drop_buffers()  # those of a failed attempt
        self.holdings.carries.begin()
        self._seconds = []
        begun = self.updates.begin(task.samples, task.clipping)
        if isinstance(begun, Results):
            aside = {"contents": {}, "samples": sum(task.samples.sizes), "logged": {}}
            return Entry(kind, [begun.loss, begun.metrics, None, [], [], False], aside=aside)
        firsts = self.state.sites.first_shards(self.sharing.spans, begun.sizes)
        keeps = self.state.sites.for_each_rank(firsts)
        work = self._work(task, begun, keeps[self.group.rank])
        report = self._compute_checked(work, begun, keeps, task.samples, facts)
        results, changed = self._share(work, report)
        self.context.check()
        norm, mine, skipped = self._update(work, results, task.scaling)
        self._publish_buffers(work, changed, firsts)
        points.reach("after update")
        news, carried = self._share_news(work, mine)
        value = [results.loss, results.metrics, None if norm is None else float(norm), news, carried, skipped]
        aside = {"contents": report.contents, "samples": sum(begun.sizes), "logged": self._of_all}
        aside["facts"] = self.circumstances.digests(facts)
        return Entry(kind, value, aside=aside)

    def _work(self, task: StepTask, begun: Samples, keeps: int | None) -> Work:
        """Load this worker's parts of a batch.

        Args:
            task: What the step is asked to do.
            begun: The batch that is trained on.
            keeps: The shard whose buffers this worker keeps, if any.
        """
        with self.group.tracer.span(Kind.LOAD):
            parts = {k: begun.part(k) for k in self.sharing.mine if begun.sizes[k]}
        number = self.updates.number_of(self.version)
        return Work(
            self.version, number, parts, begun.sizes, begun.name, task.function, task.trained, task.clipping,
            task.scaling.scale, keeps, part=begun.part,
        )  # fmt: skip

    def _compute_checked(
        self, work: Work, begun: Samples, keeps: Sequence[int | None], samples: Samples, facts: Facts
    ) -> Report:
        """Compute this worker's shards, in some steps twice by different workers."""
        alone = self.group.num_workers == 1
        contents = {} if alone and not self.group.elastic else samples.contents(alone=alone)
        if self.recheck.is_due(self.version):
            report = self.recheck.compute(Trial(work, begun, keeps, lambda work: self._compute(work, contents, facts)))
        else:
            report = self._compute(work, contents, facts)
        begun.check()
        self.circumstances.beside.called(work.function, work.version)
        self.models.untouched.check("inside the step function")
        return report

    def _compute(self, work: Work, contents: dict[str, str], facts: Facts) -> Report:
        """Forward and backward of this worker's shards."""
        gradients = work.prepared.gradients
        active = [rank for rank, (first, end) in enumerate(self.sharing.spans) if any(work.sizes[first:end])]
        gradients.begin(1 + self.group.exchanges, active, list(work.parts))
        with self._stopwatch.computing() as lap, self.group.tracer.span(Kind.COMPUTE):
            results = self.compute.run(work) if work.parts else dict
            gradients.end_backward()
        facts = {
            "batch": list(work.sizes),
            "samples": work.samples,
            "optimizer": [self.optimizers.index(each) for each in work.prepared.optimizers],
            **facts,
        }
        changed = [] if self.state.sites.are_one else self.models.changed_buffers()
        return Report(self.group.worker, facts, contents, results(), lap.seconds, changed, self.logged.values)

    def _share(self, work: Work, report: Report) -> tuple[Results, set[str]]:
        """Losses and metrics over all shards, and the buffers that any of them changed.

        All workers must be doing the same step.
        """
        reports = self.updates.share(work, report)
        compare(work.version, reports, strict=self.config.on_nondeterminism == "error")
        self._seconds = [report.busy_s for report in reports]
        self._of_all = mean_of_all([report.logged for report in reports])
        results = merge({shard: result for report in reports for shard, result in report.results.items()}, work.sizes)
        if not results.has_graph and any(p.requires_grad for p in work.prepared.parameters):
            raise ConfigError(
                f"in step {work.version} the loss of no part depends on a parameter that is trained; expected the loss "
                "as a tensor that the model's output leads to (.detach(), .item(), torch.no_grad() and "
                "torch.inference_mode() cut it off)"
            )
        if results.scale is not None:
            self.updates.refuse("weighted loss")
        if results.without_mean is not None and self.group.rank == 0 and not self._said_without_mean:
            self._said_without_mean = True
            _warn_without_mean(work.version, results.without_mean)
        return results, {name for each in reports for name in each.buffers}

    def _update(self, work: Work, results: Results, scaling: Scaling) -> tuple[float | Tensor | None, News, bool]:
        """Let owners update what is theirs.

        Returns:
            The former norm of the gradients if that is limited, perhaps still on a device; new optimizer state; and
            whether the update was skipped, on all workers, because scaled gradients were not finite.
        """
        sums = work.prepared.gradients.finish()
        if not self._limiting.unscale(work, sums, scaling):
            return float("inf"), [], True
        results.scale_gradients(sums)
        norm = self._limiting.clip(work, sums)
        points.reach("before update")
        with self._stopwatch.updating(), self.group.tracer.span(Kind.UPDATE):
            mine = self.updates.update(work, sums)
        return norm, mine, False

    def _publish_buffers(self, work: Work, changed: set[str], firsts: Sequence[int | None]) -> None:
        """Make the buffers of the first shard with samples everyone's.

        Args:
            work: The step.
            changed: The buffers that any worker has changed.
            firsts: The first shard with samples on each site.
        """
        first = min((shard for shard in firsts if shard is not None), default=self.sharing.mine.start)
        others = self.models.buffers_to_spread(changed, everywhere=None not in firsts)
        self.models.publish_buffers(work.where, self.sharing.owner_of(first), others, idle=work.keeps is None)

    def _share_news(self, work: Work, mine: News) -> tuple[News, Carried]:
        """Wait until everyone has updated; put what is new in the state where everyone finds it."""
        carries = self.holdings.carries
        image = self.state.image
        of_all = self.ledger.share(work.where + "update", [mine, carries.news(), image and image.copied()])
        if image is not None:
            image.agree([theirs[2] for theirs in of_all])
        of_sites = [sorted(chain(*(of_all[rank][0] for rank in ranks))) for ranks in self.state.sites.members]
        news: News = of_sites[0]
        if any(theirs != news for theirs in of_sites):
            raise MismatchError(
                f"in step {work.version} the sites have made different optimizer state from the same gradients: "
                f"{of_sites}"[:1000]
            )
        carried = sorted(chain(*(theirs[1] for theirs in of_all)), key=lambda item: item[:2])
        if news:
            work.prepared.settle(news, {i for i, _, _ in mine})
        if carried:
            carries.settle(carried, self.sharing.owner_of)
        if news or carried:
            self.group.barrier(work.where + "state moved")
        return news, carried

    def close(self) -> None:
        """Give the models back to the user as ordinary ones, and the process its settings."""
        self.updates.close()
        self.ledger.holder = None
        self.compute.close()
        self.context.close()
        self.holdings.release()
        self.determinism.restore()


def _compute_for(holdings: Holdings, context: Context) -> Compute | DeviceCompute:
    """What computes shards on the device of the state."""
    memory, config = holdings.memory, holdings.config
    if memory.shared:
        return Compute(context, holdings.models, config.timeout_s)
    recorder = CudaRecorder(memory.device, overlap=config.overlap)
    graphs = Graphs(config.graphs, recorder, lambda why: warnings.warn(why, stacklevel=2))
    return DeviceCompute(context, holdings.models, holdings.carries, config.timeout_s, graphs)


def _warn_without_mean(version: int, shard: int) -> None:
    warnings.warn(
        f"in step {version} the loss of shard {shard} is not a number, although that of others is; if it is a mean "
        "over something that a part may have none of, such as labelled tokens, say how many it has: return "
        "evenstep.Loss(mean, weight=count)",
        stacklevel=3,
    )
