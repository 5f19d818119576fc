"""A patient connection to one server.

A client that loses its server says so, tries again with growing pauses, and gives up at a deadline. While a worker is
registered, a thread regularly tells the server that it is alive.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor

from evenstep.core.errors import RefusedError, UnreachableError
from evenstep.server.client.channels import Channel, Fields

__all__ = ["Connection", "Registration", "patience"]

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_ASK_AGAIN_S = 5.0  # the server answers longer waits with "not yet"
log = logging.getLogger("evenstep.server")


class Registration(NamedTuple):
    """A server's reply to a worker that registers.

    Attributes:
        sequence: The number of the last update under the worker's name.
        version: The version of the parameters.
        staleness: How far workers may be apart; see `ParameterServer`.
        locks: Whether only the server changes the parameters.
        place: Which of several servers it is: [number, of how many, of which set, whether parameters are cut].
        lease_s: How long a worker may be silent.
    """

    sequence: int
    version: int
    staleness: int | None
    locks: bool
    place: tuple[int, int, str, bool]
    lease_s: float


class Connection:
    """A worker's connection to one server. May be used from several threads; one request at a time.

    Args:
        url: Where the server is.
        open_channel: Opens a channel to it.
        worker: The name of the worker.
        session: Distinguishes this life of the worker from others under its name.
        timeout_s: How long to try, unless a deadline is given.

    Attributes:
        on_registered: Called with the server's reply whenever the worker was registered.
    """

    def __init__(
        self, url: str, open_channel: Callable[[], Channel], worker: str, session: str, timeout_s: float
    ) -> None:
        self.url, self.worker, self.session, self.timeout_s = url, worker, session, timeout_s
        self.on_registered: Callable[[Registration], None] = lambda _: None
        self._open_channel = open_channel
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._registered = self._lost = False
        self._over = threading.Event()
        self._beat: threading.Thread | None = None

    def deadline(self, timeout_s: float | None = None) -> float:
        """The moment at which a timeout ends; None: the usual timeout."""
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # ---- requests ----

    def ask(self, verb: str, fields: Fields, deadline: float | None = None, *, register: bool = False) -> Fields:
        """Send a request without tensors; return the fields of the reply. See `call`."""
        return self.call(lambda channel: channel.ask(verb, fields), deadline, register=register)

    def push(
        self,
        verb: str,
        fields: Fields,
        tensors: Mapping[str, Tensor],
        deadline: float | None = None,
        *,
        register: bool = False,
    ) -> Fields:
        """Send a request with tensors; return the fields of the reply. See `call`."""
        return self.call(lambda channel: channel.push(verb, fields, tensors), deadline, register=register)

    def pull(
        self, fields: Fields, out: Mapping[str, Tensor] | None, deadline: float | None = None
    ) -> tuple[Fields, dict[str, Tensor]]:
        """Get parameters: into tensors that are given, by name, or into new ones. See `call`."""
        return self.call(lambda channel: channel.pull(fields, out), deadline)

    def call(self, action: Callable[[Channel], T], deadline: float | None = None, *, register: bool = False) -> T:
        """Do something on a channel; if it breaks, open a new one and try again, until the deadline.

        Args:
            action: What to do; it may be done several times.
            deadline: Until when to try.
            register: Register first, if not done yet.

        Raises:
            RefusedError: The server refuses, and would again.
            UnreachableError: It could not be reached, or was too busy.
        """
        deadline = self.deadline() if deadline is None else deadline
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                found = self._try(action, register)
            except RefusedError as error:
                if error.status != 503 and not (error.status == 410 and register):
                    raise
                reason: Exception = error
            except OSError as error:
                reason = error
                self._say_lost(error)
            else:
                self._say_back()
                return found
            if time.monotonic() + pause_s > deadline or self._over.wait(pause_s * random.uniform(0.5, 1.0)):
                raise UnreachableError(f"the server {self.url} cannot be reached: {reason}") from reason
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(self, action: Callable[[Channel], T], register: bool) -> T:
        with self._lock:
            try:
                if self._channel is None:
                    self._channel = self._open_channel()
                if register and not self._registered:
                    self._introduce(self._channel)
                return action(self._channel)
            except RefusedError as error:
                if error.status == 410:
                    self._registered = False  # the server has dropped us
                raise
            except BaseException:
                self._drop()  # an answer may still be on its way, so the channel is unusable
                raise

    def _say_lost(self, error: OSError) -> None:
        if not self._lost:
            log.warning("lost the server %s (%s): trying again", self.url, str(error))
            self._lost = True

    def _say_back(self) -> None:
        if self._lost:
            log.warning("the server %s is back", self.url)
            self._lost = False

    def _drop(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    # ---- being a worker ----

    def open(self, deadline: float | None = None, *, register: bool) -> None:
        """Check that the server is there; register, if that is wanted and not done yet."""
        if not (register and self._registered):
            self.call(lambda _: None, deadline, register=register)

    def _introduce(self, channel: Channel) -> None:
        reply = channel.ask("register", {"worker": self.worker, "session": self.session})
        self._registered = True
        said = Registration(
            reply["sequence"],
            reply["version"],
            reply["staleness"],
            reply["lock"],
            tuple(reply["place"]),
            reply["lease_s"],
        )
        self.on_registered(said)
        if self._beat is None:
            self._beat = threading.Thread(
                target=self._live, args=(said.lease_s / 4,), name="evenstep-lease", daemon=True
            )
            self._beat.start()

    def _live(self, every_s: float) -> None:
        """Regularly tell the server that this worker is alive, over a separate channel."""
        channel: Channel | None = None
        while not self._over.wait(every_s):
            try:
                channel = channel or self._open_channel()
                if self._registered:
                    channel.ask("register", {"worker": self.worker, "session": self.session})
            except (OSError, RefusedError):
                if channel is not None:
                    channel.close()
                channel = None
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Leave, if registered, and end the connection."""
        self._over.set()
        if self._beat is not None:
            self._beat.join()
            self._beat = None
        with self._lock:
            try:
                if self._registered and self._channel is not None:
                    self._channel.ask("leave", {"worker": self.worker})
            except (OSError, RefusedError):
                log.debug("the server was gone before '%s' could leave", self.worker)
            self._registered = False
            self._drop()


def patience(deadline: float) -> float:
    """How long to let the server wait before asking again."""
    return max(min(deadline - time.monotonic(), _ASK_AGAIN_S), 0.0)
