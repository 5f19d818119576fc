"""Named points in the code at which a test may make something happen. Outside tests they do nothing."""

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
"""All points, in the order in which a run first reaches them."""

DATA = ("gradient", "statistics", "buffer", "parameter", "node", "image")
"""The kinds of tensors that a machine that computes wrong would spoil."""

_handler: Callable[[str], None] | None = None
_spoiler: Callable[[str, Any], None] | None = None


def reach(point: str) -> None:
    """Say that the code is at a point."""
    if _handler is not None:
        _handler(point)


def touch(what: str, *tensors: Any) -> None:
    """Show tensors to the test, which may alter them in place; `what` is one of `DATA`."""
    if _spoiler is not None:
        for tensor in tensors:
            _spoiler(what, tensor)


def arm(handler: Callable[[str], None] | None, spoiler: Callable[[str, Any], None] | None = None) -> None:
    """From now on call these at every point, and with every tensor shown; None: call nothing."""
    global _handler, _spoiler
    _handler, _spoiler = handler, spoiler
