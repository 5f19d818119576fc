"""Parameters that a loss depends on and no step would train: they are in no prepared model.

One learns of them from the graph of the loss, which takes time to go through. So it is looked at when a step function
comes for the first time, and after that as often as it costs next to nothing.
"""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from evenstep.core.errors import UnsupportedError

__all__ = ["Strangers"]

_SHARE = 0.005  # of the time that steps take


class Strangers:
    """Looks for parameters that belong to no prepared model."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()  # the code of step functions
        self._looked_s = 0.0
        self._busy_s = 0.0

    def took(self, seconds: float) -> None:
        """A step has taken so long."""
        self._busy_s += seconds

    def is_due(self, function: Any) -> bool:
        """Whether it is time to look at the losses of a step function."""
        return _code(function) not in self._seen or self._looked_s <= _SHARE * self._busy_s

    def look(self, function: Any, losses: Sequence[Tensor], known: Sequence[nn.Parameter]) -> None:
        """Look at the graph of some losses.

        Args:
            function: The step function that they come from.
            losses: What backward begins from.
            known: The parameters of prepared models, as this step uses them.

        Raises:
            UnsupportedError: A loss depends on another one.
        """
        begin = time.perf_counter()
        found = _stranger(losses, {id(parameter) for parameter in known})
        self._looked_s += time.perf_counter() - begin
        if found is not None:
            raise UnsupportedError(
                f"the loss depends on a parameter of shape {tuple(found.shape)} that is in no prepared model, so no "
                "step would train it; make it part of a model that is passed to run.prepare or, if it is to stay as it "
                "is, call requires_grad_(False)"
            )
        self._seen.add(_code(function))


def _code(function: Any) -> Any:
    """What makes two step functions the same one: a lambda in a loop is made anew every time."""
    return getattr(function, "__code__", type(function))


def _stranger(losses: Sequence[Tensor], known: set[int]) -> nn.Parameter | None:
    waiting = [loss.grad_fn for loss in losses]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of those that accumulate a gradient
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            return leaf
        waiting += [before for before, _ in node.next_functions]
    return None
