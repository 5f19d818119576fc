"""Committing updates: written down and applied, or neither. The caller holds the lock.

The first update of a kind is applied before it is written down, with a copy of what it changes, so that the log holds
only what has been seen to work. All others are written down first.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from evenstep.core.errors import CheckpointError, RefusedError
from evenstep.server.store.attendance import HISTORY, Attendance
from evenstep.server.store.checks import check_contribution
from evenstep.server.store.decisions import Decisions
from evenstep.server.store.options import StoreOptions
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.state import Applied, ParameterState
from evenstep.server.wire.recipes import Recipe
from evenstep.server.wire.slices import Slices

__all__ = ["Commits", "First", "UpdateJournal"]

_HISTORY_S = 1.0
_PAUSE_S = 1.0


class UpdateJournal(Protocol):
    """Where updates are written down. A method that raises OSError or CheckpointError has written nothing."""

    def append(self, applied: Applied) -> None:
        """Write an update down so that it survives the process."""

    def retract(self) -> None:
        """Take back the last entry."""


@dataclass(frozen=True)
class First:
    """The first values of the parameters.

    Attributes:
        tensors: All of them.
        owner: Who puts them.
        buffers: Which of them the optimizer does not train.
        slices: How all parameters lie over the servers, if there are several.
        recipe: Which optimizer updates them, if the store was made without one.
        given: Parameter objects that an optimizer already knows; their memory becomes the store's.
    """

    tensors: Mapping[str, Tensor]
    owner: str
    buffers: Iterable[str] = ()
    slices: Slices | None = None
    recipe: Recipe | None = None
    given: Mapping[str, nn.Parameter] = field(default_factory=dict)


class Commits:
    """Commits updates.

    Args:
        options: How the store behaves.
        state: The parameters.
        attendance: The lock, and who is registered.

    Attributes:
        decisions: What made the last versions, for the servers that follow this one.
        slices: How the parameters lie over the servers, if there are several and they were put.
        journal: Where updates are written down, if anywhere.
        history: The times of versions.
        after_put: Called when the parameters have their first values.
        after_update: Called when there is a new version.
    """

    def __init__(self, options: StoreOptions, state: ParameterState, attendance: Attendance) -> None:
        self._options, self.state, self._attendance = options, state, attendance
        self.decisions = Decisions()
        self.slices: Slices | None = None
        self.journal: UpdateJournal | None = None
        self.after_put: Callable[[], None] = lambda: None
        self.after_update: Callable[[], None] = lambda: None
        self.history: deque[tuple[float, int]] = deque(maxlen=HISTORY)
        self._unwritable = False
        self._form: object = None  # the form of the last contribution that was checked
        self._paused_until = 0.0

    # ---- the first values ----

    def put_first(self, first: First) -> None:
        """Give the parameters their first values, and write them down.

        Raises:
            RefusedError: There are none, or they cannot be written down now; nothing was put.
        """
        self.initialise(first)
        try:
            self.after_put()
        except CheckpointError as error:
            self.state.forget()
            self.slices = None
            raise RefusedError(f"{error}; nothing was put, try again", 503) from error

    def initialise(self, first: First) -> None:
        """Give the parameters their first values."""
        if not first.tensors and first.slices is None:
            raise RefusedError("put without any parameter; expected at least one")
        self.state.initialise(first.tensors, first.owner, first.given, first.buffers, first.recipe)
        self.slices = first.slices
        self.history.append((self._attendance.clock(), 0))
        layout = self.state.layout
        assert layout is not None, "an initialised state has a layout"
        text = f"'{first.owner}' put {len(layout.specs)} parameters, {layout.num_bytes} bytes"
        self._attendance.tell(text, first.owner)
        self._attendance.changed.notify_all()

    # ---- updates ----

    def check(self, kind: str, part: Contribution) -> None:
        """Check that an update may be applied.

        Raises:
            RefusedError: It may not.
        """
        alike = part.form is not None and part.form is self._form  # one like the last need not be checked again
        check_contribution(self.state, kind, part, finite=self._options.reject_nonfinite, fits=alike)
        self._form = part.form

    def commit(self, applied: Applied, write: Callable[[Any], None] | None = None) -> None:
        """Write an update down and apply it: both, or neither.

        Args:
            applied: The update.
            write: Writes it to the journal; None: write the update itself.

        Raises:
            RefusedError: It cannot be applied (422), or not be written down now (503); nothing has changed.
            ServerError: It failed although one like it had worked: the store cannot go on.
        """
        write = write or (lambda journal: journal.append(applied))
        if self.state.is_proven(applied):
            self.write_down(write)
            self._apply(applied)
        else:
            self._prove(applied, write)
        self._count(applied)
        self.after_update()

    def _apply(self, applied: Applied) -> None:
        try:
            self.state.apply(applied, locked=self._options.lock)
        except Exception as error:
            why = f"the optimizer failed at version {self.state.version}: {error}"
            if self.journal is not None:
                self.journal.retract()
                why += "; start it again: it goes on from its directory, without this update"
            raise self._attendance.break_off(why) from error

    def _prove(self, applied: Applied, write: Callable[[Any], None]) -> None:
        """Apply the first update of a kind, and write it down once it has worked."""
        before = self.state.before(applied)
        try:
            self.state.apply(applied, locked=self._options.lock)
        except Exception as error:
            before.restore()
            raise RefusedError(f"the optimizer cannot make this update: {error}", 422) from error
        try:
            self.write_down(write)
        except BaseException:
            before.restore()
            raise

    def write_down(self, write: Callable[[Any], None]) -> None:
        """Have the journal write something.

        Raises:
            RefusedError: It cannot be written now; later attempts may succeed without a restart.
        """
        if self.journal is None:
            return
        try:
            write(self.journal)
        except (OSError, CheckpointError) as error:
            why = f"the log cannot be written ({error})"
            if not self._unwritable:
                self._unwritable = True
                self._attendance.tell(f"{why}: updates are refused until it can")
            raise RefusedError(f"{why}, so the update was not applied; try again", 503) from error
        if self._unwritable:
            self._unwritable = False
            self._attendance.tell("the log can be written again")

    def replay(self, applied: Applied) -> None:
        """Apply an entry of the journal, before anybody is served."""
        self.state.apply(applied, locked=self._options.lock)
        self._count(applied)

    def _count(self, applied: Applied) -> None:
        for worker, sequence in applied.sequences.items():
            self._attendance.workers.acknowledge(
                worker, sequence, applied.version, applied.notes, counts=applied.kind != "put"
            )
        self.decisions.add(applied.version, applied.sequences, applied.sessions)
        self.note_version()

    def note_version(self) -> None:
        """Record a new version in the history, at most one a second so that it reaches far back."""
        now = self._attendance.clock()
        if len(self.history) > 1 and now - self.history[-2][0] < _HISTORY_S:
            self.history.pop()
        self.history.append((now, self.state.version))
        self._attendance.changed.notify_all()

    # ---- a pause ----

    def pause(self, on: bool) -> None:
        """Apply nothing for a moment, so that a client can read the same version from all servers; or go on.

        It ends on its own: a client that reads slowly, or dies, does not hold up the others for long.
        """
        self._paused_until = time.monotonic() + _PAUSE_S if on else 0.0
        self._attendance.changed.notify_all()

    def await_resumption(self) -> None:
        """Wait until no pause is on."""
        while (left := self._paused_until - time.monotonic()) > 0:
            self._attendance.changed.wait(left)
