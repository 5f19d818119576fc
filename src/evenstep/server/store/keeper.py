"""Persistence of a store: snapshots of the whole state, and a log of every update since.

With `durable`, a record is on disk before it takes effect, so replaying the log through the same optimizer gives the
same state, and recognises every retry. A torn record at the end was never acknowledged. Each of several servers always
writes its log, so that one that was killed comes back with everything that the others know; only `durable` waits for
the disk, and so survives a failure of the machine.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import CheckpointError, RefusedError
from evenstep.server.store import records
from evenstep.server.store.commits import First
from evenstep.server.store.decisions import Decided
from evenstep.server.store.following import Follower, Staged
from evenstep.server.store.log import Log, LogEntry, Record, read
from evenstep.server.store.optimizers import state_of
from evenstep.server.store.snapshots import BEFORE, Facts, Snapshots
from evenstep.server.store.state import Applied
from evenstep.server.store.store import Store
from evenstep.server.store.workers import Acknowledged
from evenstep.server.wire.slices import Slices
from evenstep.server.wire.tensors import Spec

__all__ = ["Keeper"]

log = logging.getLogger("evenstep.server")


class Keeper:
    """Saves a store, and restores it. It is the only user of its directory.

    Args:
        store: The store.
        directory: Where to save it; created if missing.
        every: Updates between two snapshots.
        durable: Whether to write a log.
        set_aside: Keep the part of a log that cannot be replayed in a file beside it, instead of failing.

    Raises:
        CheckpointError: The directory cannot be written, or another server uses it.
    """

    def __init__(self, store: Store, directory: Path, every: int, durable: bool, *, set_aside: bool = False) -> None:
        self._store, self._every, self._durable = store, every, durable
        self._set_aside = set_aside
        self._log: Log | None = None
        self._at = self._tried = -1
        self._quiet = True  # until restore: values put before it only make room for the saved ones
        self._snapshots = Snapshots(directory, store.place)
        store.takes_recipes = False  # snapshots do not keep recipes
        store.commits.after_put = self._write_first
        store.commits.after_update = self._write_if_due

    def restore(self) -> None:
        """Resume from what the directory holds, if anything; then begin to write.

        Raises:
            CheckpointError: It is altered, or of another model; or its log cannot be replayed.
        """
        with self._store.exclusively():
            facts = self._snapshots.read()
            path = self._snapshots.path / (BEFORE if facts is None else facts["log"])
            stuck = self._replay(facts, path)
            if stuck is not None:
                self._set_rest_aside(stuck, facts, path)
            self._quiet = False
            if self._store.layout is not None:
                self._write()
            elif isinstance(self._store.way, Follower):
                self._log = self._begin_log(self._snapshots.path / BEFORE)
            if self._durable or self._store.place.count > 1:
                self._store.commits.journal = self

    def snapshot(self) -> None:
        """Write a snapshot now, if there is anything new.

        Raises:
            CheckpointError: It cannot be written.
        """
        with self._store.exclusively():
            if not self._quiet and self._store.layout is not None and self._at != self._store.version:
                self._write()

    def close(self) -> None:
        """Close the log and release the directory."""
        if self._log is not None:
            self._log.close()
            self._log = None
        self._snapshots.close()

    # ---- snapshots ----

    def _write_first(self) -> None:
        if not self._quiet:
            self._write()

    def _write_if_due(self) -> None:
        if self._quiet or self._store.version - max(self._at, self._tried) < self._every:
            return
        self._tried = self._store.version
        try:
            self._write()
        except CheckpointError as error:  # the last snapshot is whole, and its log goes on
            log.error("SNAPSHOT FAILED, it will be tried again: %s", str(error))

    def _write(self) -> None:
        """Write a snapshot. The caller holds the store's lock."""
        store = self._store
        tensors, values = state_of(store.state.optimizer, store.state.parameters)
        tensors |= {f"parameter.{name}": tensor for name, tensor in store.tensors().items()}
        before, self._log = (
            self._log,
            self._snapshots.write(store.version, _facts(store, values), tensors, self._begin_log),
        )
        if before is not None:
            before.close()
        self._at = store.version

    def _begin_log(self, path: Path) -> Log:
        """An empty log, but for what is staged and not decided yet."""
        fresh, name_it = self._snapshots.open_log(path, durable=self._durable)
        try:
            waiting = self._store.way.staged if isinstance(self._store.way, Follower) else {}
            for (worker, session), staged in waiting.items():
                fresh.append(records.of_staged(worker, session, staged))
            name_it()
        except BaseException:
            fresh.close()
            raise
        return fresh

    # ---- the log ----

    def append(self, applied: Applied) -> None:
        """Write an update down; with `durable`, wait until it is on the disk."""
        self._append(records.of_applied(applied))

    def stage(self, worker: str, session: str, staged: Staged) -> None:
        """Likewise, an update that is not decided yet."""
        self._append(records.of_staged(worker, session, staged))

    def follow(self, decision: Decided) -> None:
        """Likewise, a decision."""
        self._append(records.of_decided(decision))

    def retract(self) -> None:
        """Take back the last record."""
        assert self._log is not None, "only a record that was written can be retracted"
        self._log.retract()

    def _append(self, record: Record) -> None:
        assert self._log is not None, "there is a log before anything is written"
        if self._log.in_doubt:
            self._write()
        if self._log.in_doubt:
            raise CheckpointError("the disk does not take what it is given")
        self._log.append(record)

    def _replay(self, facts: Facts | None, path: Path, before: int | None = None) -> "_Stuck | None":
        """Bring the store to the state that the directory holds.

        Args:
            facts: The snapshot to begin from.
            path: The log that goes on from there.
            before: Do not apply this record, nor any after it.

        Returns:
            The first record that cannot be applied, if there is one.
        """
        if facts is not None:
            _load(self._store, facts, self._snapshots.tensors(facts))
        elif isinstance(self._store.way, Follower):
            self._store.way.staged.clear()
        for found in read(path):
            if found.number == before:
                return None
            if found.record is None and found.is_last:
                log.warning("%s ends in a torn record, number %d: it was never acknowledged", path, found.number)
                return None
            try:
                self._apply(found.record)
            except Exception as error:  # noqa: BLE001  # an old log may hold anything: the error says where, and what to do
                return _Stuck(found, str(error) or type(error).__name__)
        return None

    def _apply(self, record: Record | None) -> None:
        store = self._store
        if record is None:
            raise CheckpointError("it was altered, and whole ones follow it")
        facts = record[0]
        if isinstance(store.way, Follower) and facts["kind"] == "staged":
            who, staged = records.to_staged(record, store.place)
            store.way.staged[who] = staged
        elif facts["version"] > store.version:
            if isinstance(store.way, Follower) and facts["kind"] == "decided":
                store.way.carry_out(records.to_decided(facts))
            else:
                store.commits.replay(records.to_applied(record))

    def _set_rest_aside(self, stuck: "_Stuck", facts: Facts | None, path: Path) -> None:
        """Go on without a record that cannot be applied and all that follow it, if the user asked for that.

        Raises:
            CheckpointError: The user did not.
        """
        number = stuck.found.number
        self._replay(facts, path, before=number)  # the record that failed may have been half applied
        name = f"set-aside-{path.name}-{number}"
        what = f"{path} cannot be replayed: record {number} ({records.describe(stuck.found.record)}) fails: {stuck.why}"
        if not self._set_aside:
            raise CheckpointError(
                f"{what}; to go on from version {self._store.version} without it and all that follow, start with "
                f"--set-aside (set_aside=True), which keeps them in {name}"
            )
        try:
            aside = self._snapshots.set_aside(path, stuck.found.offset, name)
        except OSError as error:
            raise CheckpointError(f"{what}; it could not be set aside in {name}: {error.strerror}") from error
        log.warning("%s; going on from version %d: what follows is in %s", what, self._store.version, aside)


