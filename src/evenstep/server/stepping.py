"""A step of any optimizer, without what torch's own do around it for hooks and profiles when there are none.

For a small model that is most of the time of a step. What is computed is the same.
"""

from torch.optim import Optimizer
from torch.optim import optimizer as internals

from evenstep.server.hyperparameters import is_torchs

__all__ = ["Stepper"]


class Stepper:
    """Steps an optimizer over CPU parameters.

    Args:
        optimizer: Any. One of torch's that leaves open whether to step on several tensors at once is told what torch
            would decide in every step: not on a CPU.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        known = is_torchs(optimizer)
        self._plain = getattr(type(optimizer).step, "__wrapped__", None) if known else None
        for group in optimizer.param_groups if known else ():
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = False

    def step(self) -> None:
        """Step on the gradients that are there."""
        optimizer = self._optimizer
        if self._plain is None or self._is_watched():
            optimizer.step()
        else:
            self._plain(optimizer)

    def _is_watched(self) -> bool:
        """Whether somebody wants to know of every step; a schedule wraps the method of the one optimizer."""
        optimizer = self._optimizer
        return bool(
            "step" in vars(optimizer)
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or internals._global_optimizer_pre_hooks
            or internals._global_optimizer_post_hooks
        )
