"""Carries one worker's updates to the servers and new values back, in a thread of its own.

The worker hands over the update of a bundle as soon as it is complete, while backward still runs. The courier sends it,
then fetches the bundle's new values, and puts them in place when the step is committed: not before, since others may
still read the old ones. Updates come before fetches: nobody can go on until the servers have all updates of a step.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from evenstep.core.errors import UnreachableError

__all__ = ["Courier", "Line"]


@dataclass(frozen=True)
class Line:
    """How a bundle reaches its server.

    Attributes:
        send: Sends an update of a bundle, computed from this version. Sent twice it counts once.
        fetch: Gets the values of a bundle.
        write: Puts values in place, as of this version.
        close: Ends all connections.
    """

    send: Callable[[int, int, Mapping[str, Tensor]], None]
    fetch: Callable[[int], dict[str, Tensor]]
    write: Callable[[int, dict[str, Tensor], int], None]
    close: Callable[[], None]


class Courier:
    """The thread and its tasks.

    Args:
        line: How bundles travel.
        timeout_s: How long its caller waits for anything.
    """

    def __init__(self, line: Line, timeout_s: float) -> None:
        self._line, self._timeout_s = line, timeout_s
        self._changed = threading.Condition()
        self._updates: deque[tuple[int, int, Mapping[str, Tensor]]] = deque()
        self._fetches: list[tuple[int, int]] = []
        self._fetched: dict[int, tuple[int, dict[str, Tensor]]] = {}  # what waits for its step to be committed
        self._committed = 0
        self._busy = self._sending = self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="evenstep-courier", daemon=True)
        self._thread.start()

    # ---- what the worker calls ----

    def send(self, bundle: int, version: int, update: Mapping[str, Tensor]) -> None:
        """Send an update that was computed from a version; then fetch the bundle's new values."""
        with self._changed:
            self._updates.append((bundle, version, update))
            self._changed.notify_all()

    def fetch(self, bundle: int, version: int) -> None:
        """Fetch a bundle from its server; it will have this version."""
        with self._changed:
            self._fetches.append((bundle, version))
            self._changed.notify_all()

    def wait_sent(self) -> None:
        """Wait until the servers have all updates.

        Raises:
            UnreachableError: That takes too long. Any other error of the courier is raised as it is.
        """
        self._wait(lambda: not self._updates and not self._sending)

    def commit(self, version: int) -> None:
        """Put what was fetched of a version in place, now that it is committed."""
        with self._changed:
            self._committed = version
            ready = {bundle: found for bundle, found in self._fetched.items() if found[0] <= version}
            for bundle in ready:
                del self._fetched[bundle]
        for bundle, (of, values) in ready.items():
            self._line.write(bundle, values, of)

    def drop(self) -> None:
        """Forget what is not committed; waits for what is under way."""
        with self._changed:
            self._updates.clear()
            self._fetches = [fetch for fetch in self._fetches if fetch[1] <= self._committed]
        self._wait(lambda: not self._sending, heed=False)
        with self._changed:
            self._fetches = [fetch for fetch in self._fetches if fetch[1] <= self._committed]
            self._fetched.clear()

    def finish(self) -> None:
        """Wait until everything is done."""
        self._wait(lambda: not self._updates and not self._fetches and not self._busy)

    def check(self) -> None:
        """Raise the error that has stopped the courier, if any."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread and its connections."""
        with self._changed:
            self._over = True
            self._updates.clear()
            self._fetches.clear()
            self._changed.notify_all()
        self._thread.join(self._timeout_s)

    def _wait(self, condition: Callable[[], bool], *, heed: bool = True) -> None:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while not condition():
                if self._error is not None:
                    break
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise UnreachableError(
                        f"the servers took longer than {self._timeout_s:g} s for the updates of a step"
                    )
        if heed:
            self.check()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001  # the border of the thread: the waiting caller gets it
            with self._changed:
                self._error = error
                self._busy = self._sending = False
                self._changed.notify_all()
        finally:
            self._line.close()

    def _turn(self) -> bool:
        """Do one thing; False at the end."""
        with self._changed:
            self._busy = self._sending = False
            self._changed.notify_all()
            while not self._updates and not self._fetches and not self._over:
                self._changed.wait(1.0)
            if self._over:
                return False
            self._busy = True
            update = self._updates.popleft() if self._updates else None
            fetch = self._next_fetch() if update is None else None
            self._sending = update is not None
        if update is not None:
            bundle, version, tensors = update
            self._line.send(bundle, version, tensors)
            self.fetch(bundle, version + 1)
        elif fetch is not None:
            bundle, version = fetch
            self._got(bundle, version, self._line.fetch(bundle))
        return True

    def _next_fetch(self) -> tuple[int, int]:
        """The first bundle of the model goes first: it is needed first."""
        fetch = min(self._fetches)
        self._fetches.remove(fetch)
        return fetch

    def _got(self, bundle: int, version: int, values: dict[str, Tensor]) -> None:
        with self._changed:
            if self._committed < version:
                self._fetched[bundle] = (version, values)
                return
        self._line.write(bundle, values, version)
