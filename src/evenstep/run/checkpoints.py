"""Checkpoints that are written while training goes on, and resuming from the newest good one.

Each is a folder `step-N` as `checkpoint.write` makes it, with the journal beside the state: with it the script can be
run from its beginning and gets the results of everything done before. Anything else in their directory is neither read
nor removed.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.core.output import say
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation
from evenstep.run import checkpoint
from evenstep.run.facts import FACTS, read_facts
from evenstep.run.reading import read_for_all

__all__ = ["Checkpoints", "FoundCheckpoint", "Resumption", "Snapshot"]

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RETRY_S = 5.0  # after a failed write
_PATIENCE_S = 300.0  # how long the end of a run waits for the disk
_RESTORE = "restore"
_NAME = re.compile(r"step-\d{9,}")


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds, copied."""

    tensors: Mapping[str, Tensor]
    facts: dict[str, Any]
    journal: bytes


@dataclass(frozen=True)
class FoundCheckpoint:
    """A matching checkpoint: its path, its facts, and what was done after the point at which it was found."""

    path: Path
    facts: dict[str, Any]
    entries: Sequence[Entry]


class Checkpoints:
    """Writes checkpoints.

    Args:
        directory: Where they go.
        every: Steps between two of them, or a time such as "30s".
        keep: How many of the newest to keep.
        written: Called with each when it is complete.

    Raises:
        ConfigError: An argument makes no sense.
    """

    def __init__(
        self, directory: Path, every: int | str, keep: int, written: Callable[[Path], None] = lambda _: None
    ) -> None:
        self._directory, self._keep, self._written = directory, keep, written
        self._steps, self._seconds = _parse(every)
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"keep={keep!r}, expected a whole number above 0")
        self._last_step, self._last_s, self._asked = 0, time.monotonic(), 0
        self._retry_s: float | None = None
        self._writer: threading.Thread | None = None

    def due(self, version: int, asked: int) -> bool:
        """Whether to write one now. None is due while one is being written.

        Args:
            version: How many steps have been committed.
            asked: How often the supervisor has asked for one.
        """
        if self._writer is not None and self._writer.is_alive():
            return False
        if self._retry_s is not None:
            return time.monotonic() >= self._retry_s
        if asked > self._asked:
            self._asked = asked
            return True
        return self._is_time(version)

    def is_missing(self, version: int) -> bool:
        """Whether, at the end of the run, one is due that failed or could not be written while another was."""
        return self._last_step < version and (self._retry_s is not None or self._is_time(version))

    def _is_time(self, version: int) -> bool:
        if self._steps is not None:
            return version // self._steps > self._last_step // self._steps
        return self._seconds is not None and time.monotonic() - self._last_s >= self._seconds

    def write(self, snapshot: Snapshot, *, wait: bool) -> None:
        """Write a snapshot, in a thread of its own unless the caller waits."""
        self._last_step, self._last_s = snapshot.facts["version"], time.monotonic()
        self.close()
        if wait:
            self._write(snapshot)
        else:
            self._writer = threading.Thread(
                target=self._write, args=(snapshot,), name="evenstep-checkpoint", daemon=True
            )
            self._writer.start()

    def _write(self, snapshot: Snapshot) -> None:
        path = self._path(snapshot.facts["version"])
        try:
            checkpoint.write(path, snapshot.tensors, snapshot.facts, snapshot.journal)
            self._retry_s = None
            self._written(path)
        except Exception as error:  # noqa: BLE001  # the border of a thread: reported, and tried again
            say(f"CHECKPOINT FAILED, training goes on and it will be tried again: {error}")
            self._retry_s = time.monotonic() + _RETRY_S
            return
        try:
            self._tidy()
        except (OSError, CheckpointError) as error:
            say(f"what is left of older checkpoints in {self._directory} cannot be removed: {error}")

    def _tidy(self) -> None:
        """Keep the newest; remove the others, and those that nobody will finish."""
        folders = [path for path in _newest_first(self._directory) if not path.is_symlink()]
        for path in [path for path in folders if _is_whole(path)][self._keep :]:
            checkpoint.remove(path)
        for path in folders:
            if not _is_whole(path) and checkpoint.is_abandoned(path):
                checkpoint.discard(path)

    def _path(self, version: int) -> Path:
        return self._directory / f"step-{version:09}"

    def read(self, version: int) -> dict[str, Tensor]:
        """What the checkpoint of a version holds; empty: there is none, or it is not whole. Waits for its writer."""
        self.close()
        try:
            return checkpoint.read(self._path(version), tensors=True)[1]
        except CheckpointError:
            return {}

    def newest(self) -> Path | None:
        """The newest checkpoint, if there is any."""
        return next((path for path in _newest_first(self._directory) if _is_whole(path)), None)

    def close(self) -> None:
        """Wait for what is being written; a disk that no longer answers is reported and given up."""
        if self._writer is not None:
            self._writer.join(_PATIENCE_S)
            if self._writer.is_alive():
                say(f"CHECKPOINT NOT WRITTEN: {self._directory} has taken more than {_PATIENCE_S:g} s")
            self._writer = None

    def find(self, here: Mapping[str, Any], state: Mapping[str, Tensor], ledger: Ledger) -> FoundCheckpoint | None:
        """The newest good checkpoint of this run; torn or altered ones are reported and skipped.

        Args:
            here: The facts of this run.
            state: Its state.
            ledger: What it has done so far.

        Raises:
            CheckpointError: The newest good one belongs to another run.
        """
        for path in _newest_first(self._directory):
            try:
                facts, tensors = checkpoint.read(path, tensors=True)
                entries = checkpoint.read_journal(path, facts)
            except CheckpointError as error:
                say(f"passed over: {error}")
                continue
            checkpoint.check(path, facts, tensors, here, state)
            say(f"going on from {path}, after step {facts['version']}")
            return FoundCheckpoint(path, facts, _after(path, entries, ledger))
        say(f"no checkpoint in {self._directory} yet: starting over")
        return None


