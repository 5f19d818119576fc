"""Checkpoints: a directory with one safetensors file and `checkpoint.json`, which names it and its checksum.

The JSON file is replaced last and atomically, so a directory always holds one whole checkpoint. No pickle anywhere.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.core import points
from evenstep.core.errors import CheckpointError
from evenstep.core.fingerprint import fingerprint

__all__ = ["check", "pack", "read", "read_journal", "unpack", "write"]

_FORMAT = 1


def write(directory: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any], journal: bytes = b"") -> None:
    """Write a checkpoint, replacing the one that is there.

    Args:
        directory: Where.
        tensors: The state.
        facts: What goes into `checkpoint.json`: its version, the plain values of the state, and whatever else.
        journal: What was done so far, if the script shall be able to go on from here by itself.

    Raises:
        CheckpointError: The directory cannot be written; an earlier checkpoint in it is untouched.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        facts = {**facts, "fingerprint": fingerprint(tensors, facts["values"])}
        state = directory / f"state-{facts['version']}-{facts['fingerprint'][:8]}.safetensors"
        partial = state.with_suffix(".partial")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        _sync(partial)
        os.replace(partial, state)
        points.reach("checkpoint")
        facts = {"format": _FORMAT, **facts, "state": state.name, "sha256": _checksum(state)}
        if journal:
            past = state.with_suffix(".journal")
            past.write_bytes(journal)
            _sync(past)
            facts |= {"journal": past.name, "journal_sha256": _checksum(past)}
        text = directory / "checkpoint.json.partial"
        text.write_text(json.dumps(facts, indent=1))
        _sync(text)
        os.replace(text, directory / "checkpoint.json")
        _sync(directory)
        for old in directory.glob("state-*"):
            if old.stem != state.stem:
                old.unlink()
    except (OSError, SafetensorError) as error:  # the latter is what a full disk comes as
        raise CheckpointError(f"cannot write the checkpoint {directory}: {error}") from error
    except TypeError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {directory}: a tracked object's state is no JSON: {error}"
        ) from error


def read(directory: Path, *, tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint's facts and, if asked, its tensors, verified.

    Raises:
        CheckpointError: It is missing, torn, altered or of another format.
    """
    try:
        facts = json.loads((directory / "checkpoint.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} holds no checkpoint.json; expected a directory that run.save wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / 'checkpoint.json'} cannot be read: {error}") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise CheckpointError(f"{directory / 'checkpoint.json'} is no checkpoint of format {_FORMAT}")
    state = directory / Path(str(facts.get("state"))).name
    try:
        if _checksum(state) != facts["sha256"]:
            raise CheckpointError(f"{state} was altered or torn: its checksum is not the one in checkpoint.json")
        return facts, load_file(state) if tensors else {}
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{state} cannot be read: {error}") from error


def read_journal(directory: Path, facts: dict[str, Any]) -> bytes:
    """What was done until a checkpoint, verified.

    Raises:
        CheckpointError: It holds none, or it was altered.
    """
    if "journal" not in facts:
        raise CheckpointError(f"{directory} was written by run.save: load it with run.load")
    path = directory / Path(str(facts["journal"])).name
    try:
        if _checksum(path) != facts["journal_sha256"]:
            raise CheckpointError(f"{path} was altered or torn: its checksum is not the one in checkpoint.json")
        return path.read_bytes()
    except (OSError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def pack(value: Any) -> Any:
    """A plain value as JSON that keeps what JSON would lose: keys that are no text, and tuples.

    A scheduler's state holds such things; read back as text they would be ignored in silence.
    """
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [pack(item) for item in value]}
    return value


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in items}
    return (list if kind == "list" else tuple)(unpack(item) for item in items)


def check(
    directory: Path,
    facts: dict[str, Any],
    tensors: Mapping[str, Tensor],
    here: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> None:
    """Raise CheckpointError with the differences if a checkpoint belongs to another run.

    Args:
        directory: Where it lies.
        facts: What it says of itself.
        tensors: What it holds.
        here: What this run says: shards, seed, number of optimizers, names of tracked objects.
        state: What this run holds. Optimizer state is not compared: a fresh optimizer has none yet.
    """
    there = {**facts, "tracked": sorted(facts["tracked"])}
    found = [f"{key}: {there[key]} in the checkpoint, {here[key]} here" for key in here if here[key] != there[key]]
    mine, theirs = ({n: f"{tuple(t.shape)} {t.dtype}" for n, t in s.items()} for s in (state, tensors))
    found += [
        f"{name}: {theirs.get(name, 'nothing')} in the checkpoint, {mine.get(name, 'nothing')} here"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name) and not name.startswith("optimizer")
    ]
    if found:
        raise CheckpointError(f"{directory} belongs to another run: " + "; ".join(found[:5]))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
