"""Signals as something to wait for, beside everything else."""

import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

__all__ = ["Signals"]


class Signals:
    """Catches signals while it is open; a context manager. Readable when a signal has arrived.

    Args:
        handle: Called with each, by `deliver`.
        numbers: The signals.
    """

    def __init__(self, handle: Callable[[int], None], *numbers: int) -> None:
        self._handle, self._numbers = handle, numbers

    def __enter__(self) -> "Signals":
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody can be reaped
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reading.close()
        self._writing.close()

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._reading.fileno()

    def deliver(self) -> None:
        """Handle the signals that have arrived, in order."""
        with suppress(BlockingIOError):
            for number in self._reading.recv(64):
                if number in self._numbers:
                    self._handle(number)
