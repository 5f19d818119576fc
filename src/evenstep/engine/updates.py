"""What becomes of the sums of a step: the one thing in which kinds of runs differ.

In a plain run each owner updates what it owns, by the optimizer that the user has prepared (`OwnUpdates`). Elsewhere
servers do it, for all workers of a machine at once, for each by itself, or for groups (`run/`).
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
"""What not every kind of run can do: methods of `Run`, and what a script may come with."""


class Updates(Protocol):
    """How one worker's steps become updates.

    Attributes:
        shards: The shards that this worker trains on, if others who are not in its group have the rest; None: its group
            shares out all of them.
    """

    @property
    def shards(self) -> Span | None: ...  # noqa: D102  # an attribute, documented with the class

    def number_of(self, version: int) -> int:
        """The number of a step among those of all who train the model: its random numbers are seeded by it."""

    def refuse(self, what: Feature) -> None:
        """Say that something cannot be done exactly here.

        Raises:
            UnsupportedError: It cannot.
        """

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """A model is about to be prepared; nothing has been changed yet.

        Raises:
            UnsupportedError: It cannot be trained here.
        """

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """How gradients are added up by the workers of a generation. All of them must call this alike.

        Args:
            prepared: Whose gradients.
            spans: The shards of each worker.
        """

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """A model has been prepared: agree on its values with whoever else trains it. All workers must call this."""

    def begin(self, samples: Samples, clipping: Clipping) -> Samples | Results:
        """A step is tried.

        Returns:
            What of the batch counts here; or what the step gave, if nothing is to be computed for it.

        Raises:
            UnsupportedError: Gradients cannot be clipped here.
        """

    def share(self, work: Work, report: Report) -> list[Report]:
        """Tell everyone who does this step what came of it here; return what all of them tell.

        Waits until their backward is over, so nobody reads version v any more.
        """

    def update(self, work: Work, sums: dict[int, Tensor | None]) -> News:
        """Change what this worker owns; return what is new in the optimizer's state.

        Args:
            work: The step.
            sums: The gradients of what it owns, by the number of the parameter.
        """

    def settle(self, prepared: Trained, samples: Samples) -> None:
        """A step is committed, and counted; perhaps without this worker."""

    def edited(self) -> None:
        """User code has changed the state, on this worker, the first; the edit is not committed yet."""

    def abandon(self) -> None:
        """What was tried came to nothing: forget it."""

    def recovery(self) -> AbstractContextManager[None]:
        """While this is open, a generation that has just begun brings everyone to what is committed.

        Nothing is under way elsewhere meanwhile, and nothing is missing afterwards.
        """

    def finish(self) -> None:
        """The script is done: take home what others hold of the state. All workers must call this."""

    def close(self) -> None:
        """Let go of everything."""


class OwnUpdates:
    """Each worker updates the parameters that it owns, by the optimizer that was prepared.

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
        """Everything can be done."""

    def admit(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Any number of models, with optimizers or without, are trained."""

    def lay_out(self, prepared: PreparedOptimizer, spans: Sequence[Span]) -> tuple[Summing, Delivery]:
        """See `Updates`."""
        return prepared.in_tree(spans)

    def join(self, model: nn.Module, prepared: PreparedOptimizer | None) -> None:
        """Nobody else trains it."""

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
        """The update is all there is."""

    def edited(self) -> None:
        """Nobody else needs to know."""

    def abandon(self) -> None:
        """Nothing was sent anywhere."""

    def recovery(self) -> AbstractContextManager[None]:
        """See `Updates`."""
        return nullcontext()

    def finish(self) -> None:
        """Nobody else holds anything."""

    def close(self) -> None:
        """Nothing is open."""


def share_among(group: Group, work: Work, report: Report) -> list[Report]:
    """The reports of all workers of a group, in order of their ranks."""
    return [Report.unpack(theirs) for theirs in group.gather_json(work.where + "result", report.pack())]
