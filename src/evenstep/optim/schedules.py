"""The `inv` and `sigmoid` policies of Caffe and SINGA as torch schedulers: `LambdaLR`, saved with `run.track`."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evenstep.core.errors import ConfigError

__all__ = ["inv", "sigmoid"]


def inv(optimizer: Optimizer, gamma: float, power: float) -> LambdaLR:
    """The rate `base * (1 + gamma * step) ** -power`. With power 1 and gamma 1 / T it is SINGA's inverse-t.

    Raises:
        ConfigError: gamma is negative, so the rate would stop being a number after some steps.
    """
    if not gamma >= 0:
        raise ConfigError(f"gamma={gamma!r}, expected a number of at least 0")
    return LambdaLR(optimizer, lambda step: (1.0 + gamma * step) ** -power)


def sigmoid(optimizer: Optimizer, gamma: float, step_size: float) -> LambdaLR:
    """The rate `base / (1 + exp(-gamma * (step - step_size)))`: falling if gamma is negative, half at `step_size`."""

    def factor(step: int) -> float:
        x = gamma * (step - step_size)
        if x >= 0:
            return 1.0 / (1.0 + math.exp(-x))
        return math.exp(x) / (1.0 + math.exp(x))  # the other form would overflow

    return LambdaLR(optimizer, factor)
