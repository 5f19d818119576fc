"""What a server's log says, as records and back.

There are three kinds:

- an update that was applied: what the optimizer was given, and whose update it was;
- an update that a follower has staged (`following.py`);
- a decision of server 0, by which staged updates are applied.
"""

from typing import Any

from evenstep.server.store.decisions import Decided
from evenstep.server.store.following import Staged
from evenstep.server.store.hyperparameters import Hyperparameters
from evenstep.server.store.log import Record
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.state import Applied
from evenstep.server.wire.slices import ServerPlace, Slices

__all__ = ["describe", "of_applied", "of_decided", "of_staged", "to_applied", "to_decided", "to_staged"]


def describe(record: Record | None) -> str:
    """What a record is about, in words, whatever it holds."""
    facts = record[0] if record is not None else {}
    kind, version = facts.get("kind"), facts.get("version")
    if kind == "staged":
        return f"an update of worker {facts.get('who', ['?'])[0]!r} that waits for server 0"
    who = facts.get("who") or facts.get("sequences")
    if isinstance(who, dict):
        return f"version {version}, by {', '.join(map(repr, who))}"
    return "what cannot be read" if record is None else f"version {version}"


def of_applied(applied: Applied) -> Record:
    """An update that was applied."""
    facts = {
        "kind": applied.kind,
        "version": applied.version,
        "sequences": dict(applied.sequences),
        "sessions": dict(applied.sessions),
        "notes": applied.notes,
        "options": list(applied.options) if applied.options is not None else None,
        "buffers": list(applied.buffers),
    }
    return facts, {**applied.tensors, **applied.buffers}


def to_applied(record: Record) -> Applied:
    """The inverse."""
    facts, tensors = record
    buffers = {name: tensors.pop(name) for name in facts["buffers"]}
    return Applied(
        facts["kind"], facts["version"], tensors, buffers, facts["sequences"], facts["notes"], _options(facts),
        sessions=facts.get("sessions", {}),
    )  # fmt: skip


def _options(facts: dict[str, Any]) -> Hyperparameters | None:
    return tuple(facts["options"]) if facts.get("options") is not None else None


def of_staged(worker: str, session: str, staged: Staged) -> Record:
    """An update that was staged."""
    part = staged.part
    facts = {
        "kind": "staged",
        "who": [worker, session, staged.sequence],
        "of": staged.kind,
        "samples": part.samples,
        "options": list(part.options) if part.options is not None else None,
        "shards": part.num_shards,
        "spans": [span for span, _ in part.nodes],
        "buffers": list(part.buffers),
        "untrained": staged.buffers,
        "layout": staged.slices.text.decode() if staged.slices is not None else None,
    }
    nodes = {f"{a}-{b}/{name}": tensor for (a, b), held in part.nodes for name, tensor in held.items()}
    return facts, {**part.tensors, **nodes, **part.buffers}


def to_staged(record: Record, place: ServerPlace) -> tuple[tuple[str, str], Staged]:
    """The inverse: (worker, session), and what they had staged."""
    facts, tensors = record
    worker, session, sequence = facts["who"]
    buffers = {name: tensors.pop(name) for name in facts["buffers"]}
    nodes = []
    for first, end in facts["spans"]:
        head = f"{first}-{end}/"
        held = {name.removeprefix(head): tensors.pop(name) for name in list(tensors) if name.startswith(head)}
        nodes.append(((first, end), held))
    part = Contribution(tensors, facts["samples"], nodes, facts["shards"], buffers, None, _options(facts))
    slices = Slices.read(facts["layout"], place.count, split=place.split) if facts["layout"] is not None else None
    return (worker, session), Staged(sequence, facts["of"], part, slices, tuple(facts["untrained"]))


def of_decided(decision: Decided) -> Record:
    """A decision."""
    return {"kind": "decided", "version": decision[0], "who": decision[1]}, {}


def to_decided(facts: dict[str, Any]) -> Decided:
    """The inverse."""
    return facts["version"], {worker: (sequence, session) for worker, (sequence, session) in facts["who"].items()}
