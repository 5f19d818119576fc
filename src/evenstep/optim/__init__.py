"""Learning-rate policies that torch does not have. `docs/scaling.md` has the table of those that it has."""

from evenstep.optim.schedules import inv, sigmoid

__all__ = ["inv", "sigmoid"]
