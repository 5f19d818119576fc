"""Leaves that a loss depends on but no step would train, because they are in no prepared model.

They show in the graph of the loss, which takes time to traverse. So this looks in the first two steps of a step
function, and after that as often as it costs next to nothing. A parameter is reported at first sight. Any other tensor
that requires a gradient may have been made by the step function itself, for a gradient penalty; it comes from outside
if a later step sees the very same tensor, and it is not an argument of the step.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenstep.core.errors import UnsupportedError

__all__ = ["Strangers"]

_SHARE = 0.005  # how much of the time of steps looking may take


class Strangers:
    """Looks for leaves that belong to no prepared model."""

    def __init__(self) -> None:
        self._steps: dict[Any, set[int]] = {}  # the first two steps at which each step function was looked at
        self._leaves: dict[Any, tuple[int, dict[int, ref[Tensor]]]] = {}  # the last step that looked; leaves, by id
        self._looked_s = 0.0
        self._busy_s = 0.0

    def took(self, seconds: float) -> None:
        """Note how long a step has taken."""
        self._busy_s += seconds

    def is_due(self, function: Any, step: int) -> bool:
        """Whether it is time to look at the losses of a step function."""
        steps = self._steps.get(_code(function), set())
        return (len(steps) < 2 and step not in steps) or self._looked_s <= _SHARE * self._busy_s

    def look(
        self, function: Any, step: int, given: Any, losses: Sequence[Tensor], known: Sequence[nn.Parameter]
    ) -> None:
        """Look at the graph of some losses.

        Args:
            function: The step function that they come from.
            step: The number of the step.
            given: What it was called with.
            losses: What backward starts from.
            known: The parameters of prepared models, as this step uses them.

        Raises:
            UnsupportedError: A loss depends on another leaf from outside.
        """
        begin, code = time.perf_counter(), _code(function)
        ours = {id(leaf) for leaf in (*known, *pytree.tree_leaves(given))}
        leaves = [leaf for leaf in _leaves(losses) if id(leaf) not in ours]
        before, earlier = self._leaves.get(code, (step, {}))
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter) or (
                before != step and id(leaf) in earlier and earlier[id(leaf)]() is leaf
            ):
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
                raise UnsupportedError(
                    f"the loss depends on a {kind} of shape {tuple(leaf.shape)} that is in no prepared model, so no "
                    "step would train it; make it part of a model that is passed to run.prepare (as an nn.Parameter) "
                    "or, if it is to stay as it is, call requires_grad_(False)"
                )
        self._leaves[code] = step, {id(leaf): ref(leaf) for leaf in leaves}
        steps = self._steps.setdefault(code, set())
        if len(steps) < 2:
            steps.add(step)
        self._looked_s += time.perf_counter() - begin


def _code(function: Any) -> Any:
    """What identifies a step function: a lambda in a loop is a new object every time."""
    return getattr(function, "__code__", type(function))


def _leaves(losses: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves in which backward from the losses would accumulate gradients."""
    waiting = [loss.grad_fn for loss in losses]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [before for before, _ in node.next_functions]
