"""A directory with the state of a server: one snapshot, and the log that goes on from it.

`server.json` is replaced atomically and last; it names a file with the tensors and the log, and has a checksum of its
own. Anything else in the directory is left alone.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.core.errors import CheckpointError
from evenstep.core.files import open_regular, read_regular, sync, write_new
from evenstep.server.store.log import Log
from evenstep.server.wire.slices import ServerPlace

__all__ = ["BEFORE", "Facts", "Snapshots"]

Facts = dict[str, Any]
BEFORE = "log-before"
"""The log of updates staged before anything was put."""

_FORMAT = 2
_FACTS = "server.json"
_FACTS_BYTES = 1 << 30
_OURS = re.compile(
    r"(state-\d{12}\.(safetensors|partial)|log-(\d{12}(-\d+)?|before)(\.partial)?|server\.json\.partial)"
)
_APPEND = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
log = logging.getLogger("evenstep.server")


class Snapshots:
    """The directory of one server, which no other server uses.

    Args:
        path: Where it is; created if missing.
        place: Which of several servers it is.

    Raises:
        CheckpointError: It cannot be created, or another server uses it.
    """

    def __init__(self, path: Path, place: ServerPlace) -> None:
        self.path, self._place = path, place
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot create the directory {path}: {error.strerror}") from error
        self._lock = _lock(path)

    def close(self) -> None:
        """Release it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> Facts | None:
        """The facts of the last snapshot; None if there is none.

        Raises:
            CheckpointError: It cannot be read, was altered, or is of another server.
        """
        path = self.path / _FACTS
        try:
            facts = json.loads(read_regular(path, _FACTS_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(facts, dict) or facts.pop("checksum", None) != _checksum_of(facts):
            raise CheckpointError(
                f"{path} was altered, or is of another version; bring back a copy, or start in another directory"
            )
        if facts["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {facts['format']!r}, expected {_FORMAT}")
        here, there = [self._place.index, self._place.count], facts["place"][:2]
        if here != there:
            raise CheckpointError(
                f"{path} is of server {there[0]} of {there[1]}, expected {self._place}; start as many servers as then"
            )
        return dict(facts)

    def tensors(self, facts: Facts) -> dict[str, Tensor]:
        """The tensors of the last snapshot.

        Raises:
            CheckpointError: They cannot be read, or were altered.
        """
        path = self.path / facts["state"]
        try:
            if _checksum(path) != facts["crc32"]:
                raise CheckpointError(f"{path} was altered: its checksum differs")
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def write(self, version: int, facts: Facts, tensors: Mapping[str, Tensor], begin_log: Callable[[Path], Log]) -> Log:
        """Replace the snapshot: all of it, or nothing.

        Args:
            version: The version of the parameters.
            facts: Its facts.
            tensors: Its tensors.
            begin_log: Begins the log that continues from it.

        Returns:
            That log.

        Raises:
            CheckpointError: It cannot be written.
        """
        state, path = self.path / f"state-{version:012}.safetensors", self.unused(f"log-{version:012}")
        fresh = None
        try:
            checksum = _write_tensors(state, tensors)
            fresh = begin_log(path)
            place = [self._place.index, self._place.count, self._place.name]
            facts |= {"format": _FORMAT, "place": place, "state": state.name, "crc32": checksum, "log": path.name}
            _replace_text(self.path / _FACTS, json.dumps({**facts, "checksum": _checksum_of(facts)}))
        except OSError as error:
            if fresh is not None:
                fresh.close()
            self._tidy()
            raise CheckpointError(f"no snapshot could be written to {self.path}: {error}") from error
        try:
            sync(self.path)
        except OSError as error:
            fresh.in_doubt = True  # after a crash the previous snapshot may be back: keep it, and write another
            log.error("a snapshot in %s may not be on the disk: %s", self.path, str(error))
        else:
            self._tidy()
        return fresh

    def open_log(self, path: Path, *, durable: bool) -> tuple[Log, Callable[[], None]]:
        """A new log, and a function that gives it its name once its first records are in it."""
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        return Log(os.open(partial, _APPEND, 0o600), sync=durable), lambda: os.replace(partial, path)

    def set_aside(self, path: Path, offset: int, name: str) -> Path:
        """Keep the rest of a log in a file of its own.

        Raises:
            OSError: It cannot be written.
        """
        aside = self.unused(name)
        with open_regular(path) as file, aside.open("xb") as copy:
            file.seek(offset)
            shutil.copyfileobj(file, copy)
        sync(aside)
        return aside

    def unused(self, name: str) -> Path:
        """A path that does not exist yet."""
        return next(path for n in count() if not (path := self.path / (f"{name}-{n}" if n else name)).exists())

    def _tidy(self) -> None:
        """Delete files of ours, by their exact names, that the snapshot does not use."""
        try:
            facts = self.read()
            used = {facts["state"], facts["log"]} if facts is not None else {BEFORE}
            for path in self.path.iterdir():
                if _OURS.fullmatch(path.name) and path.name not in used and path.is_file():
                    path.unlink()
        except (OSError, CheckpointError) as error:
            log.warning("old files in %s could not be deleted: %s", self.path, str(error))


def _lock(directory: Path) -> int | None:
    """Lock a directory; None where directories cannot be locked.

    Raises:
        CheckpointError: Another server has it.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(
            f"{directory} is used by another server; stop that one, or give this one a directory of its own"
        ) from None
    except OSError as error:
        os.close(fd)
        log.warning("%s cannot be locked (%s): make sure that no other server uses it", directory, error.strerror)
        return None
    return fd


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Write a file of tensors; returns its checksum."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial)
    sync(partial)
    checksum = _checksum(partial)
    os.replace(partial, path)
    return checksum


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    write_new(partial, text.encode())
    os.replace(partial, path)


def _checksum_of(facts: Facts) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    checksum = 0
    with open_regular(path) as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum
