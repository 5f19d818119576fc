"""A place at a server where groups that share nothing else wait for each other and compare notes.

Each participant leaves a value and waits until enough have come; then all get all values. Values stay: coming again,
after a lost answer or a restart, gives the same result. Only the newest meetings are remembered.
"""

import threading
import time
from collections import OrderedDict
from typing import Any

from evenstep.core.errors import RefusedError

__all__ = ["Appointments"]

_REMEMBERED = 64
_MOST = 1024


class Appointments:
    """All meetings of a server, by tag."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._hurried = False

    def meet(self, tag: str, who: str, value: Any, count: int, wait_s: float) -> tuple[bool, dict[str, Any]]:
        """Come to a meeting.

        Args:
            tag: The name of the meeting.
            who: The participant. Its first value counts.
            value: Its value, as JSON.
            count: How many have to come.
            wait_s: How long to wait.

        Returns:
            Whether all are there, and their values.

        Raises:
            RefusedError: All expected participants are already there, or there are too many meetings.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            if tag not in self._found and len(self._found) >= _MOST:
                raise RefusedError(f"{_MOST} meetings are waiting already; try again", 503)
            here = self._found.setdefault(tag, {})
            if who not in here and len(here) >= count:
                raise RefusedError(
                    f"'{who}' comes to '{tag[:100]}', where all {count} are already: {sorted(here)}", 409
                )
            here.setdefault(who, value)
            self._changed.notify_all()
            while len(here) < count and not self._hurried and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if len(here) >= count:
                while len(self._found) > _REMEMBERED:
                    self._found.popitem(last=False)
            return len(here) >= count, dict(here)

    def hurry(self, hurried: bool) -> None:
        """Set whether every wait ends at once."""
        with self._changed:
            self._hurried = hurried
            self._changed.notify_all()
