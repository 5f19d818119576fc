"""What cannot be done exactly where servers have the parameters, and what to do instead."""

from collections.abc import Mapping

from evenstep.core.errors import UnsupportedError
from evenstep.engine.updates import Feature

__all__ = ["WITH_SERVERS", "refuse"]

WITH_SERVERS: Mapping[Feature, str] = {
    "added parameters": (
        "parameters were added to an optimizer after it was prepared, but the servers have theirs already; add them "
        "before run.prepare"
    ),
    "edited optimizer": (
        "run.edit changed the state of an optimizer, but the one that steps is the server's; change only parameters "
        "and learning rates"
    ),
    "stream": (
        "a stream in a run with servers or groups, where workers go on without each other; the streams of the shards "
        "need not end together, which every worker would have to know: train without servers, or index the data"
    ),
    "carry": (
        "run.carry in a run with servers, where a worker that is started again would have lost it; train without them"
    ),
    "scaled loss": (
        "run.step(scaler=...) in a run with servers, which get gradients and cannot skip a step; train in bfloat16"
    ),
    "recheck": (
        "recheck in a run with servers, to which gradients go while they are computed, before anybody could compare "
        "them; train without servers, or with Server(..., aggregate=True)"
    ),
    "whole optimizer": "prepare(..., whole=True) in a run with servers, which step what they hold; leave it out",
    "weighted loss": (
        "the step function returned an evenstep.Loss, but in this run gradients leave the workers before the weights "
        "of all parts are known; train without servers, or with Server(..., aggregate=True)"
    ),
}
"""Why each feature is refused in a run with servers, unless the kind of run says otherwise."""


def refuse(what: Feature, reasons: Mapping[Feature, str]) -> None:
    """Refuse a feature for which there is a reason.

    Raises:
        UnsupportedError: There is one.
    """
    if what in reasons:
        raise UnsupportedError(reasons[what])
