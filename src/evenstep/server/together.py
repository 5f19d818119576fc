"""What servers that hold slices of one model answer, besides what any server does.

- `slice`: which of how many servers this is, and how the parameters lie over them.
- `stage`: a follower keeps an update until it is decided.
- `order`: server 0 says what it has decided; a follower is told, and applies it.
- `pause`: server 0 applies nothing for a moment.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server.decisions import Decided
from evenstep.server.follower import Follower, Staged
from evenstep.server.incoming import integer
from evenstep.server.rounds import Contribution
from evenstep.server.slices import LAYOUT, Slices
from evenstep.server.store import Store
from evenstep.server.wire import Spec, bytes_of

__all__ = ["about", "check_alone", "decided", "is_again", "order", "pause", "session_of", "slices_of", "stage"]

_MAX_SESSION = 64


def about(store: Store) -> dict[str, Any]:
    """Which of several servers a store is; what a client checks before it trusts a list of addresses."""
    place, slices = store.place, store.slices
    found: dict[str, Any] = {
        "place": [place.index, place.count, place.name, place.split],
        "lock": store.options.lock,
    }
    if slices is not None:
        found["fingerprint"] = slices.fingerprint
    return found


def session_of(fields: Mapping[str, Any]) -> str:
    """Which life of its worker sends a request.

    Raises:
        RefusedError: It is no short text.
    """
    session = fields.get("session", "")
    if not isinstance(session, str) or len(session) > _MAX_SESSION:
        raise RefusedError(f"session is no text of at most {_MAX_SESSION} characters")
    return session


def check_alone(store: Store, fields: Mapping[str, Any]) -> None:
    """See that somebody who changes parameters knows of all servers.

    Raises:
        RefusedError: He sends to this one alone.
    """
    place = store.place
    if place.follows or (place.count > 1 and fields.get("staged") != place.count):
        raise RefusedError(
            f"this is {place}, which hold one model together: connect to all of them, their addresses in order and "
            "joined by commas",
            409,
        )


def is_again(store: Store, fields: Mapping[str, Any]) -> bool:
    """Whether this put was done before, and only the answer was lost."""
    worker, sequence = str(fields.get("worker")), integer(fields, "sequence", 0)
    return sequence > 0 and store.decisions.made_by(worker, sequence) is not None


def slices_of(store: Store, tensors: dict[str, Tensor]) -> Slices | None:
    """Take the layout of all parameters out of what was put; None if there is one server.

    Raises:
        RefusedError: It is missing, or this server was sent other pieces than it says.
    """
    place = store.place
    if place.count == 1:
        return None
    if LAYOUT not in tensors:
        raise RefusedError(f"a put to {place} came without the layout of all parameters ('{LAYOUT}')")
    slices = Slices.read(bytes(bytes_of(tensors.pop(LAYOUT))), place.count, split=place.split)
    expected, found = slices.specs(place.index), {name: Spec.of(tensor) for name, tensor in tensors.items()}
    if found != expected:
        name = next(n for n in [*expected, *found] if expected.get(n) != found.get(n))
        raise RefusedError(f"'{name}' came as {found.get(name)} to {place}, expected {expected.get(name)}")
    return slices


def stage(store: Store, worker: str, fields: Mapping[str, Any], part: Contribution) -> dict[str, Any]:
    """Keep an update.

    Raises:
        RefusedError: This server decides by itself, or the update could not be applied.
    """
    follower = _follower(store)
    kind, sequence = str(fields.get("kind", "gradient")), integer(fields, "sequence", 0, 1)
    slices, buffers = None, fields.get("buffers", [])
    if kind == "put":
        tensors = dict(part.tensors)
        slices, part = slices_of(store, tensors), Contribution(tensors)
        if not isinstance(buffers, list) or not all(name in tensors for name in buffers):
            raise RefusedError("buffers is no list of tensors that were put")
    staged = Staged(sequence, kind, part, slices, tuple(buffers))
    return {"version": follower.stage(worker, session_of(fields), staged)}


def order(store: Store, fields: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
    """What server 0 has decided since a version; or, to a follower, what it shall apply.

    Raises:
        RefusedError: The fields make no sense.
    """
    if not store.place.follows:
        return decided(store, fields)
    decisions, alive = _decisions(fields.get("order")), fields.get("alive", [])
    if not isinstance(alive, list):
        raise RefusedError("alive is no list of workers")
    version, done = _follower(store).follow(decisions, frozenset(map(str, alive)), wait_s)
    return {"version": version} if done else {"version": version, "pending": True, "status": 202}


def decided(store: Store, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What server 0 has decided since a version."""
    version, decisions, alive = store.decided_since(integer(fields, "since", -1, -1))
    return {"newest": version, "order": decisions, "alive": alive}


def pause(store: Store, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Apply nothing for a moment, or go on."""
    return {"version": store.pause(bool(fields.get("on")))}


def _follower(store: Store) -> Follower:
    if not isinstance(store, Follower):
        raise RefusedError(f"this is {store.place}: it decides by itself, and keeps nothing for later", 409)
    return store


def _decisions(value: Any) -> list[Decided]:
    try:
        found = [(int(v), {str(w): (int(s), str(session)) for w, (s, session) in who.items()}) for v, who in value]
    except (TypeError, ValueError, AttributeError):
        found = [(0, {})]
    if not all(who for _, who in found):
        raise RefusedError("order is no list of [version, {worker: [sequence, session]}]")
    return found
