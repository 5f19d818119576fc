"""The optimizer as the loops of transformers see it: the run steps, so nothing is left to do in their `step()`."""

from typing import Any

from torch.optim import Optimizer

__all__ = ["own_optimizer", "step_elsewhere", "step_here"]


def own_optimizer(wrapped: Any) -> Optimizer:
    """The optimizer inside Accelerate's."""
    while hasattr(wrapped, "optimizer"):
        wrapped = wrapped.optimizer
    found: Optimizer = wrapped
    return found


def step_elsewhere(wrapped: Any) -> None:
    """From now on, calling its `step` only notes for schedulers, which check it, that it was called."""
    own = own_optimizer(wrapped)

    def step(closure: Any = None) -> None:
        """Nothing to do: the run has stepped."""
        del closure
        for each in (wrapped, own):
            each.__dict__["_opt_called"] = True

    wrapped.__dict__["step"] = step


def step_here(wrapped: Any) -> None:
    """Undo `step_elsewhere`, if it was done."""
    wrapped.__dict__.pop("step", None)
