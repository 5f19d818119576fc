"""Loss scaling for float16: what `torch.amp.GradScaler` does, decided once for all workers.

The scaler stays the user's object. Every worker updates its own by the result of the step, so all of them have the same
scale, even one that catches up.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.amp import GradScaler

from evenstep.core.errors import ConfigError, UnsupportedError

__all__ = ["Scaling"]


class Scaling:
    """The scale of one step's loss.

    Args:
        scaler: The user's scaler; None or not enabled: the loss is not scaled.

    Attributes:
        scale: What the loss is multiplied by; None: nothing.

    Raises:
        ConfigError: It is something else.
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ConfigError(f"scaler is a {type(scaler).__name__}; expected a torch.amp.GradScaler, or None")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.scale: float | None = None if self._scaler is None else _single(self._scaler.get_scale())

    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale, in place; return whether all of them are finite."""
        assert self.scale is not None, "only scaled gradients are unscaled"
        inverse = torch.tensor(self.scale, dtype=torch.float64).reciprocal().float()
        finite = True
        for gradient in gradients:
            if gradient.dtype == torch.float16:
                raise UnsupportedError(
                    "a scaler with parameters in float16, whose gradients would lose what scaling keeps; leave them in "
                    "float32 and compute under torch.autocast"
                )
            finite = finite and bool(torch.isfinite(gradient).all())
            gradient.mul_(inverse.to(gradient.device))
        return finite

    def settle(self, *, skipped: bool) -> None:
        """Update the scale after a committed step, as `GradScaler.update` does."""
        if self._scaler is None:
            return
        state = self._scaler.state_dict()
        scale, good = _single(state["scale"]), 0 if skipped else state["_growth_tracker"] + 1
        if skipped:
            scale = _single(scale * state["backoff_factor"])
        elif good == state["growth_interval"]:
            grown, good = _single(scale * state["growth_factor"]), 0
            scale = grown if math.isfinite(grown) else scale
        self._scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": good})


def _single(value: float) -> float:
    """The value in single precision, as torch keeps it."""
    return float(torch.tensor(value, dtype=torch.float32))
