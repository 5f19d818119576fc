"""What becomes of the sums of a step: the one thing in which kinds of runs differ.

In a plain run each owner updates what it owns, with the optimizer that the user has prepared (`OwnUpdates`). Otherwise
servers do it, for all workers of a machine at once, for each on its own, or for groups (`run/`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Samples, Work
from evenstep.engine.delivery import Delivery
from evenstep.engine.kept import News
from evenstep.engine.optimizer_set import Trained
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.reports import Report
from evenstep.engine.results import Results
from evenstep.exchange.group import Group
from evenstep.plan.summing import Span, Summing

__all__ = ["Feature", "OwnUpdates", "Updates", "share_among"]

Feature = Literal[
    "load",
    "checkpoint",
    "edit",
    "exchange",
    "stream",
    "weighted loss",
    "edited optimizer",
    "added parameters",
    "whole optimizer",
    "scaled loss",
    "carry",
    "recheck",
]
"""What not every kind of run supports: methods of `Run`, and what a script may bring."""


class Updates(Protocol):
    """How one worker's steps become updates.

    Attributes:
        shards: The shards that this worker trains on, if others outside its group have the rest; None: its group
            shares out all of them.
    """

    @property
    def shards(self) -> Span | None: ...  # noqa: D102  # an attribute, documented with the class

    def number_of(self, version: int) -> int:
        """The number of a step among those of all that train the model; seeds its random numbers."""

    def refuse(self, what: Feature) -> None:
        """Refuse what cannot be done exactly here.

        Raises:
            UnsupportedError: It cannot.
        """

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Check a model that is about to be prepared; nothing has been changed yet.

        Raises:
            UnsupportedError: It cannot be trained here.
        """

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """How gradients are added up by the workers of a generation. All of them must call this alike.

        Args:
            prepared: The optimizer whose gradients they are.
            spans: The shards of each worker.
        """

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """Agree on the values of a prepared model with others that train it. All workers must call this."""

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """Begin to try a step.

        Returns:
            The samples to compute here; or the results of the step, if nothing is to be computed for it.

        Raises:
            UnsupportedError: Gradients cannot be clipped here.
        """

    def share(self, work: Work, report: Report) -> list[Report]:
        """Send this worker's report to all workers that do this step; return the reports of all.

        Waits until their backward is over, so nobody reads version v any more.
        """

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """Change what this worker owns; return what is new in the optimizer's state.

        Args:
            work: The step.
            sums: The gradients of what it owns, by the number of the parameter.
        """

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """Follow up on a committed step, in which this worker may not have taken part."""

    def edited(self) -> None:
        """Note that user code has changed the state on this worker, the first; the edit is not committed yet."""

    def abandon(self) -> None:
        """Forget a failed attempt."""

    def recovery(self) -> AbstractContextManager[None]:
        """While this is open, a generation that has just begun restores what is committed.

        Nothing is under way elsewhere meanwhile, and nothing is missing afterwards.
        """

    def finish(self) -> None:
        """Fetch what others hold of the state, at the end of the script. All workers must call this."""

    def close(self) -> None:
        """Release everything."""


class OwnUpdates:
    """Each worker updates the parameters that it owns, with the prepared optimizer.

    Args:
        group: The workers.
    """

    shards = None

    def __init__(self, group: Group) -> None:
        self._group = group

    def number_of(self, version: int) -> int:
        """See `Updates`."""
        return version

    def refuse(self, what: Feature) -> None:
        """Refuse nothing."""

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Admit any number of models, with or without optimizers."""

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """See `Updates`."""
        return prepared.in_tree(spans)

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """Nothing to do: nobody else trains it."""

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """See `Updates`."""
        return samples

    def share(self, work: Work, report: Report) -> list[Report]:
        """See `Updates`."""
        return share_among(self._group, work, report)

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """See `Updates`."""
        return work.prepared.update(sums)

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """Nothing to do: the update was all."""

    def edited(self) -> None:
        """Nothing to do: nobody else needs to know."""

    def abandon(self) -> None:
        """Nothing to do: nothing was sent anywhere."""

    def recovery(self) -> AbstractContextManager[None]:
        """See `Updates`."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing to do: nobody else holds anything."""

    def close(self) -> None:
        """Nothing is open."""


def share_among(group: Group, work: Work, report: Report) -> list[Report]:
    """The reports of all workers of a group, in order of their ranks."""
    return [Report.unpack(theirs) for theirs in group.gather_json(work.where + "result", report.pack())]
