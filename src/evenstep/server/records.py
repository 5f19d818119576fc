"""The records of a server's log: how they are written, and read back up to where the log was torn.

A record is a head with a checksum, facts as JSON, and tensors in safetensors. There are three kinds:

- an update that was applied: what the optimizer was given, and whose update it was;
- an update that a follower has staged (`follower.py`);
- a decision of server 0, by which staged updates are applied.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from evenstep.server.decisions import Decided
from evenstep.server.follower import Staged
from evenstep.server.rounds import Contribution
from evenstep.server.slices import Place, Slices
from evenstep.server.state import Applied
from evenstep.server.wire import LENGTH_BYTES, Head, encode, head_length

__all__ = [
    "Record",
    "of_applied",
    "of_decided",
    "of_staged",
    "records",
    "to_applied",
    "to_decided",
    "to_staged",
    "write",
]

Record = tuple[dict[str, Any], dict[str, Tensor]]
_HEAD = struct.Struct("<4sIQI")  # magic, bytes of facts, bytes of tensors, checksum
_MAGIC = b"EVLG"
_PIECES = 512


def write(fd: int, record: Record, *, sync: bool) -> None:
    """Append a record to a file.

    Args:
        fd: The file.
        record: Facts and tensors.
        sync: Wait until it is on the disk.
    """
    facts, tensors = record
    text = json.dumps(facts).encode()
    parts = [memoryview(text), *encode(tensors)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    left = [memoryview(_HEAD.pack(_MAGIC, len(text), sum(len(part) for part in parts[1:]), checksum)), *parts]
    while left:
        written = os.writev(fd, left[:_PIECES])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    if sync:
        os.fdatasync(fd)


def records(data: bytes) -> Iterator[Record]:
    """The records of a log, up to the first that is torn."""
    at = 0
    while (begin := at + _HEAD.size) <= len(data):
        magic, text_bytes, body_bytes, checksum = _HEAD.unpack_from(data, at)
        at = begin + text_bytes + body_bytes
        if magic != _MAGIC or at > len(data) or zlib.crc32(memoryview(data)[begin:at]) != checksum:
            return
        body = memoryview(data)[begin + text_bytes : at]
        head_bytes = LENGTH_BYTES + head_length(body[:LENGTH_BYTES], len(body))
        head = Head.parse(body[LENGTH_BYTES:head_bytes], len(body) - head_bytes)
        yield json.loads(data[begin : begin + text_bytes]), head.tensors(bytearray(body[head_bytes:] or b"\0"))


def of_applied(applied: Applied) -> Record:
    """An update that was applied."""
    facts = {
        "kind": applied.kind,
        "version": applied.version,
        "sequences": dict(applied.sequences),
        "sessions": dict(applied.sessions),
        "notes": applied.notes,
        "options": applied.options,
        "buffers": list(applied.buffers),
    }
    return facts, {**applied.tensors, **applied.buffers}


def to_applied(record: Record) -> Applied:
    """The inverse."""
    facts, tensors = record
    buffers = {name: tensors.pop(name) for name in facts["buffers"]}
    return Applied(
        facts["kind"], facts["version"], tensors, buffers, facts["sequences"], facts["notes"], facts.get("options"),
        sessions=facts.get("sessions", {}),
    )  # fmt: skip


def of_staged(worker: str, session: str, staged: Staged) -> Record:
    """An update that was staged."""
    part = staged.part
    facts = {
        "kind": "staged",
        "who": [worker, session, staged.sequence],
        "of": staged.kind,
        "samples": part.samples,
        "options": part.options,
        "shards": part.num_shards,
        "spans": [span for span, _ in part.nodes],
        "buffers": list(part.buffers),
        "untrained": staged.buffers,
        "layout": staged.slices.text.decode() if staged.slices is not None else None,
    }
    nodes = {f"{a}-{b}/{name}": tensor for (a, b), held in part.nodes for name, tensor in held.items()}
    return facts, {**part.tensors, **nodes, **part.buffers}


def to_staged(record: Record, place: Place) -> tuple[tuple[str, str], Staged]:
    """The inverse: (worker, session), and what they had staged."""
    facts, tensors = record
    worker, session, sequence = facts["who"]
    buffers = {name: tensors.pop(name) for name in facts["buffers"]}
    nodes = []
    for first, end in facts["spans"]:
        head = f"{first}-{end}/"
        held = {name.removeprefix(head): tensors.pop(name) for name in list(tensors) if name.startswith(head)}
        nodes.append(((first, end), held))
    part = Contribution(tensors, facts["samples"], nodes, facts["shards"], buffers, None, facts["options"])
    slices = Slices.read(facts["layout"], place.count, split=place.split) if facts["layout"] is not None else None
    return (worker, session), Staged(sequence, facts["of"], part, slices, tuple(facts["untrained"]))


def of_decided(decision: Decided) -> Record:
    """A decision."""
    return {"kind": "decided", "version": decision[0], "who": decision[1]}, {}


def to_decided(facts: dict[str, Any]) -> Decided:
    """The inverse."""
    return facts["version"], {worker: (sequence, session) for worker, (sequence, session) in facts["who"].items()}
