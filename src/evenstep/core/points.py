"""Named points of the code at which a test may let something happen. Outside of tests nothing ever does."""

from collections.abc import Callable

__all__ = ["POINTS", "arm", "reach"]

POINTS = (
    "join",
    "step begins",
    "forward",
    "backward",
    "exchange",
    "before update",
    "inside update",
    "after update",
    "before commit",
    "inside commit",
    "after commit",
    "checkpoint",
    "recover",
)
"""All of them, in the order in which a run first comes by."""

_handler: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """The code is at a point."""
    if _handler is not None:
        _handler(point)


def arm(handler: Callable[[str], None] | None) -> None:
    """Call this at every point from now on; None: nothing."""
    global _handler
    _handler = handler
