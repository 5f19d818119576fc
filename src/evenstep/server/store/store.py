"""A parameter server's verbs, without any transport.

The parameters have a version: how many updates they have had. Every parameter has the version at which it changed last.
All verbs may be called from any thread. A verb that has to wait takes `wait_s` and says so when that is over; nobody
waits inside while holding the lock.

What `staleness` means:

- 0: synchronous. An update is made of one contribution of every registered worker (at least `workers`), or of tree
  nodes for all shards of a run; it is applied when all are there.
- s: a worker's update is applied at once, but refused while it would bring the worker more than s ahead of the slowest.
- None: applied at once.

Of several servers (`slices.py`) the first decides what is applied in which order; `follower.py` is the others.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import CheckpointError, RefusedError, ServerError
from evenstep.server.store import status
from evenstep.server.store.attendance import HISTORY, Attended
from evenstep.server.store.checks import check_contribution
from evenstep.server.store.decisions import Decided, Decisions
from evenstep.server.store.images import Image, View
from evenstep.server.store.optimizers import MakeOptimizer
from evenstep.server.store.options import Options
from evenstep.server.store.rounds import Contribution, Round, Tensors
from evenstep.server.store.state import Applied, State
from evenstep.server.store.workers import Acknowledged
from evenstep.server.wire.recipes import Recipe
from evenstep.server.wire.slices import Place, Slices
from evenstep.server.wire.tensors import Layout, Spec

__all__ = ["Applied", "Journal", "Options", "Pending", "Store", "View"]

_READERS_S = 1.0
_DRAIN_S = 0.2
_LARGE_BYTES = 4 << 20
_HISTORY_S = 1.0
_PAUSE_S = 1.0


@dataclass(frozen=True)
class Pending:
    """An update that was taken in but waits for other workers."""

    version: int


class Journal(Protocol):
    """Where updates are written down before they count.

    What raises OSError or CheckpointError has written nothing.
    """

    def append(self, applied: Applied) -> None:
        """Write one down so that it survives the process."""

    def retract(self) -> None:
        """What was written down last does not count."""


@dataclass(frozen=True)
class _Failed:
    """Why an update that was taken in did not come about."""

    sequence: int
    error: RefusedError


class Store(Attended):
    """Parameters, optimizer, versions and workers.

    Args:
        options: How it behaves.
        optimizer: Makes the optimizer from the parameters when they are put. None: only deltas can be applied.
        clock: Seconds, for leases and the history.
        place: Which of several servers this is.

    Attributes:
        slices: How the parameters lie over the servers, if there are several and they were put.
        decisions: What made the last versions, for the servers that follow this one.
    """

    def __init__(
        self,
        options: Options,
        optimizer: MakeOptimizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        place: Place = Place(),  # noqa: B008  # a frozen value
    ) -> None:
        super().__init__(options.lease_s, clock)
        self.options, self.place = options, place
        self.state = State(optimizer)
        self.slices: Slices | None = None
        self.journal: Journal | None = None
        self.after_put: Callable[[], None] = lambda: None
        self.after_update: Callable[[], None] = lambda: None
        self.flush: Callable[[float], bool] = lambda _: True
        self.takes_recipes = True
        self._round = Round()
        self._sequences: dict[str, int] = {}  # of the contributions to the round
        self._sessions: dict[str, str] = {}  # who sent them
        self._failed: dict[str, _Failed] = {}  # the last one of each worker
        self._unwritable = False
        self._form: object = None  # of the last contribution that was looked at
        self._writing = 0
        self._paused_until = 0.0
        self.decisions = Decisions()
        self.history: deque[tuple[float, int]] = deque(maxlen=HISTORY)

    @property
    def layout(self) -> Layout | None:
        """What the parameters are; None until they are put."""
        return self.state.layout

    @property
    def version(self) -> int:
        """How many updates there were."""
        return self.state.version

    @property
    def owner(self) -> str | None:
        """Who put the parameters."""
        return self.state.owner

    @property
    def optimizer(self) -> Optimizer | None:
        """What steps on gradients."""
        return self.state.optimizer

    # ---- put and get ----

    def put(
        self,
        tensors: Tensors,
        worker: str,
        *,
        force: bool = False,
        parameters: Mapping[str, nn.Parameter] | None = None,
        buffers: Iterable[str] = (),
        slices: Slices | None = None,
        sequence: int = 0,
        session: str = "",
        recipe: Recipe | None = None,
    ) -> int:
        """Give the parameters their values. The first to do so is their owner.

        Args:
            tensors: All of them.
            worker: Who puts.
            force: Replace values that are there.
            parameters: The objects that an optimizer knows already; their memory becomes the store's.
            buffers: Which of the tensors the optimizer does not train.
            slices: How all parameters lie over the servers, if there are several.
            sequence: The number that the other servers know this by.
            session: Likewise.
            recipe: Which optimizer shall update them, if the store was made without one.

        Returns:
            The version: 0, or if values were replaced one more than before.

        Raises:
            RefusedError: They have values already, or the replacement is of other names, shapes or dtypes.
        """
        with self._changed:
            sequences, sessions = ({worker: sequence}, {worker: session}) if sequence else ({}, {})
            if (done := self.decisions.made_by(worker, sequence)) is not None:
                return done
            if self.layout is None:
                if recipe is not None and (self.state.make_optimizer is not None or not self.takes_recipes):
                    raise RefusedError("this server has an optimizer, or keeps snapshots: it takes no recipe", 409)
                self._initialise(tensors, worker, dict(parameters or {}), buffers, slices, recipe)
                self.decisions.add(0, sequences, sessions)
                self._keep_first()
                return 0
            if not force:
                raise RefusedError(
                    f"the parameters were put by '{self.owner}' already; force=True replaces them (and ?force=1)", 409
                )
            self.layout.check_whole({name: Spec.of(tensor) for name, tensor in tensors.items()})
            self._check_sound()
            self._await_resumption()
            self._commit(Applied("put", self.version + 1, tensors, {}, sequences, [], sessions=sessions))
            self._tell(f"'{worker}' replaced the parameters", worker)
            return self.version

    def _initialise(
        self,
        tensors: Tensors,
        worker: str,
        given: Mapping[str, nn.Parameter],
        buffers: Iterable[str],
        slices: Slices | None,
        recipe: Recipe | None = None,
    ) -> None:
        if not tensors and slices is None:
            raise RefusedError("put without any parameter; expected at least one")
        self.state.initialise(tensors, worker, given, buffers, recipe)
        self.slices = slices
        self.history.append((self._clock(), 0))
        assert self.layout is not None, "it was just made"
        self._tell(f"'{worker}' put {len(self.layout.specs)} parameters, {self.layout.num_bytes} bytes", worker)
        self._changed.notify_all()

    def _keep_first(self) -> None:
        """Have the first values written down; if they cannot be, nothing was put."""
        try:
            self.after_put()
        except CheckpointError as error:
            self.state.forget()
            self.slices = None
            self.decisions.forget()
            raise RefusedError(f"{error}; nothing was put, try again", 503) from error

    def get(
        self, names: Iterable[str] | None = None, *, min_version: int = 0, since: int | None = None, wait_s: float = 0.0
    ) -> View | None:
        """Parameters of one version; waits until they were put and have at least a version.

        Args:
            names: Which ones; None for all.
            min_version: At least this version.
            since: Only what changed after this version.
            wait_s: How long to wait.

        Returns:
            A view that the caller closes; None if it does not exist yet.

        Raises:
            RefusedError: There is no such parameter.
        """
        with self._changed:
            if not self._wait(lambda: self.layout is not None and self.version >= min_version, wait_s):
                return None
            if self._writing:
                self._changed.wait_for(lambda: not self._writing, _DRAIN_S)
            assert self.layout is not None, "we waited for it"
            assert self.state.images is not None, "it is there with the layout"
            if names is None and since is None:
                image = self.state.images.hold()
                return View(self._release, image, image.tensors, dict(self.state.versions), self.version)
            wanted = list(self.layout.specs) if names is None else list(dict.fromkeys(names))
            for name in wanted:
                self.layout.find(name)
            versions = self.state.versions
            if since is not None:
                wanted = [name for name in wanted if versions[name] > since]
            image = self.state.images.hold()
            tensors = {name: image.tensors[name] for name in wanted}
            return View(self._release, image, tensors, {name: versions[name] for name in wanted}, self.version)

    def _release(self, image: Image) -> None:
        with self._changed:
            if self.state.images is not None:
                self.state.images.release(image)
                if not image.readers:
                    self._changed.notify_all()

    # ---- update ----

    def update(
        self,
        worker: str,
        sequence: int,
        kind: str,
        part: Contribution,
        *,
        base: int | None = None,
        wait_s: float = 0.0,
        session: str = "",
    ) -> Acknowledged | Pending:
        """Apply a worker's update once, however often it is sent.

        Args:
            worker: Who; must be registered.
            sequence: Grows with every update of this worker; a retry has the same.
            kind: "gradient", for the optimizer; or "delta", to be subtracted.
            part: What. The tensors were checked against the layout; their memory is the store's from now on.
            base: Which version it was computed from, if the worker says so.
            wait_s: How long to wait for the other workers of a synchronous update.
            session: Which life of the worker this is.

        Raises:
            RefusedError: It cannot be applied; nothing has changed.
        """
        with self._changed:
            self._await_readers()
            self._await_resumption()
            self._expire()
            repeated = self._repeated(worker, sequence)
            if repeated is None:
                self._check_sound()
                self.workers.see(worker, self._clock())
                self._check_part(kind, part)
                self._check_turn(worker, kind, part, base)
                self._failed.pop(worker, None)
                self._take(worker, sequence, kind, part, session)
            return self._settle(worker, sequence, wait_s)

    def _check_part(self, kind: str, part: Contribution) -> None:
        alike = (
            part.form is not None and part.form is self._form
        )  # the like of the last one need not be looked at again
        check_contribution(self.state, kind, part, finite=self.options.reject_nonfinite, fits=alike)
        self._form = part.form

    def _await_readers(self) -> None:
        """Rather wait for readers than copy large parameters, or take memory for one more copy; but not for long."""
        images = self.state.images
        if images is None or self.layout is None:
            return
        if images.current.readers and self.layout.num_bytes >= _LARGE_BYTES:
            self._writing += 1  # who comes now waits too: or there would always be a reader
            try:
                self._changed.wait_for(lambda: not images.current.readers, _DRAIN_S)
            finally:
                self._writing -= 1
                self._changed.notify_all()
        self._changed.wait_for(images.has_room, _READERS_S)

    def wait(self, worker: str, sequence: int, wait_s: float = 0.0) -> Acknowledged | Pending:
        """Wait for an update that was taken in.

        Raises:
            RefusedError: There is none with this sequence number: send it again.
        """
        with self._changed:
            self._expire()
            if self._repeated(worker, sequence) is None:
                failed = self._failed.get(worker)
                if failed is not None and failed.sequence == sequence and failed.error.status != 503:
                    raise failed.error
                raise RefusedError(f"there is no update {sequence} of worker '{worker}' here; send it again", 404)
            return self._settle(worker, sequence, wait_s)

    def wait_turn(self, worker: str, wait_s: float = 0.0) -> bool:
        """Wait until a worker's next update would not bring it too far ahead of the slowest; False if not yet.

        Raises:
            RefusedError: It is not registered, or dropped meanwhile.
        """
        with self._changed:
            self._expire()
            self.workers.see(worker, self._clock())
            staleness = self.options.staleness
            if staleness is None or staleness == 0:
                return True
            return self._wait(lambda: not self.workers.is_ahead(worker, staleness), wait_s, worker)

    def _repeated(self, worker: str, sequence: int) -> Acknowledged | Pending | None:
        """What became of this update, if it was sent before."""
        last = self.workers.acknowledged.get(worker)
        if self._sequences.get(worker) == sequence:
            return Pending(self.version)
        if last is None or sequence > last.sequence:
            return None
        if sequence == last.sequence:
            return last
        raise RefusedError(
            f"worker '{worker}' sends update {sequence} after {last.sequence}; sequence numbers only grow", 409
        )

    def _check_turn(self, worker: str, kind: str, part: Contribution, base: int | None) -> None:
        staleness = self.options.staleness
        if staleness == 0:
            if base is not None and base != self.version:
                raise RefusedError(
                    f"worker '{worker}' sends an update of version {base} but the parameters are at {self.version}", 409
                )
            if worker in self._sequences:
                raise RefusedError(f"worker '{worker}' is in this update already, with {self._sequences[worker]}", 409)
            self._round.check(worker, kind, part)
        elif part.num_shards is not None:
            raise RefusedError("tree nodes are for synchronous updates (staleness=0); send a mean", 409)
        elif staleness is not None and self.workers.is_ahead(worker, staleness):
            raise RefusedError(
                f"worker '{worker}' would be more than {staleness} ahead of the slowest; wait for your turn first", 409
            )

    def _take(self, worker: str, sequence: int, kind: str, part: Contribution, session: str) -> None:
        if self.options.staleness == 0:
            self._round.add(worker, kind, part)
            self._sequences[worker], self._sessions[worker] = sequence, session
            self._complete()
        else:
            version, sequences, sessions = self.version + 1, {worker: sequence}, {worker: session}
            self._commit(
                Applied(
                    kind, version, part.tensors, part.buffers, sequences, [part.note], part.options, sessions=sessions
                )
            )

    def _complete(self) -> None:
        """Apply the synchronous update if all are there."""
        if not self._round.parts:
            return
        covered = self._round.covers_all_shards()
        if covered is None:
            everyone = self.workers.registered.keys() <= self._round.parts.keys()
            covered = everyone and len(self._round.parts) >= self.options.workers
        if not covered:
            return
        round_, sequences, sessions = self._round, self._sequences, self._sessions
        self._round, self._sequences, self._sessions = Round(), {}, {}
        kind = round_.kind or "gradient"
        total, buffers = round_.total(), round_.buffers()
        notes, options = round_.notes(), round_.options()
        try:
            self._commit(Applied(kind, self.version + 1, total, buffers, sequences, notes, options, sessions=sessions))
        except RefusedError as error:  # whoever took part hears of it, not whoever came by
            self._failed |= {worker: _Failed(sequence, error) for worker, sequence in sequences.items()}
            self._changed.notify_all()

    def _settle(self, worker: str, sequence: int, wait_s: float) -> Acknowledged | Pending:
        """Wait until an update that was taken in counts."""

        def failed() -> bool:
            return worker in self._failed and self._failed[worker].sequence == sequence

        def done() -> bool:
            last = self.workers.acknowledged.get(worker)
            return (last is not None and last.sequence >= sequence) or failed()

        if not self._wait(done, wait_s, worker):
            return Pending(self.version)
        if failed():
            raise self._failed[worker].error
        return self.workers.acknowledged[worker]

    def _commit(self, applied: Applied, write: Callable[[Any], None] | None = None) -> None:
        """Write an update down and make it count: both, or neither.

        Args:
            applied: The update.
            write: What to tell the journal; None: the update itself.

        Raises:
            RefusedError: It cannot be applied (422), or not be written down now (503); nothing has changed.
        """
        write = write or (lambda journal: journal.append(applied))
        if self.state.is_proven(applied):
            self._write_down(write)
            self._change(applied)
        else:
            self._prove(applied, write)
        self._count(applied)
        self.after_update()

    def _change(self, applied: Applied) -> None:
        """Change the parameters by an update the like of which there was; if it fails all the same, that is the end."""
        try:
            self.state.apply(applied, locked=self.options.lock)
        except Exception as error:
            self._broken = f"the optimizer failed at version {self.version}: {error}"
            if self.journal is not None:
                self.journal.retract()
                self._broken += "; start it again: it goes on from its directory, without this update"
            self._changed.notify_all()
            raise ServerError(self._broken) from error

    def _prove(self, applied: Applied, write: Callable[[Any], None]) -> None:
        """Change the parameters by an update that is the first of its kind; write it down when it has worked."""
        before = self.state.before(applied)
        try:
            self.state.apply(applied, locked=self.options.lock)
        except Exception as error:
            before.restore()
            raise RefusedError(f"the optimizer cannot make this update: {error}", 422) from error
        try:
            self._write_down(write)
        except BaseException:
            before.restore()
            raise

    def _write_down(self, write: Callable[[Any], None]) -> None:
        """Tell the journal something.

        Raises:
            RefusedError: It cannot be written now; it will be possible again by itself.
        """
        if self.journal is None:
            return
        try:
            write(self.journal)
        except (OSError, CheckpointError) as error:
            why = f"the log cannot be written ({error})"
            if not self._unwritable:
                self._unwritable = True
                self._tell(f"{why}: updates are refused until it can")
            raise RefusedError(f"{why}, so the update was not applied; try again", 503) from error
        if self._unwritable:
            self._unwritable = False
            self._tell("the log can be written again")

    def replay(self, applied: Applied) -> None:
        """Apply what was written down, before anybody is served."""
        self.state.apply(applied, locked=self.options.lock)
        self._count(applied)

    def _count(self, applied: Applied) -> None:
        """An update was made."""
        for worker, sequence in applied.sequences.items():
            self.workers.acknowledge(worker, sequence, self.version, applied.notes, counts=applied.kind != "put")
        self.decisions.add(self.version, applied.sequences, applied.sessions)
        self._note_version()
        self._changed.notify_all()

    def changed_elsewhere(self, worker: str, names: Iterable[str]) -> int:
        """A client in shared memory has changed parameters by itself (`lock=False`): count it."""
        with self._changed:
            self.workers.see(worker, self._clock())
            if self.options.lock or self.layout is None:
                raise RefusedError("only a server with lock=False lets clients change parameters by themselves", 409)
            self.state.version += 1
            for name in names:
                self.layout.find(name)
                self.state.versions[name] = self.version
            last = self.workers.acknowledged.get(worker)
            self.workers.acknowledge(worker, last.sequence if last else 0, self.version, [])
            self._note_version()
            self._changed.notify_all()
            return self.version

    # ---- for the servers that follow, and for those who read from all ----

    def decided_since(self, version: int) -> tuple[int, list[Decided], list[str]]:
        """The version; what was decided after another; and who is registered now."""
        with self._changed:
            return self.version, self.decisions.since(version), list(self.workers.registered)

    def pause(self, on: bool) -> int:
        """Apply nothing for a moment, so that somebody can read the same version from all servers; or go on.

        It ends by itself: nobody who reads slowly, or dies, holds up the others for long.
        """
        with self._changed:
            self._paused_until = time.monotonic() + _PAUSE_S if on else 0.0
            self._changed.notify_all()
            return self.version

    def _await_resumption(self) -> None:
        while (left := self._paused_until - time.monotonic()) > 0:
            self._changed.wait(left)

    # ---- workers ----

    def register(self, worker: str, session: str = "") -> None:
        """A worker begins, or shows that it lives. A new life of it takes back what the last one left unfinished."""
        with self._changed:
            self._expire()
            if session and self._sessions.get(worker, session) != session:
                self._round.parts.pop(worker, None)
                del self._sequences[worker], self._sessions[worker]
            if self.workers.register(worker, self._clock()):
                self.departed.pop(worker, None)
                self._tell(f"worker '{worker}' registered", worker)
                self._changed.notify_all()

    def leave(self, worker: str) -> None:
        """A worker goes: nobody waits for it any more."""
        with self._changed:
            self._failed.pop(worker, None)
            if self.workers.leave(worker):
                self._depart(worker, self._clock(), "left")
                self._tell(f"worker '{worker}' left", worker)
                self._gone()

    def _gone(self) -> None:
        self._complete()
        self._changed.notify_all()

    def status(self) -> dict[str, Any]:
        """Everything that people may want to see, as JSON."""
        with self._changed:
            self._expire()
            now = self._clock()
            return {
                **status.of_parameters(self.state, self.options),
                "workers": status.of_workers(self.workers.registered.values(), self.version, now, self._sequences),
                "departed": status.of_departed(self.departed, now),
                "dropped": self.num_dropped,
                "history": [[round(at - now, 3), version] for at, version in self.history],
                "events": [[round(at - now, 3), text] for at, text in self.events],
                "broken": self._broken,
            }

    def _note_version(self) -> None:
        """For the history: one entry a second is enough, so that it reaches far back however fast updates come."""
        now = self._clock()
        if len(self.history) > 1 and now - self.history[-2][0] < _HISTORY_S:
            self.history.pop()
        self.history.append((now, self.version))

    @property
    def looks_once(self) -> bool:
        """Whether what an update holds is neither checked nor written down before it is made."""
        return self.journal is None and not self.options.reject_nonfinite

    @property
    def keeps_no_update(self) -> bool:
        """Whether nothing of an update is held when it has been made."""
        return self.options.staleness != 0 and not self.place.follows and self.state.keeps_no_gradient

    def tensors(self) -> dict[str, Tensor]:
        """The current values. Only while nobody updates."""
        return self.state.tensors()

    def exclusively(self) -> threading.Condition:
        """The lock, for what must see the whole state at one moment."""
        return self._changed

    def close(self) -> None:
        """Give the parameters ordinary memory, and let go of the images."""
        with self._changed:
            self.state.close()