class Resumption:
    """Resuming from a checkpoint: its journal gives the results of what was done, and finally its state is loaded.

    Args:
        path: Where it is. It is read at once; later it may make room for newer ones.
        facts: What its `checkpoint.json` says.
        engine: Where its state goes.
        ledger: Already holds its journal.
    """

    def __init__(self, path: Path, facts: dict[str, Any], engine: Engine, ledger: Ledger) -> None:
        self._path, self._facts, self._engine, self._ledger = path, facts, engine, ledger
        self._over = False
        ledger.prelude = self._go_on

    def check_data(self, number: int, sizes: list[int | None]) -> None:
        """Check that the data are the same as then.

        Raises:
            CheckpointError: They are not.
        """
        there = self._facts["data"]
        if not self._over and number < len(there) and there[number] != sizes:
            raise CheckpointError(
                f"{self._path} belongs to another run: {there[number][0]} samples in batches of {there[number][1]} in "
                f"the checkpoint, {sizes[0]} in batches of {sizes[1]} here"
            )

    def _go_on(self) -> None:
        """Before an operation: if everything in the checkpoint's journal was taken over, put its state in place."""
        engine, ledger = self._engine, self._ledger
        if ledger.catching_up and ledger.journal.read(ledger.done).kind != _RESTORE:
            ledger.prelude = self._go_on
            return

        def attempt() -> Entry:
            facts, tensors = read_for_all(
                ledger.group, _RESTORE, lambda: ({}, checkpoint.read(self._path, tensors=True)[1])
            )
            if "failure" in facts:
                raise CheckpointError(facts["failure"])
            engine.holdings.restore(tensors, {})
            return Entry(_RESTORE, str(self._path))

        def adopt(entry: Entry, took_part: bool) -> bool:
            engine.holdings.restored([[] for _ in engine.optimizers], None, engine.version, took_part)
            if took_part and engine.state.fingerprint() != self._facts["fingerprint"]:
                raise CheckpointError(
                    f"{self._path} was loaded but its fingerprint differs from the one that was saved"
                )
            return bool(entry.value == str(self._path))

        self._over = ledger.perform(Operation(_RESTORE, engine.version), attempt, adopt)
        if not self._over:  # that was an older checkpoint, from which this one had resumed
            ledger.prelude = self._go_on


def _parse(every: int | str) -> tuple[int | None, float | None]:
    if isinstance(every, int) and every > 0:
        return every, None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", every.strip()) if isinstance(every, str) else None
    if found is None:
        raise ConfigError(f'every={every!r}, expected a number of steps above 0, or a time such as "30s" or "10min"')
    return None, float(found[1]) * _UNITS_S[found[2]]


def _after(path: Path, entries: Sequence[Entry], ledger: Ledger) -> Sequence[Entry]:
    """What a checkpoint's script did after it had asked for checkpoints.

    Raises:
        CheckpointError: Until then it had done something different from this one.
    """
    done = [kind for n in range(ledger.done) if (kind := ledger.journal.read(n).kind) != _RESTORE] + ["checkpoint"]
    there = [n for n, entry in enumerate(entries) if entry.kind != _RESTORE]  # which is not an act of the script
    for number, kind in enumerate(done):
        theirs = entries[there[number]].kind if number < len(there) else "nothing more"
        if theirs != kind:
            raise CheckpointError(
                f"{path} belongs to another script: after {number} operations it did '{theirs}' where this one does "
                f"'{kind}'"
            )
    return entries[there[len(done) - 1] + 1 :]


def _newest_first(directory: Path) -> list[Path]:
    """By time of writing, not by step: a run that started again is newer than the one before it."""
    found = [path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (_written_s(path), path.name), reverse=True)


def _written_s(path: Path) -> float:
    """When a checkpoint was written; infinity if it is not complete yet."""
    try:
        return float(read_facts(path / FACTS)["written_s"])
    except (OSError, CheckpointError):
        return math.inf


def _is_whole(path: Path) -> bool:
    return _written_s(path) < math.inf
