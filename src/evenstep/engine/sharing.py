"""Who computes which shards, and how their gradients are added up, among the workers of the current generation."""

from collections.abc import Sequence

from evenstep.engine.context import Context
from evenstep.engine.holdings import Holdings
from evenstep.engine.pace import Pace
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.updates import Updates
from evenstep.plan.machines import share_machines
from evenstep.plan.summing import Span

__all__ = ["Sharing"]


class Sharing:
    """Shares out shards, parameters and scratch memory. All workers must call everything here alike.

    Args:
        holdings: What the workers hold together.
        updates: Says whether there are shards that others train on, and how gradients are added up.
        context: Told which shards each worker has.

    Attributes:
        spans: The shards that each worker trains on, by rank.
    """

    def __init__(self, holdings: Holdings, updates: Updates, context: Context) -> None:
        self._holdings, self._group, self._updates, self._context = holdings, holdings.group, updates, context
        self.spans: list[Span] = []
        self.replan()

    @property
    def mine(self) -> range:
        """The shards that this worker trains on; none if they have yet to be shared out in this generation."""
        return range(*self.spans[self._group.rank]) if self._planned_for == self._group.generation else range(0)

    def owner_of(self, shard: int) -> int:
        """The rank of the worker that computes a shard."""
        return next(rank for rank, span in enumerate(self.spans) if shard in range(*span))

    @property
    def evaluated(self) -> list[Span]:
        """The shards that each worker evaluates: together all of them, even if others train on some."""
        return self.spans if self._updates.shards is None else [(0, self._holdings.config.shards)]

    def replan(self, spans: list[Span] | None = None) -> None:
        """Plan again after the workers, or their shards, have changed.

        Args:
            spans: The shards of each; None: in proportion to the weights of the workers.
        """
        self._planned_for = self._group.generation
        self._holdings.memory.clear_scratch()
        self._holdings.place()
        self._context.regroup(self._holdings.memory.device)
        if spans is None:
            self._pace = Pace(self._group.num_workers - self._idle, self._share_out)
            given = self._group.weights
            weights = self._pace.weights if given is None else given[self._idle :]
            spans = self._with_keeper(self._share_out(self._holdings.config.shards, weights))
        self.spans = spans if self._updates.shards is None else [self._updates.shards]
        self._context.spans = self.spans
        self._group.board.has(self._group.worker, self.mine)
        for prepared in self._holdings.optimizers:
            self.lay_out(prepared)

    @property
    def _idle(self) -> int:
        """How many of the first workers compute nothing."""
        return int(self._group.keeper)

    def _share_out(self, num_shards: int, weights: Sequence[float]) -> list[Span]:
        """The shards of those that compute."""
        machines = self._group.machines[self._idle :]
        return share_machines(num_shards, weights, [machine - machines[0] for machine in machines])

    def _with_keeper(self, spans: list[Span]) -> list[Span]:
        return [(0, 0)] * self._idle + spans

    def lay_out(self, prepared: PreparedOptimizer) -> None:
        """Lay out how an optimizer's gradients are added up.

        A worker that has entered a generation may have to catch up first: then shards are not shared out yet, and this
        is done when they are.
        """
        if self._planned_for != self._group.generation:
            return
        prepared.gradients.lay_out(*self._updates.lay_out(prepared, self.spans))

    def keep_pace(self, seconds: Sequence[float]) -> None:
        """Move shards away from a worker that is clearly slower than the others, unless others share them out.

        Args:
            seconds: How long each worker has computed in the last step.
        """
        group = self._group
        given = group.weights is not None or self._updates.shards is not None
        if group.left or given or not self._holdings.memory.shared:  # how long a GPU is busy is unknown here
            return
        before, found = self.spans, self._pace.observe(seconds[self._idle :], self.spans[self._idle :])
        if found is None:
            return
        spans = self._with_keeper(found)
        self.replan(spans)
        if group.rank == 0:
            shares = zip(group.members, seconds, before, spans, strict=True)
            told = (f"worker {w}: {s:.3f} s for {b[1] - b[0]} shards, now {n[1] - n[0]}" for w, s, b, n in shares)
            group.tell({"slow": "shards move to faster workers: " + "; ".join(told)})