@dataclass(frozen=True)
class _Stuck:
    """Where replaying a log stopped, and why."""

    found: LogEntry
    why: str


def _facts(store: Store, values: dict[str, Any]) -> Facts:
    """What a snapshot says besides its tensors."""
    return {
        "version": store.version,
        "versions": store.state.versions,
        "owner": store.state.owner,
        "buffers": sorted(store.state.buffers),
        "acknowledged": {
            worker: [last.sequence, last.version, last.notes]
            for worker, last in store.attendance.workers.acknowledged.items()
        },
        "values": values,
        "groups": _groups(store),
        "layout": store.commits.slices.text.decode() if store.commits.slices is not None else None,
        "decided": store.commits.decisions.since(-1),
    }


def _load(store: Store, facts: Facts, tensors: dict[str, Tensor]) -> None:
    """Bring a store to the state of a snapshot.

    Raises:
        CheckpointError: It is of another model.
    """
    state, acknowledged = store.state, store.attendance.workers.acknowledged
    parameters = {name: tensors[f"parameter.{name}"] for name in facts["versions"] if f"parameter.{name}" in tensors}
    if store.layout is None:
        place = store.place
        slices = Slices.read(facts["layout"], place.count, split=place.split) if facts["layout"] else None
        store.commits.initialise(First(parameters, facts["owner"], facts["buffers"], slices))
    assert store.layout is not None, "the store has had its first values, from here or before"
    try:
        store.layout.check_whole({name: Spec.of(tensor) for name, tensor in parameters.items()})
    except RefusedError as error:
        raise CheckpointError(f"the directory belongs to another model: {error}") from error
    for name, tensor in store.tensors().items():
        tensor.copy_(parameters[name])
    _restore_optimizer(store, tensors, facts["values"], facts["groups"])
    state.version, state.versions, state.owner = facts["version"], facts["versions"], facts["owner"]
    state.doubt()
    store.commits.decisions.forget()
    store.commits.decisions.extend(records.to_decided({"version": v, "who": who}) for v, who in facts["decided"])
    acknowledged.clear()
    acknowledged.update({worker: Acknowledged(*last) for worker, last in facts["acknowledged"].items()})


def _groups(store: Store) -> list[dict[str, Any]]:
    groups = store.state.optimizer.param_groups if store.state.optimizer is not None else []
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"} for group in groups
    ]


def _restore_optimizer(
    store: Store, tensors: dict[str, Tensor], values: dict[str, Any], groups: list[dict[str, Any]]
) -> None:
    if store.state.optimizer is None:
        return
    store.state.optimizer.state.clear()
    for name, parameter in store.state.parameters.items():
        head = f"optimizer.{name}."
        state = {k.removeprefix(head): v for k, v in {**tensors, **values}.items() if k.startswith(head)}
        state = {key: value for key, value in state.items() if "." not in key}
        if state:
            store.state.optimizer.state[parameter] = state
    for group, options in zip(store.state.optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            if isinstance(group[key], Tensor):
                group[key] = torch.tensor(value, dtype=group[key].dtype)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
