"""The store through which the bridges of a run find each other: torch's, in a process of its own.

The store has threads, and a process forked from one with threads may hang. So the process of the store is forked early,
and nothing is forked from it.
"""

import os
import signal
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from evenstep.core.children import default_signals, fork
from evenstep.core.errors import ConfigError

__all__ = ["StoreProcess"]

_START_S = 30.0


class StoreProcess:
    """The store's process. It ends with the process that created it.

    Raises:
        ConfigError: It did not start.

    Attributes:
        child: The process.
        port: Where it listens, on all addresses of this machine.
    """

    def __init__(self) -> None:
        reading, writing = os.pipe()

        def main() -> int:
            default_signals()
            store = TCPStore("localhost", 0, None, True, timedelta(seconds=_START_S), wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            os.close(writing)
            signal.pause()
            return 0

        self.child = fork(main, keep={writing})
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        if not said:
            self.child.kill()
            raise ConfigError("the store through which machines find each other could not be started; see above")
        self.port = int(said)

    def close(self) -> None:
        """End the process."""
        self.child.kill()
