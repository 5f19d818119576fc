"""What survives: snapshots of the whole state, and a log of every update since.

A directory holds `server.json`, which is replaced atomically and last, and names a file with the tensors and the log
that goes on from it (`records.py`). With `durable`, a record is on the disk before what it says counts, so to read the
log back through the same optimizer is to have the same state, and to know every retry. A torn record at the end was
never acknowledged. Of several servers each writes its log in any case, so that one that was killed comes back with all
that the others know of; only `durable` waits for the disk, and so survives the machine.
"""

import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.core.errors import CheckpointError, RefusedError
from evenstep.server import records
from evenstep.server.decisions import Decided
from evenstep.server.follower import Follower, Staged
from evenstep.server.recipes import state_of
from evenstep.server.slices import Slices
from evenstep.server.state import Applied
from evenstep.server.store import Store
from evenstep.server.wire import Spec
from evenstep.server.workers import Acknowledged

__all__ = ["Keeper"]

_FORMAT = 1
_BEFORE = "log-before"  # what is staged before anything was put
log = logging.getLogger("evenstep.server")


class Keeper:
    """Writes a store down, and brings it back.

    Args:
        store: Whose state.
        directory: Where; made if it is not there.
        every: Updates between two snapshots.
        durable: Whether to write a log.

    Raises:
        CheckpointError: The directory cannot be written.
    """

    def __init__(self, store: Store, directory: Path, every: int, durable: bool) -> None:
        self._store, self._directory, self._every, self._durable = store, directory, every, durable
        self._log: int | None = None
        self._at = self._tried = -1
        self._quiet = True  # until restore: what is put before it is only a place for what was saved
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the directory {directory} cannot be made: {error.strerror}") from error
        store.takes_recipes = False  # a snapshot does not hold one
        store.after_put = self._write_first
        store.after_update = self._write_if_due

    def restore(self) -> None:
        """Go on from what the directory holds, if anything; then begin to write.

        Raises:
            CheckpointError: It is torn, altered, or of another model.
        """
        with self._store.exclusively():
            facts = self._read()
            if facts is not None:
                self._load(facts)
            self._replay(self._directory / (_BEFORE if facts is None else facts["log"]))
            self._quiet = False
            if self._store.layout is not None:
                self._write()
            elif isinstance(self._store, Follower):
                self._log = self._fresh_log(self._directory / _BEFORE)
            if self._durable or self._store.place.count > 1:
                self._store.journal = self

    def snapshot(self) -> None:
        """Write one now, if there is anything new."""
        with self._store.exclusively():
            if not self._quiet and self._store.layout is not None and self._at != self._store.version:
                self._write()

    def close(self) -> None:
        """Let go of the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

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
        except CheckpointError as error:  # what was there before is whole, and the log goes on
            log.error("SNAPSHOT FAILED, it will be tried again: %s", str(error))

    def _write(self) -> None:
        """Write a snapshot. The caller holds the store's lock."""
        store, directory = self._store, self._directory
        tensors, values = state_of(store.optimizer, store.state.parameters)
        tensors |= {f"parameter.{name}": tensor for name, tensor in store.tensors().items()}
        stem = f"{store.version:012}"
        state, path = directory / f"state-{stem}.safetensors", directory / f"log-{stem}"
        fresh_log = -1
        try:
            partial = state.with_suffix(".partial")
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial)
            _sync(partial)
            checksum = _checksum(partial)
            os.replace(partial, state)
            fresh_log = self._fresh_log(path)
            facts = {
                "format": _FORMAT,
                "version": store.version,
                "versions": store.state.versions,
                "owner": store.owner,
                "buffers": sorted(store.state.buffers),
                "acknowledged": {
                    worker: [last.sequence, last.version, last.notes]
                    for worker, last in store.workers.acknowledged.items()
                },
                "values": values,
                "groups": _groups(store),
                "place": [store.place.index, store.place.count, store.place.name],
                "layout": store.slices.text.decode() if store.slices is not None else None,
                "decided": store.decisions.since(-1),
                "state": state.name,
                "crc32": checksum,
                "log": path.name,
            }
            text = directory / "server.json.partial"
            text.write_text(json.dumps(facts))
            _sync(text)
            os.replace(text, directory / "server.json")
            self._log, fresh_log = fresh_log, -1 if self._log is None else self._log  # only now: it is named
            _sync(directory)
            for old in (*directory.glob("state-*"), *directory.glob("log-*")):
                if old.name not in (state.name, path.name):
                    old.unlink()
        except OSError as error:
            raise CheckpointError(f"no snapshot could be written to {directory}: {error}") from error
        finally:
            if fresh_log >= 0:
                os.close(fresh_log)
        self._at = store.version

    def _fresh_log(self, path: Path) -> int:
        """An empty log, but for what is staged and not decided yet."""
        partial = path.with_suffix(".partial")  # the log that is in use may have the same name
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            waiting = self._store.staged if isinstance(self._store, Follower) else {}
            for (worker, session), staged in waiting.items():
                records.write(fd, records.of_staged(worker, session, staged), sync=self._durable)
            os.replace(partial, path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read(self) -> dict[str, Any] | None:
        path = self._directory / "server.json"
        try:
            facts: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if facts.get("format") != _FORMAT:
            raise CheckpointError(f"{path} has format {facts.get('format')!r}, expected {_FORMAT}")
        here, there = [self._store.place.index, self._store.place.count], facts.get("place", [0, 1])[:2]
        if here != there:
            raise CheckpointError(
                f"{path} is of server {there[0]} of {there[1]}, expected {self._store.place}; start as many as then"
            )
        return facts

    def _load(self, facts: dict[str, Any]) -> None:
        store, path = self._store, self._directory / facts["state"]
        try:
            if _checksum(path) != facts["crc32"]:
                raise CheckpointError(f"{path} was altered: its checksum is another")
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        parameters = {
            name: tensors[f"parameter.{name}"] for name in facts["versions"] if f"parameter.{name}" in tensors
        }
        if store.layout is None:
            place = store.place
            slices = Slices.read(facts["layout"], place.count, split=place.split) if facts.get("layout") else None
            store._initialise(parameters, facts["owner"], {}, facts["buffers"], slices)
        try:
            assert store.layout is not None, "it was put"
            store.layout.check_whole({name: Spec.of(tensor) for name, tensor in parameters.items()})
        except RefusedError as error:
            raise CheckpointError(f"{path} belongs to another model: {error}") from error
        for name, tensor in store.tensors().items():
            tensor.copy_(parameters[name])
        _restore_optimizer(store, tensors, facts["values"], facts["groups"])
        state = store.state
        state.version, state.versions, state.owner = facts["version"], facts["versions"], facts["owner"]
        store.decisions.extend(records.to_decided({"version": v, "who": who}) for v, who in facts.get("decided", []))
        for worker, (sequence, version, notes) in facts["acknowledged"].items():
            store.workers.acknowledged[worker] = Acknowledged(sequence, version, notes)

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

    def _append(self, record: records.Record) -> None:
        assert self._log is not None, "there is a log as soon as there is anything to write"
        records.write(self._log, record, sync=self._durable)

    def _replay(self, path: Path) -> None:
        """Apply what the log holds, up to where it was torn."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        store = self._store
        for facts, tensors in records.records(data):
            if isinstance(store, Follower) and facts["kind"] == "staged":
                who, staged = records.to_staged((facts, tensors), store.place)
                store.staged[who] = staged
            elif isinstance(store, Follower) and facts["kind"] == "decided":
                if facts["version"] > store.version or store.layout is None:
                    store.carry_out(records.to_decided(facts))
            elif facts["version"] > store.version:
                store.apply(records.to_applied((facts, tensors)))


def _groups(store: Store) -> list[dict[str, Any]]:
    groups = store.optimizer.param_groups if store.optimizer is not None else []
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"} for group in groups
    ]


def _restore_optimizer(
    store: Store, tensors: dict[str, Tensor], values: dict[str, Any], groups: list[dict[str, Any]]
) -> None:
    if store.optimizer is None:
        return
    for name, parameter in store.state.parameters.items():
        head = f"optimizer.{name}."
        state = {k.removeprefix(head): v for k, v in {**tensors, **values}.items() if k.startswith(head)}
        state = {key: value for key, value in state.items() if "." not in key}
        if state:
            store.optimizer.state[parameter] = state
    for group, options in zip(store.optimizer.param_groups, groups, strict=True):
        for key, value in options.items():
            if isinstance(group[key], Tensor):
                group[key] = torch.tensor(value, dtype=group[key].dtype)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
