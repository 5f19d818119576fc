"""The test kit: faults at named points, and chaos runs. For tests of evenstep and of software built on it."""

from evenstep.core.points import DATA, POINTS
from evenstep.testing.faults import Fault, plant

__all__ = ["DATA", "POINTS", "Fault", "plant"]
