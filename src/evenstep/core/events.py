"""What a worker tells the supervisor, as JSON lines through a pipe."""

import json
import os
from typing import Any

__all__ = ["Event", "send"]

Event = dict[str, Any]


def send(fd: int, event: Event) -> None:
    """Write one event as a JSON line; if the supervisor is gone, it is dropped."""
    line = json.dumps(event).encode() + b"\n"
    try:
        while line:
            line = line[os.write(fd, line) :]
    except OSError:
        pass
