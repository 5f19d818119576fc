"""Checkpoints: a directory with one safetensors file and `checkpoint.json`, which names it and its checksum.

The JSON file is replaced last and atomically, so a directory always holds one complete checkpoint. While one is being
written or removed, `checkpoint.json.partial` says which files it has: only files named by one of the two are ever
removed. No pickle anywhere.
"""

import contextlib
import errno
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.core import points
from evenstep.core.errors import CheckpointError
from evenstep.core.files import open_regular, sync, write_new
from evenstep.core.fingerprint import fingerprint
from evenstep.exchange.journal import Entry, Journal
from evenstep.run.facts import FACTS, read_facts, seal

__all__ = ["check", "discard", "is_abandoned", "read", "read_journal", "remove", "write"]

_BEGUN = f"{FACTS}.partial"
_OVERDUE_S = 86400.0  # when to give up a writer on another machine, which cannot be watched
_BARE_S = 60.0  # when to give up one that has only just begun
_NEW = ".new"  # the suffix of a file that is about to replace another
_PARTIAL = ".partial"
_SUFFIXES = (".safetensors", _PARTIAL, ".journal")


def write(directory: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any], journal: bytes = b"") -> None:
    """Write a checkpoint, replacing the one that is there.

    Args:
        directory: Where it goes.
        tensors: The state.
        facts: What goes into `checkpoint.json`: its version, the plain values of the state, and so on.
        journal: What was done so far, if the script is to be resumed from here.

    Raises:
        CheckpointError: The directory cannot be written, or holds a `checkpoint.json` that is not ours; an earlier
            checkpoint in it is untouched, and nothing half written is left.
    """
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory, tensors, dict(facts), journal)
    except (OSError, SafetensorError, TypeError, ValueError) as error:  # a full disk raises the second
        with contextlib.suppress(OSError, CheckpointError):
            discard(directory)
            if is_new:
                directory.rmdir()
        why = str(error)
        if isinstance(error, TypeError | ValueError):
            why = f"a tracked object's state cannot be written as JSON: {error}"
        raise CheckpointError(f"cannot write the checkpoint {directory}: {why}") from error


def _write(directory: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any], journal: bytes) -> None:
    facts["fingerprint"] = fingerprint(tensors, facts["values"])
    stem = f"state-{facts['version']}-{facts['fingerprint'][:8]}"
    try:
        old = [each for each in (*_finished(directory), *_begun(directory)) if each != stem]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it is not replaced: save elsewhere, or move it away") from error
    _replace(directory / _BEGUN, seal({"stems": [*old, stem], "writer": _me(), "begun_s": time.time()}))
    state, partial, past = (directory / f"{stem}{suffix}" for suffix in _SUFFIXES)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    sync(partial)
    os.replace(partial, state)
    points.reach("checkpoint")
    facts |= {"state": state.name, "sha256": _checksum(state)}
    if journal:
        write_new(partial, journal)
        facts |= {"journal": past.name, "journal_sha256": _checksum(partial)}
        os.replace(partial, past)
    _replace(directory / FACTS, seal({**facts, "written_s": time.time()}))
    sync(directory)
    discard(directory)


