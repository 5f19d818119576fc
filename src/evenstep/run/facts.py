"""The contents of `checkpoint.json`: checked once, where they are read, and protected by a checksum.

Whatever was done to the file, one CheckpointError says what is wrong with it.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenstep.core.errors import CheckpointError
from evenstep.core.files import read_regular

__all__ = ["FACTS", "pack", "read_facts", "seal", "unpack"]

FACTS = "checkpoint.json"
"""The name of the file."""

_FORMAT = 2
_MOST_BYTES = 1 << 26
_CHECKSUM = "checksum"
_STEM = re.compile(r"state-\d+-[0-9a-f]{8}")
_HEX = re.compile(r"[0-9a-f]{64}")

Check = Callable[[Any], bool]


def seal(facts: dict[str, Any]) -> bytes:
    """The text of the file.

    Raises:
        TypeError, ValueError: The facts are not JSON.
        CheckpointError: They are too long to be read back.
    """
    facts = json.loads(json.dumps({"format": _FORMAT, **facts}))  # as it will be read
    text = json.dumps({**facts, _CHECKSUM: _checksum(facts)}, indent=1).encode()
    if len(text) > _MOST_BYTES:
        raise CheckpointError(f"what is tracked takes {len(text)} bytes as JSON, expected at most {_MOST_BYTES}")
    return text


def read_facts(path: Path, *, either: bool = False) -> dict[str, Any]:
    """Read the file.

    Args:
        path: The file.
        either: Whether it may also be the file that takes its place while a checkpoint is being written.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: It was altered, or is of another format.
    """
    try:
        facts = json.loads(read_regular(path, _MOST_BYTES))
        if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint of format {_FORMAT}")
        if facts.pop(_CHECKSUM, None) != _checksum(facts):
            raise CheckpointError(f"{path} was altered: its checksum is not the one that it ends with")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: it is nested too deeply") from None
    for name, (is_right, expected) in (_BEGUN if either and "stems" in facts else _FIELDS).items():
        if not is_right(facts.get(name)):
            found = repr(facts[name]) if name in facts else "nothing"
            raise CheckpointError(f"{path} says {found[:60]} as '{name}', expected {expected}")
    return facts


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def pack(value: Any) -> Any:
    """A plain value as JSON that keeps what JSON would lose: keys that are not text, and tuples.

    A scheduler's state holds such things; read back as text they would be silently ignored.
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


# ---- what each field must be ----


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_packed(value: Any) -> bool:
    try:
        unpack(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _is_list(of: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _is_dict(of: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _is_position(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or not _is_list(_is_count)(value.get("read", [])):  # of the streams of the shards
        return False
    counts = {key: count for key, count in value.items() if key != "read"}
    return _is_dict(_is_count)(counts) and counts.keys() == {"epoch", "batch"}


def _is_sizes(value: Any) -> bool:
    return _is_list(_or_nothing(_is_count))(value) and len(value) == 2


def _matches(pattern: re.Pattern[str], suffix: str = "") -> Check:
    return lambda value: (
        isinstance(value, str) and value.endswith(suffix) and bool(pattern.fullmatch(value.removesuffix(suffix)))
    )


def _or_nothing(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_writer(value: Any) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [str, int]


def _is_time(value: Any) -> bool:
    return type(value) in (int, float)


_BEGUN: dict[str, tuple[Check, str]] = {
    "stems": (_is_list(_matches(_STEM)), "names of states"),
    "writer": (_is_writer, "a machine and a process"),
    "begun_s": (_is_time, "a time"),
}
_FIELDS: dict[str, tuple[Check, str]] = {
    "version": (_is_count, "a number of steps"),
    "shards": (_is_count, "a number of shards"),
    "seed": (lambda value: type(value) is int, "a whole number"),
    "optimizers": (_is_count, "a number of optimizers"),
    "position": (_is_position, "an epoch and a batch, or nothing"),
    "interleaved": (lambda value: value in (None, False, True), "whether loops took turns, or nothing"),
    "data": (_is_list(_is_sizes), "pairs of sizes"),
    "values": (lambda value: isinstance(value, dict), "values by name"),
    "groups": (_is_list(_is_packed), "options of optimizers"),
    "tracked": (_is_dict(_is_packed), "states by name"),
    "fingerprint": (_matches(_HEX), "64 hex digits"),
    "state": (_matches(_STEM, ".safetensors"), "the name of a state"),
    "sha256": (_matches(_HEX), "64 hex digits"),
    "journal": (_or_nothing(_matches(_STEM, ".journal")), "the name of a journal, or nothing"),
    "journal_sha256": (_or_nothing(_matches(_HEX)), "64 hex digits, or nothing"),
    "written_s": (_is_time, "a time"),
}
