"""Learning-rate policies that torch does not have. `docs/scaling.md` lists those that it does."""

from evenstep.optim.schedules import inv, sigmoid

__all__ = ["inv", "sigmoid"]
