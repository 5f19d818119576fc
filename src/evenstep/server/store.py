"""The state of a parameter server and its verbs, without any transport.

The parameters have a version: how many updates they have had. Every parameter has the version at which it changed last.
All verbs may be called from any thread. A verb that has to wait takes `wait_s` and says so when that is over; nobody
waits inside while holding the lock.

What `staleness` means:

- 0: synchronous. An update is made of one contribution of every registered worker (at least `workers`), or of tree
  nodes for all shards of a run; it is applied when all are there.
- s: a worker's update is applied at once, but refused while it would bring the worker more than s ahead of the slowest.
- None: applied at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.server.images import Image, Images
from evenstep.server.rounds import Contribution, Round, Tensors
from evenstep.server.stepping import Stepper
from evenstep.server.wire import Layout, Spec
from evenstep.server.workers import Acknowledged, Workers

__all__ = ["Applied", "Journal", "Options", "Pending", "Store", "View"]

KINDS = ("gradient", "delta")
log = logging.getLogger("evenstep.server")
_HISTORY = 512
_HISTORY_S = 1.0
_DEPARTED = 16
_READERS_S = 1.0
_DRAIN_S = 0.2
_LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Options:
    """How a store behaves.

    Attributes:
        staleness: 0, s or None; see the module.
        lock: False: clients in shared memory change the parameters themselves, without asking.
        workers: How many workers there must be at least before a synchronous update is complete.
        lease_s: After how long without a sign of life a worker is dropped.
        reject_nonfinite: Refuse gradients and deltas that hold an infinity or NaN.
    """

    staleness: int | None = 0
    lock: bool = True
    workers: int = 1
    lease_s: float = 30.0
    reject_nonfinite: bool = False

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A value makes no sense.
        """
        if self.staleness is not None and (not isinstance(self.staleness, int) or self.staleness < 0):
            raise ConfigError(f"staleness={self.staleness!r}, expected 0, a number of updates, or None")
        if not self.lock and self.staleness is not None:
            raise ConfigError("lock=False lets everyone change the parameters at any time; it needs staleness=None")
        if not isinstance(self.workers, int) or self.workers < 1:
            raise ConfigError(f"workers={self.workers!r}, expected a whole number above 0")
        if not self.lease_s > 0:
            raise ConfigError(f"lease_s={self.lease_s!r}, expected a number of seconds above 0")


@dataclass(frozen=True)
class Applied:
    """An update that changed the parameters, as a journal keeps it.

    Attributes:
        kind: "gradient" or "delta".
        version: The version it made.
        tensors: What the optimizer was given, or what was subtracted.
        buffers: New values of what the optimizer does not train.
        sequences: Whose updates these were.
        notes: What the contributors had to say.
    """

    kind: str
    version: int
    tensors: Tensors
    buffers: Tensors
    sequences: Mapping[str, int]
    notes: list[Any]


class Journal(Protocol):
    """Where updates are written down before they count."""

    def append(self, applied: Applied) -> None:
        """Write one down so that it survives the process."""


@dataclass(frozen=True)
class Pending:
    """An update that was taken in but waits for other workers."""

    version: int


