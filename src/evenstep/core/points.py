"""Named points of the code at which a test may let something happen. Outside of tests nothing ever does."""

from collections.abc import Callable
from typing import Any

__all__ = ["DATA", "POINTS", "arm", "reach", "touch"]

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

DATA = ("gradient", "statistics", "buffer", "parameter", "node", "image")
"""What passes by where a machine that computes wrong would spoil it."""

_handler: Callable[[str], None] | None = None
_spoiler: Callable[[str, Any], None] | None = None


def reach(point: str) -> None:
    """The code is at a point."""
    if _handler is not None:
        _handler(point)


def touch(what: str, *tensors: Any) -> None:
    """Tensors pass by, and may be altered in place; they are one of `DATA`."""
    if _spoiler is not None:
        for tensor in tensors:
            _spoiler(what, tensor)


def arm(handler: Callable[[str], None] | None, spoiler: Callable[[str, Any], None] | None = None) -> None:
    """Call these at every point, and with every tensor that passes by, from now on; None: nothing."""
    global _handler, _spoiler
    _handler, _spoiler = handler, spoiler
