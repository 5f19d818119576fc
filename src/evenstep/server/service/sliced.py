"""What servers that hold slices of one model answer, beyond what any server does.

- `slice`: which of how many servers this is, and how the parameters lie over them.
- `stage`: a follower keeps an update until it is decided.
- `order`: server 0 says what it has decided; a follower is told, and applies it.
- `pause`: server 0 applies nothing for a moment.
"""

from typing import Any

from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server.service.requests import CarryOrder, Put, StageUpdate
from evenstep.server.store.following import Staged
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.store import Store
from evenstep.server.wire.slices import LAYOUT, Slices
from evenstep.server.wire.tensors import Spec, bytes_of

__all__ = ["about", "check_alone", "decided", "is_again", "order", "slices_of", "stage"]


def about(store: Store) -> dict[str, Any]:
    """Which of several servers a store is; a client checks this before it trusts a list of addresses."""
    place, slices = store.place, store.commits.slices
    found: dict[str, Any] = {
        "place": [place.index, place.count, place.name, place.split],
        "lock": store.options.lock,
    }
    if slices is not None:
        found["fingerprint"] = slices.fingerprint
    return found


def check_alone(store: Store, staged: int | None) -> None:
    """Check that a client that changes parameters knows all servers.

    Args:
        store: The store of this server.
        staged: How many servers it has staged its update at.

    Raises:
        RefusedError: It sends only to this one.
    """
    place = store.place
    if place.follows or (place.count > 1 and staged != place.count):
        raise RefusedError(
            f"this is {place}, which hold one model together: connect to all of them, their addresses in order and "
            "joined by commas",
            409,
        )


def is_again(store: Store, request: Put | StageUpdate) -> bool:
    """Whether this put was done before and only the answer was lost."""
    return request.sequence > 0 and store.commits.decisions.made_by(request.worker, request.sequence) is not None


def slices_of(store: Store, tensors: dict[str, Tensor]) -> Slices | None:
    """Take the layout of all parameters out of what was put; None if there is only one server.

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


def stage(store: Store, request: StageUpdate, part: Contribution) -> dict[str, Any]:
    """Keep an update.

    Raises:
        RefusedError: This server decides on its own, or the update could not be applied.
    """
    follower = store.follower
    slices = None
    if request.kind == "put":
        tensors = dict(part.tensors)
        slices, part = slices_of(store, tensors), Contribution(tensors)
        if not tensors.keys() >= set(request.buffers):
            raise RefusedError("buffers names tensors that were not put")
    staged = Staged(request.sequence, request.kind, part, slices, request.buffers)
    return {"version": follower.stage(request.worker, request.session, staged)}


def order(store: Store, request: CarryOrder, wait_s: float) -> dict[str, Any]:
    """What server 0 has decided since a version; or, to a follower, what to apply."""
    if not store.place.follows:
        return decided(store, request.since)
    version, done = store.follower.follow(request.order, frozenset(request.alive), wait_s)
    return {"version": version} if done else {"version": version, "pending": True, "status": 202}


def decided(store: Store, since: int) -> dict[str, Any]:
    """What server 0 has decided since a version."""
    version, decisions, alive = store.decided_since(since)
    return {"newest": version, "order": decisions, "alive": alive}