class View:
    """Parameters of one version, which nobody changes until it is closed. A context manager.

    Attributes:
        version: That of the parameters as a whole.
        versions: That of each.
        tensors: The parameters that were asked for.
        image: Where they lie.
    """

    def __init__(self, store: "Store", image: Image, tensors: Tensors, versions: dict[str, int], version: int) -> None:
        self._store, self.image = store, image
        self.tensors, self.versions, self.version = tensors, versions, version
        self._open = True

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The reader has done."""
        if self._open:
            self._open = False
            self._store._release(self.image)


class Store:
    """Parameters, optimizer, versions and workers.

    Args:
        options: How it behaves.
        optimizer: Makes the optimizer from the parameters when they are put. None: only deltas can be applied.
        clock: Seconds, for leases and the history.
    """

    def __init__(
        self,
        options: Options,
        optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._make_optimizer = optimizer
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._images: Images | None = None
        self.layout: Layout | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: Optimizer | None = None
        self._stepper: Stepper | None = None
        self.buffers: frozenset[str] = frozenset()
        self.version = 0
        self.versions: dict[str, int] = {}
        self.owner: str | None = None
        self.workers = Workers(options.lease_s)
        self.journal: Journal | None = None
        self.after_put: Callable[[], None] = lambda: None
        self.after_update: Callable[[], None] = lambda: None
        self._round = Round()
        self._sequences: dict[str, int] = {}  # of the contributions to the round
        self._form: object = None
        self._writing = 0
        self._bound: Image | None = None
        self._broken: str | None = None
        self._hurried = False
        self.history: deque[tuple[float, int]] = deque(maxlen=_HISTORY)
        self.events: deque[tuple[float, str]] = deque(maxlen=_HISTORY)
        self.departed: dict[str, tuple[float, str]] = {}  # when each was seen last, and how it went
        self.num_dropped = 0

    # ---- put and get ----

    def put(
        self,
        tensors: Tensors,
        worker: str,
        *,
        force: bool = False,
        parameters: Mapping[str, nn.Parameter] | None = None,
        buffers: Iterable[str] = (),
    ) -> int:
        """Give the parameters their values. The first to do so is their owner.

        Args:
            tensors: All of them.
            worker: Who puts.
            force: Replace values that are there.
            parameters: The objects that an optimizer knows already; their memory becomes the store's.
            buffers: Which of the tensors the optimizer does not train.

        Returns:
            The version: 0, or if values were replaced one more than before.

        Raises:
            RefusedError: They have values already, or the replacement is of other names, shapes or dtypes.
        """
        with self._changed:
            if self.layout is None:
                return self._initialise(tensors, worker, dict(parameters or {}), frozenset(buffers))
            if not force:
                raise RefusedError(
                    f"the parameters were put by '{self.owner}' already; force=True replaces them (and ?force=1)", 409
                )
            self.layout.check_whole({name: Spec.of(tensor) for name, tensor in tensors.items()})
            self._check_sound()
            applied = Applied("put", self.version + 1, tensors, {}, {}, [])
            self._commit(applied)
            self._tell(f"'{worker}' replaced the parameters", worker)
            return self.version

    def _initialise(
        self, tensors: Tensors, worker: str, given: dict[str, nn.Parameter], buffers: frozenset[str]
    ) -> int:
        if not tensors:
            raise RefusedError("put without any parameter; expected at least one")
        specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
        images = Images(specs)
        for name, tensor in tensors.items():
            images.current.tensors[name].copy_(tensor.detach())
        trained = {
            name: given.get(
                name, nn.Parameter(images.current.tensors[name], requires_grad=spec.dtype.is_floating_point)
            )
            for name, spec in specs.items()
            if name not in buffers
        }
        for name, parameter in trained.items():
            parameter.data = images.current.tensors[name]
        if self._make_optimizer is not None:
            self.optimizer = self._make_optimizer([p for p in trained.values() if p.requires_grad])
            self._stepper = Stepper(self.optimizer)
        self._images, self.layout, self.parameters, self.buffers = images, Layout(specs), trained, buffers
        self.versions = dict.fromkeys(specs, 0)
        self.owner = worker
        self.history.append((self._clock(), 0))
        self._tell(f"'{worker}' put {len(specs)} parameters, {self.layout.num_bytes} bytes", worker)
        self.after_put()
        self._changed.notify_all()
        return self.version

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
            assert self._images is not None, "it is there with the layout"
            if names is None and since is None:
                image = self._images.hold()
                return View(self, image, image.tensors, dict(self.versions), self.version)
            wanted = list(self.layout.specs) if names is None else list(dict.fromkeys(names))
            for name in wanted:
                self.layout.find(name)
            if since is not None:
                wanted = [name for name in wanted if self.versions[name] > since]
            image = self._images.hold()
            tensors = {name: image.tensors[name] for name in wanted}
            return View(self, image, tensors, {name: self.versions[name] for name in wanted}, self.version)

    def _release(self, image: Image) -> None:
        with self._changed:
            if self._images is not None:
                self._images.release(image)
                if not image.readers:
                    self._changed.notify_all()

    # ---- update ----

    def update(
        self, worker: str, sequence: int, kind: str, part: Contribution, *, base: int | None = None, wait_s: float = 0.0
    ) -> Acknowledged | Pending:
        """Apply a worker's update once, however often it is sent.

        Args:
            worker: Who; must be registered.
            sequence: Grows with every update of this worker; a retry has the same.
            kind: "gradient", for the optimizer; or "delta", to be subtracted.
            part: What. The tensors were checked against the layout; their memory is the store's from now on.
            base: Which version it was computed from, if the worker says so.
            wait_s: How long to wait for the other workers of a synchronous update.

        Raises:
            RefusedError: It cannot be applied; nothing has changed.
        """
        with self._changed:
            self._await_readers()
            self._expire()
            repeated = self._repeated(worker, sequence)
            if repeated is None:
                self._check_update(worker, kind, part, base)
                self._take(worker, sequence, kind, part)
            return self._settle(worker, sequence, wait_s)

    def _await_readers(self) -> None:
        """Rather wait for readers than copy large parameters, or take memory for one more copy; but not for long."""
        images = self._images
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

    def _check_update(self, worker: str, kind: str, part: Contribution, base: int | None) -> None:
        self._check_sound()
        self.workers.see(worker, self._clock())
        if self.layout is None:
            raise RefusedError("nothing was put yet, so there is nothing to update", 409)
        if kind not in KINDS:
            raise RefusedError(f"an update of kind {kind[:40]!r}, expected one of {', '.join(KINDS)}")
        if kind == "gradient" and self.optimizer is None:
            raise RefusedError('this server has no optimizer; send deltas (kind="delta")', 409)
        if part.form is None or part.form is not self._form:  # the like of the last one need not be looked at again
            self._check_names(part)
            self._form = part.form
        if self.options.reject_nonfinite:
            self._check_finite(part)
        self._check_turn(worker, kind, part, base)

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

    def _check_names(self, part: Contribution) -> None:
        """What is trained can have a gradient, the rest a new value, each of its own dtype and shape."""
        assert self.layout is not None, "the caller has looked"
        groups = [(part.tensors, False), (part.buffers, True), *((held, False) for _, held in part.nodes)]
        for tensors, buffers in groups:
            for name, tensor in tensors.items():
                self.layout.check(name, Spec.of(tensor))
                if (name in self.buffers) != buffers:
                    raise RefusedError(f"'{name}' is {'no' if buffers else 'a'} buffer")
                if not buffers and not self.parameters[name].requires_grad:
                    raise RefusedError(f"'{name}' is not trained, so it takes no update")

    def _check_finite(self, part: Contribution) -> None:
        for tensors in (part.tensors, part.buffers, *(held for _, held in part.nodes)):
            for name, tensor in tensors.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise RefusedError(f"the update of '{name}' holds a number that is not finite", 422)

    def _take(self, worker: str, sequence: int, kind: str, part: Contribution) -> None:
        if self.options.staleness == 0:
            self._round.add(worker, kind, part)
            self._sequences[worker] = sequence
            self._complete()
        else:
            notes = [part.note]
            self._commit(Applied(kind, self.version + 1, part.tensors, part.buffers, {worker: sequence}, notes))

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
        round_, sequences = self._round, self._sequences
        self._round, self._sequences = Round(), {}
        kind = round_.kind or "gradient"
        total, buffers = round_.total(), round_.buffers()
        self._commit(Applied(kind, self.version + 1, total, buffers, sequences, round_.notes()))

    def _settle(self, worker: str, sequence: int, wait_s: float) -> Acknowledged | Pending:
        """Wait until an update that was taken in counts."""

        def done() -> bool:
            last = self.workers.acknowledged.get(worker)
            return last is not None and last.sequence >= sequence

        if not self._wait(done, wait_s, worker):
            return Pending(self.version)
        return self.workers.acknowledged[worker]

    def _commit(self, applied: Applied) -> None:
        """Write an update down, then make it count."""
        if self.journal is not None:
            try:
                self.journal.append(applied)
            except OSError as error:
                self._broken = f"the log cannot be written: {error.strerror}"
                self._changed.notify_all()
                raise ServerError(self._broken) from error
        self.apply(applied)
        self.after_update()

    def apply(self, applied: Applied) -> None:
        """Change the parameters. For the store itself, and for what reads a log back before anybody is served."""
        assert self._images is not None, "there is something to update"
        try:
            self._bind(self._images.writable() if self.options.lock else self._images.current)
            with torch.no_grad():
                self._change(applied)
        except Exception as error:
            self._broken = f"the optimizer failed at version {self.version}: {error}"
            self._changed.notify_all()
            raise ServerError(self._broken) from error
        self.version = applied.version
        self.versions.update(dict.fromkeys([*applied.tensors, *applied.buffers], self.version))
        for worker, sequence in applied.sequences.items():
            self.workers.acknowledge(worker, sequence, self.version, applied.notes)
        self._note_version()
        self._changed.notify_all()

    def _bind(self, image: Image) -> None:
        if image is self._bound:
            return
        for name, parameter in self.parameters.items():
            parameter.data = image.tensors[name]
        self._bound = image

    def _change(self, applied: Applied) -> None:
        assert self._images is not None, "the caller has looked"
        values = self._images.current.tensors
        for name, value in applied.buffers.items():
            values[name].copy_(value)
        if applied.kind == "put":
            for name, value in applied.tensors.items():
                values[name].copy_(value)
        elif applied.kind == "delta":
            for name, delta in applied.tensors.items():
                values[name].sub_(delta)
        else:
            assert self._stepper is not None, "it was checked"
            for name, gradient in applied.tensors.items():
                self.parameters[name].grad = gradient
            try:
                self._stepper.step()
            finally:
                for name in applied.tensors:
                    self.parameters[name].grad = None

    def changed_elsewhere(self, worker: str, names: Iterable[str]) -> int:
        """A client in shared memory has changed parameters by itself (`lock=False`): count it."""
        with self._changed:
            self.workers.see(worker, self._clock())
            if self.options.lock or self.layout is None:
                raise RefusedError("only a server with lock=False lets clients change parameters by themselves", 409)
            self.version += 1
            for name in names:
                self.layout.find(name)
                self.versions[name] = self.version
            last = self.workers.acknowledged.get(worker)
            self.workers.acknowledge(worker, last.sequence if last else 0, self.version, [])
            self._note_version()
            self._changed.notify_all()
            return self.version

    # ---- workers ----

    def register(self, worker: str) -> None:
        """A worker begins, or shows that it lives."""
        with self._changed:
            self._expire()
            if self.workers.register(worker, self._clock()):
                self.departed.pop(worker, None)
                self._tell(f"worker '{worker}' registered", worker)
                self._changed.notify_all()

    def leave(self, worker: str) -> None:
        """A worker goes: nobody waits for it any more."""
        with self._changed:
            if self.workers.leave(worker):
                self._depart(worker, self._clock(), "left")
                self._tell(f"worker '{worker}' left", worker)
                self._gone()

    def _expire(self) -> None:
        gone = self.workers.expire(self._clock())
        for name, seen_s in gone.items():
            self.num_dropped += 1
            self._depart(name, seen_s, "dropped")
            self._tell(f"worker '{name}' was dropped: no sign of life for {self.options.lease_s:g} s", name)
        if gone:
            self._gone()

    def _depart(self, worker: str, seen_s: float, how: str) -> None:
        self.departed[worker] = (seen_s, how)
        while len(self.departed) > _DEPARTED:
            del self.departed[next(iter(self.departed))]

    def _gone(self) -> None:
        self._complete()
        self._changed.notify_all()

    # ---- waiting and telling ----

    def _wait(self, condition: Callable[[], bool], wait_s: float, worker: str | None = None) -> bool:
        """Wait for a condition; leases end meanwhile. The lock is not held while waiting.

        Args:
            condition: For what.
            wait_s: How long.
            worker: Who waits, and therefore lives.
        """
        deadline = time.monotonic() + wait_s
        waiting = self.workers.registered.get(worker or "")
        if waiting is not None:
            waiting.waiting += 1
        try:
            while not condition():
                self._check_sound()
                left = deadline - time.monotonic()
                if left <= 0 or self._hurried:
                    return False
                self._changed.wait(min(left, self.workers.next_end_s(self._clock()) + 0.01))
                self._expire()
            return True
        finally:
            if waiting is not None:
                waiting.waiting -= 1
                waiting.seen_s = self._clock()

    def hurry(self, hurried: bool) -> None:
        """Whether every wait is over at once: the server stops, and its clients will ask again."""
        with self._changed:
            self._hurried = hurried
            self._changed.notify_all()

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise ServerError(f"the server cannot go on: {self._broken}")

    def _note_version(self) -> None:
        """For the history: one entry a second is enough, so that it reaches far back however fast updates come."""
        now = self._clock()
        if len(self.history) > 1 and now - self.history[-2][0] < _HISTORY_S:
            self.history.pop()
        self.history.append((now, self.version))

    def _tell(self, text: str, worker: str) -> None:
        self.events.append((self._clock(), text))
        log.info("%s", text, extra={"version": self.version, "worker": worker})

    def status(self) -> dict[str, Any]:
        """Everything that people may want to see, as JSON."""
        with self._changed:
            self._expire()
            now = self._clock()
            specs = self.layout.specs if self.layout is not None else {}
            return {
                "version": self.version,
                "staleness": self.options.staleness,
                "lock": self.options.lock,
                "owner": self.owner,
                "optimizer": type(self.optimizer).__name__ if self.optimizer is not None else None,
                "num_bytes": self.layout.num_bytes if self.layout is not None else 0,
                "copies": self._images.count if self._images is not None else 0,
                "parameters": {
                    name: {
                        "dtype": str(spec.dtype).removeprefix("torch."),
                        "shape": list(spec.shape),
                        "version": self.versions[name],
                        "buffer": name in self.buffers,
                    }
                    for name, spec in specs.items()
                },
                "workers": [
                    {
                        "name": worker.name,
                        "updates": worker.updates,
                        "lag": self.version - worker.base_version,
                        "last_seen_s": round(now - worker.seen_s, 3),
                        "in_this_update": worker.name in self._sequences,
                    }
                    for worker in self.workers.registered.values()
                ],
                "departed": [
                    {"name": name, "how": how, "last_seen_s": round(now - seen_s, 3)}
                    for name, (seen_s, how) in self.departed.items()
                ],
                "dropped": self.num_dropped,
                "history": [[round(at - now, 3), version] for at, version in self.history],
                "events": [[round(at - now, 3), text] for at, text in self.events],
                "broken": self._broken,
            }

    @property
    def keeps_no_update(self) -> bool:
        """Whether nothing of an update is held when it has been made: torch's own optimizers keep no gradient."""
        return self.options.staleness != 0 and (self._stepper is None or self._stepper.is_torchs)

    def tensors(self) -> dict[str, Tensor]:
        """The current values. Only while nobody updates."""
        return dict(self._images.current.tensors) if self._images is not None else {}

    def exclusively(self) -> threading.Condition:
        """The lock, for what must see the whole state at one moment."""
        return self._changed

    def close(self) -> None:
        """Give the parameters ordinary memory, and let go of the images."""
        with self._changed:
            if self._images is not None:
                for parameter in self.parameters.values():
                    parameter.data = parameter.data.clone()
                self._images.close()
                self._images = self._bound = None
