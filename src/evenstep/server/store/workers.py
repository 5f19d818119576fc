"""Who is registered, what each sent last, and the progress of each. Pure bookkeeping: no lock and no clock.

A worker counts from the moment it registers until its lease ends without a sign of life, or it leaves. Its last update
is remembered beyond that, so that a retry is recognised whatever happened in between.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from evenstep.core.errors import RefusedError

__all__ = ["Acknowledged", "RegisteredWorker", "Registry"]

_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class Acknowledged:
    """The last applied update of a worker: its sequence number, the version it made, the notes of its round."""

    sequence: int
    version: int
    notes: list[Any]


@dataclass
class RegisteredWorker:
    """A registered worker.

    Attributes:
        name: Its name.
        seen_s: When it gave its last sign of life.
        updates: How many updates it has made since it registered, on top of what the slowest had then.
        base_version: The version that its last update made.
        waiting: How many of its requests wait inside the server: as long as there is one, it is alive.
    """

    name: str
    seen_s: float
    updates: int
    base_version: int = 0
    waiting: int = 0


class Registry:
    """The registered workers by name.

    Attributes:
        acknowledged: The last applied update of every worker there ever was.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.registered: dict[str, RegisteredWorker] = {}
        self.acknowledged: OrderedDict[str, Acknowledged] = OrderedDict()

    def register(self, name: str, now_s: float) -> bool:
        """Register a worker, or note that it is alive; True if it is new. It starts level with the slowest."""
        worker = self.registered.get(name)
        if worker is not None:
            worker.seen_s = now_s
            return False
        self.registered[name] = RegisteredWorker(name, now_s, self.slowest())
        return True

    def see(self, name: str, now_s: float) -> RegisteredWorker:
        """Note a worker's sign of life.

        Raises:
            RefusedError: It is not registered, or not any more.
        """
        worker = self.registered.get(name)
        if worker is None:
            raise RefusedError(
                f"worker '{name}' is not registered, or was dropped after {self.lease_s:g} s without a sign of life; "
                "register it again",
                410,
            )
        worker.seen_s = now_s
        return worker

    def leave(self, name: str) -> bool:
        """Unregister a worker; False if it was not there."""
        return self.registered.pop(name, None) is not None

    def expire(self, now_s: float) -> dict[str, float]:
        """Drop those whose lease has ended; return who they are, and when each was last seen."""
        gone = {
            worker.name: worker.seen_s
            for worker in self.registered.values()
            if not worker.waiting and now_s - worker.seen_s > self.lease_s
        }
        for name in gone:
            del self.registered[name]
        return gone

    def next_end_s(self, now_s: float) -> float:
        """How long until the next lease ends, if nobody gives a sign of life."""
        ends = [worker.seen_s + self.lease_s - now_s for worker in self.registered.values() if not worker.waiting]
        return max(min(ends, default=self.lease_s), 0.0)

    def slowest(self) -> int:
        """How many updates the slowest has made."""
        return min((worker.updates for worker in self.registered.values()), default=0)

    def is_ahead(self, name: str, staleness: int) -> bool:
        """Whether one more update would bring a worker further ahead of the slowest than `staleness` allows."""
        own = self.registered[name].updates
        others = min((w.updates for w in self.registered.values() if w.name != name), default=own + 1)
        return own + 1 - min(others, own + 1) > staleness

    def acknowledge(self, name: str, sequence: int, version: int, notes: list[Any], *, counts: bool = True) -> None:
        """Record an applied update or, if it does not count as one, a put."""
        self.acknowledged[name] = Acknowledged(sequence, version, notes)
        self.acknowledged.move_to_end(name)
        while len(self.acknowledged) > _REMEMBERED:
            self.acknowledged.popitem(last=False)
        worker = self.registered.get(name)
        if worker is not None and counts:
            worker.updates += 1
            worker.base_version = version
