"""The parameters of a server, without any transport.

They have a version: how many updates they have had. Every parameter has the version at which it last changed. All verbs
may be called from any thread. A verb that may wait takes `wait_s`, and its result says if that was not enough; nobody
holds the lock while waiting.

A store gets its updates from a `Decider` or, on the servers after the first of several, a `Follower`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server.store import status
from evenstep.server.store.attendance import Attendance
from evenstep.server.store.commits import Commits, First
from evenstep.server.store.deciding import Decider
from evenstep.server.store.decisions import Decided
from evenstep.server.store.following import Follower
from evenstep.server.store.optimizers import MakeOptimizer
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.readers import Readers
from evenstep.server.store.state import Applied, ParameterState
from evenstep.server.store.workers import Acknowledged
from evenstep.server.wire.slices import ServerPlace
from evenstep.server.wire.tensors import ParameterLayout, Spec

__all__ = ["Store"]


class Store:
    """Parameters, optimizer, versions and workers.

    Args:
        options: How it behaves.
        optimizer: Makes the optimizer from the parameters when they are put. None: only deltas are accepted.
        clock: Seconds, for leases and the history.
        place: Which of several servers this is.

    Attributes:
        state: The parameters and their optimizer.
        attendance: The lock, and who is registered.
        commits: Commits updates.
        readers: The readers.
        way: Its decider or follower.
        takes_recipes: Whether a client that puts the parameters may bring an optimizer.
        flush: Waits until all replicas were told of its updates.
    """

    def __init__(
        self,
        options: StoreOptions,
        optimizer: MakeOptimizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        place: ServerPlace = ServerPlace(),  # noqa: B008  # a frozen value
    ) -> None:
        self.options, self.place = options, place
        self.state = ParameterState(optimizer)
        self.attendance = Attendance(options.lease_s, clock, lambda: self.state.version)
        self.commits = Commits(options, self.state, self.attendance)
        self.readers = Readers(self.state, self.attendance)
        self.way: Decider | Follower = (Follower if place.follows else Decider)(
            options, self.commits, self.readers, self.attendance
        )
        self.attendance.on_gone = self.way.gone
        self.takes_recipes = True
        self.flush: Callable[[float], bool] = lambda _: True

    @property
    def decider(self) -> Decider:
        """Its decider.

        Raises:
            RefusedError: It follows another server.
        """
        if not isinstance(self.way, Decider):
            raise RefusedError(f"this is {self.place}: it applies what server 0 decides", 409)
        return self.way

    @property
    def follower(self) -> Follower:
        """Its follower.

        Raises:
            RefusedError: It decides itself.
        """
        if not isinstance(self.way, Follower):
            raise RefusedError(f"this is {self.place}: it decides by itself, and keeps nothing for later", 409)
        return self.way

    @property
    def layout(self) -> ParameterLayout | None:
        """What the parameters are; None until they are put."""
        return self.state.layout

    @property
    def version(self) -> int:
        """How many updates there were."""
        return self.state.version

    # ---- parameters ----

    def put(self, first: First, *, force: bool = False, sequence: int = 0, session: str = "") -> int:
        """Give the parameters their values. The first to do so is their owner.

        Args:
            first: All of them, and what else belongs to them when they are put for the first time.
            force: Replace values that are there.
            sequence: The number by which the other servers know this put.
            session: Likewise.

        Returns:
            The version: 0, or if values were replaced one more than before.

        Raises:
            RefusedError: They already have values, or the names, shapes or dtypes of the replacement differ.
        """
        worker, commits = first.owner, self.commits
        with self.attendance.changed:
            if (done := commits.decisions.made_by(worker, sequence)) is not None:
                return done
            sequences, sessions = ({worker: sequence}, {worker: session}) if sequence else ({}, {})
            if self.layout is None:
                if first.recipe is not None and (self.state.make_optimizer is not None or not self.takes_recipes):
                    raise RefusedError("this server has an optimizer, or keeps snapshots: it takes no recipe", 409)
                commits.decisions.add(0, sequences, sessions)
                try:
                    commits.put_first(first)
                except BaseException:
                    commits.decisions.forget()
                    raise
                return 0
            if not force:
                raise RefusedError(
                    f"the parameters were put by '{self.state.owner}' already; force=True replaces them (and ?force=1)",
                    409,
                )
            self.layout.check_whole({name: Spec.of(tensor) for name, tensor in first.tensors.items()})
            self.attendance.check_sound()
            commits.await_resumption()
            commits.commit(Applied("put", self.version + 1, first.tensors, {}, sequences, [], sessions=sessions))
            self.attendance.tell(f"'{worker}' replaced the parameters", worker)
            return self.version

    def changed_elsewhere(self, worker: str, names: Iterable[str]) -> int:
        """Count a change that a client made directly in shared memory (`lock=False`)."""
        with self.attendance.changed:
            self.attendance.see(worker)
            layout, workers = self.layout, self.attendance.workers
            if self.options.lock or layout is None:
                raise RefusedError("only a server with lock=False lets clients change parameters by themselves", 409)
            changed = {name: layout.find(name) for name in names}
            self.state.version += 1
            self.state.versions.update(dict.fromkeys(changed, self.version))
            last = workers.acknowledged.get(worker)
            workers.acknowledge(worker, last.sequence if last else 0, self.version, [])
            self.commits.note_version()
            return self.version

    def pause(self, on: bool) -> int:
        """Apply nothing for a moment, or go on; see `Commits.pause`. Returns the version."""
        with self.attendance.changed:
            self.commits.pause(on)
            return self.version

    def decided_since(self, version: int) -> tuple[int, list[Decided], list[str]]:
        """The version; what was decided after the given one; and who is registered now."""
        with self.attendance.changed:
            return self.version, self.commits.decisions.since(version), list(self.attendance.workers.registered)

    # ---- workers ----

    def register(self, worker: str, session: str = "") -> Acknowledged | None:
        """Register a worker, or note that it is alive; returns the last update under its name."""
        with self.attendance.changed:
            self.attendance.expire()
            self.way.begin(worker, session)
            self.attendance.register(worker)
            return self.attendance.workers.acknowledged.get(worker)

    def leave(self, worker: str) -> None:
        """Unregister a worker: nobody waits for it any more."""
        with self.attendance.changed:
            self.attendance.leave(worker)

    # ---- for those around it ----

    def status(self) -> dict[str, Any]:
        """Everything that people may want to see, as JSON."""
        attendance = self.attendance
        with attendance.changed:
            attendance.expire()
            now = attendance.clock()
            registered = attendance.workers.registered.values()
            return {
                **status.of_parameters(self.state, self.options),
                "workers": status.of_workers(registered, self.version, now, self.way.contributors()),
                "departed": status.of_departed(attendance.departed, now),
                "dropped": attendance.num_dropped,
                "history": [[round(at - now, 3), version] for at, version in self.commits.history],
                "events": [[round(at - now, 3), text] for at, text in attendance.events],
                "broken": attendance.broken,
            }

    @property
    def looks_once(self) -> bool:
        """Whether the contents of an update are neither checked nor written down before it is made."""
        return self.commits.journal is None and not self.options.reject_nonfinite

    @property
    def keeps_no_update(self) -> bool:
        """Whether nothing of an update is kept once it has been made."""
        return self.options.staleness != 0 and not self.place.follows and self.state.keeps_no_gradient

    def tensors(self) -> Mapping[str, Tensor]:
        """The current values. Only while nobody updates."""
        return self.state.tensors()

    def exclusively(self) -> threading.Condition:
        """The lock, for what must see the whole state at one moment."""
        return self.attendance.changed

    def close(self) -> None:
        """Give the parameters ordinary memory, and release the images."""
        with self.attendance.changed:
            self.state.close()