def read(directory: Path, *, tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint's facts and, if asked, its tensors, verified.

    Raises:
        CheckpointError: It is missing, torn, altered or of another format.
    """
    try:
        facts = read_facts(directory / FACTS)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} holds no {FACTS}; expected a directory that run.save wrote") from None
    if len(facts["groups"]) != facts["optimizers"]:
        raise CheckpointError(f"{directory / FACTS} has options for {len(facts['groups'])} of its optimizers")
    state = directory / facts["state"]
    with _verified(state, facts["sha256"]):
        found = load_file(state) if tensors else {}
    if tensors and fingerprint(found, facts["values"]) != facts["fingerprint"]:
        raise CheckpointError(f"{directory} was altered: its fingerprint is not that of its state")
    return facts, found


def read_journal(directory: Path, facts: dict[str, Any]) -> list[Entry]:
    """What was done until a checkpoint, verified.

    Raises:
        CheckpointError: It holds none, or it was altered.
    """
    if facts.get("journal") is None:
        raise CheckpointError(f"{directory} was written by run.save: load it with run.load")
    path = directory / facts["journal"]
    with _verified(path, facts["journal_sha256"]):
        return Journal.unpack(path.read_bytes())


def remove(directory: Path) -> None:
    """Remove a complete checkpoint: exactly what we wrote, and the directory if nothing else is in it.

    Raises:
        CheckpointError: There is none of ours.
        OSError: It cannot be removed.
    """
    if _finished(directory):
        os.replace(directory / FACTS, directory / _BEGUN)  # now it does not count, and says what is left to remove
    discard(directory)


def discard(directory: Path) -> None:
    """Remove what was begun here but not completed, and the directory if nothing is left in it.

    Raises:
        CheckpointError: The file that names it is not ours.
        OSError: It cannot be removed.
    """
    whole, begun = _finished(directory), _begun(directory)
    if not begun and not _is_bare(directory):
        return
    for stem in begun:
        for suffix in _SUFFIXES if stem not in whole else (_PARTIAL,):
            (directory / f"{stem}{suffix}").unlink(missing_ok=True)
    for name in (f"{FACTS}{_NEW}", f"{_BEGUN}{_NEW}", _BEGUN):  # this one last: it says what the others are
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def is_abandoned(directory: Path) -> bool:
    """Whether a checkpoint was begun here that nobody will finish: its writer has ended, or is long overdue."""
    try:
        facts = read_facts(directory / _BEGUN, either=True)
    except FileNotFoundError:
        return _is_bare(directory) and time.time() - directory.stat().st_mtime > _BARE_S
    except CheckpointError:
        return False
    if "writer" not in facts:
        return True  # it was being removed
    host, pid = facts["writer"]
    if host == _me()[0]:
        return not os.path.exists(f"/proc/{pid}")
    return bool(time.time() - facts["begun_s"] > _OVERDUE_S)


def check(
    directory: Path,
    facts: dict[str, Any],
    tensors: Mapping[str, Tensor],
    here: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> None:
    """Raise CheckpointError with the differences if a checkpoint belongs to another run.

    Args:
        directory: Where it is.
        facts: What its `checkpoint.json` says.
        tensors: What it holds.
        here: The same facts of this run: shards, seed, arithmetic, number of optimizers, names of tracked objects.
        state: The state of this run. What steps create is not compared: a fresh optimizer has no state yet.
    """
    there = {"arithmetic": "native", **facts, "tracked": sorted(facts["tracked"])}
    found = [f"{key}: {there[key]} in the checkpoint, {here[key]} here" for key in here if here[key] != there[key]]
    mine, theirs = ({n: f"{tuple(t.shape)} {t.dtype}" for n, t in s.items()} for s in (state, tensors))
    found += [
        f"{name}: {theirs.get(name, 'nothing')} in the checkpoint, {mine.get(name, 'nothing')} here"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name) and not name.startswith(("optimizer", "carry"))
    ]
    if found:
        raise CheckpointError(f"{directory} belongs to another run: " + "; ".join(found[:5]))


@contextlib.contextmanager
def _verified(path: Path, checksum: str | None) -> Iterator[None]:
    """While reading a file of ours, report anything wrong with it as one kind of error."""
    try:
        if _checksum(path) != checksum:
            raise CheckpointError(f"{path} was altered or torn: its checksum is not the one in {FACTS}")
        yield
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _me() -> list[Any]:
    return [socket.gethostname(), os.getpid()]


def _is_bare(directory: Path) -> bool:
    """Whether nothing is here but the first file that a writer makes, which may be torn."""
    return directory.is_dir() and os.listdir(directory) == [f"{_BEGUN}{_NEW}"]


def _finished(directory: Path) -> list[str]:
    """The name, without suffix, of the files of the complete checkpoint here, if there is one.

    Raises:
        CheckpointError: There is something else.
    """
    try:
        return [Path(read_facts(directory / FACTS)["state"]).stem]
    except FileNotFoundError:
        return []


def _begun(directory: Path) -> list[str]:
    """The names of the files that were begun here, likewise."""
    try:
        facts = read_facts(directory / _BEGUN, either=True)
    except FileNotFoundError:
        return []
    return list(facts["stems"]) if "stems" in facts else [Path(facts["state"]).stem]


def _replace(path: Path, data: bytes) -> None:
    """Write a file, atomically."""
    new = path.with_name(f"{path.name}{_NEW}")
    write_new(new, data)
    os.replace(new, path)


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
