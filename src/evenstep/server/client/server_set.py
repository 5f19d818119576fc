"""The servers of one set: all asked at once, each told what the first has decided.

A get asks all servers at once; those that answer with an older version than another are asked again for the newer one.
If updates come so fast that this does not end, server 0 is asked to pause for a moment.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

from torch import Tensor

from evenstep.core.errors import UnreachableError
from evenstep.server.client.channels import Fields
from evenstep.server.client.connection import Connection, patience

__all__ = ["ServerSet"]

T = TypeVar("T")
Pieces = dict[str, Tensor]
_TRIES = 4  # attempts to read one version from all before server 0 is asked to pause
_SOON_S = 0.05  # how long a follower may lag before it is told what it missed


class ServerSet:
    """The connections of one worker to all servers of a set.

    Args:
        connections: Connections to each server, in order; taken over.

    Attributes:
        leader: The connection to server 0, which decides.
        at: The known versions of the servers.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections, self.leader = list(connections), connections[0]
        self.url = ",".join(connection.url for connection in connections)
        self.at = [-1] * len(connections)
        self._pool = ThreadPoolExecutor(len(connections), "evenstep-client")

    def close(self) -> None:
        """End all connections."""
        for connection in self.connections:
            connection.close()
        self._pool.shutdown()

    def each(self, action: Callable[[int, Connection], T], which: Iterable[int] | None = None) -> list[T]:
        """Do something with several servers at once; with the first of them in this thread."""
        chosen = list(range(len(self.connections)) if which is None else which)
        if not chosen:
            return []
        first, *others = chosen
        futures = [self._pool.submit(action, n, self.connections[n]) for n in others]
        try:
            found = [action(first, self.connections[first])]
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [*found, *(future.result() for future in futures)]

    # ---- reading ----

    def read(
        self, pieces: Sequence[Pieces], which: Sequence[int], fields: Fields, deadline: float, *, locked: bool
    ) -> list[set[str]]:
        """Read pieces of one version.

        Args:
            pieces: Where the pieces of each server go.
            which: Which servers to ask.
            fields: The fields of the requests; "min_version" is the oldest acceptable version.
            deadline: Until when to try.
            locked: Whether versions mean anything: if not, any values will do.

        Returns:
            The pieces that came from each of these servers.

        Raises:
            UnreachableError: It did not succeed in time.
        """
        came: dict[int, set[str]] = {}
        late, wish = which, int(fields["min_version"])
        for tries in count():
            paused = tries >= _TRIES
            if paused:
                late, wish = which, max(wish, self._pause(True, deadline))
            asked = {**fields, "min_version": wish}
            try:
                found = self.each(lambda n, c: self._pull(n, c, pieces[n], asked, deadline), late)  # noqa: B023  # done
            finally:
                if paused:
                    self._pause(False, deadline)
            came.update(zip(late, found, strict=True))
            newest = max(self.at[n] for n in which)
            late, wish = [n for n in which if self.at[n] < newest], newest
            if not late or not locked:
                return [came[n] for n in which]
            if time.monotonic() >= deadline:
                break
        raise UnreachableError(f"no version could be read from all of {self.url}, since updates come too fast")

    def _pull(self, n: int, connection: Connection, pieces: Pieces, fields: Fields, deadline: float) -> set[str]:
        """Read at least a version from one server; tell it what it missed if it does not get there soon."""
        patience_s = _SOON_S if n else math.inf
        while True:
            asked = {**fields, "names": list(pieces), "wait_s": min(patience(deadline), patience_s)}
            reply, found = connection.pull(asked, None if fields.get("bfloat16") else pieces, deadline)
            if not reply.get("pending"):
                self.at[n] = int(reply["version"])
                if fields.get("bfloat16"):
                    for name, value in found.items():
                        pieces[name].copy_(value)
                return set(found)
            if time.monotonic() >= deadline:
                raise UnreachableError(
                    f"version {fields['min_version']} of the parameters did not come in time; the server is at "
                    f"{reply['version']}"
                )
            if n:
                self.spread(deadline, [n], patient=False)
                patience_s *= 2

    def _pause(self, on: bool, deadline: float) -> int:
        return int(self.leader.ask("pause", {"on": on}, deadline)["version"])

    # ---- writing ----

    def stage(self, fields: Sequence[Fields], pieces: Sequence[Pieces], deadline: float, *, register: bool) -> None:
        """Make all followers keep an update until it is decided."""

        def keep(n: int, connection: Connection) -> None:
            reply = connection.push("stage", fields[n], pieces[n], deadline, register=register)
            self.at[n] = int(reply["version"])

        self.each(keep, range(1, len(self.connections)))

    def spread(
        self,
        deadline: float,
        which: Sequence[int] | None = None,
        *,
        said: Fields | None = None,
        restage: Callable[[], None] | None = None,
        patient: bool = True,
    ) -> bool:
        """Tell followers what server 0 has decided, and wait until it is applied there.

        Args:
            deadline: How long to wait.
            which: Which followers; all if None.
            said: What server 0 has already said.
            restage: Sends this client's own update again if a follower has lost it.
            patient: False: tell them once, without waiting.

        Returns:
            Whether they have applied it.
        """
        late = list(range(1, len(self.connections))) if which is None else list(which)
        while late:
            said = said or self.leader.ask("order", {"since": min(self.at[n] for n in late)}, deadline)
            wait_s = max(min(deadline - time.monotonic(), _SOON_S * 4), 0.0) if patient else 0.0
            newest, told = int(said["newest"]), {"order": said["order"], "alive": said["alive"], "wait_s": wait_s}

            def tell(n: int, connection: Connection) -> bool:
                reply = connection.ask("order", told, deadline)  # noqa: B023  # it is done before the next turn
                self.at[n] = int(reply["version"])
                return self.at[n] < newest  # noqa: B023  # likewise

            late = [n for n, behind in zip(late, self.each(tell, late), strict=True) if behind]
            said = None
            if late and not patient:
                return False
            if late and time.monotonic() >= deadline:
                raise UnreachableError(f"server {late[0]} of {self.url} misses an update that server 0 has applied")
            if late and restage is not None:
                restage()
        return True
