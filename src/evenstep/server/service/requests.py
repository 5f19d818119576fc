"""Requests as typed values: every field of every request is read here, once, however it came.

A request is a verb and fields. Each verb has a class below with its fields, their types, bounds and defaults (null is
the default). Anything else is refused with one sentence before it goes any further.

`parse` takes fields from JSON; `from_query` takes them from an address.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

from evenstep.core.errors import RefusedError
from evenstep.plan import tree
from evenstep.server.service import fields
from evenstep.server.wire.text import read_value

__all__ = [
    "VERBS",
    "CarryOrder",
    "Changed",
    "Flush",
    "Get",
    "Leave",
    "Meet",
    "Pause",
    "Put",
    "Register",
    "Request",
    "Slice",
    "StageUpdate",
    "Status",
    "Update",
    "Wait",
    "from_query",
    "parse",
]

# ---- the requests ----


class Register(NamedTuple):
    """Register a worker, or show that it is alive."""

    worker: fields.Worker
    session: fields.Session = ""


class Leave(NamedTuple):
    """Unregister a worker."""

    worker: fields.Worker


class Put(NamedTuple):
    """Give the parameters their values. The tensors follow."""

    worker: fields.Worker
    force: fields.Flag = False
    buffers: fields.Names = ()
    sequence: fields.Number = 0
    session: fields.Session = ""
    staged: fields.Servers = None
    optimizer: fields.SomeRecipe = None


class Get(NamedTuple):
    """Get parameters, or the state of the optimizer."""

    names: fields.SomeNames = None
    min_version: fields.Number = 0
    since: fields.SomeNumber = None
    wait_s: fields.Seconds = 0.0
    bfloat16: fields.Flag = False
    versions: fields.Flag = False
    optimizer: fields.FramedFlag = False
    place_only: fields.FramedFlag = False
    layout: fields.FramedFlag = False


class Update(NamedTuple):
    """Apply an update. The tensors follow."""

    worker: fields.Worker
    sequence: fields.Sequence
    session: fields.Session = ""
    kind: fields.Kind = "gradient"
    base: fields.SomeNumber = None
    samples: fields.Number = 1
    shards: fields.Shards = None
    spans: fields.Spans = ()
    buffers: fields.Names = ()
    note: fields.Note = None
    options: fields.Options = None
    wait_s: fields.Seconds = 0.0
    staged: fields.Servers = None
    since: fields.Since = -1


class StageUpdate(NamedTuple):
    """Keep an update until it is decided. The tensors follow."""

    worker: fields.Worker
    sequence: fields.Sequence
    session: fields.Session = ""
    kind: fields.StagedKind = "gradient"
    samples: fields.Number = 1
    shards: fields.Shards = None
    spans: fields.Spans = ()
    buffers: fields.Names = ()
    options: fields.Options = None
    force: fields.Flag = False


class Wait(NamedTuple):
    """Wait for an update, or for this worker's turn."""

    worker: fields.Worker
    sequence: fields.SomeSequence = None
    wait_s: fields.Seconds = 0.0


class Changed(NamedTuple):
    """Report that parameters were changed in shared memory."""

    worker: fields.Worker
    names: fields.Names = ()


class Status(NamedTuple):
    """Ask for everything that people may want to see."""


class Slice(NamedTuple):
    """Ask which of several servers this is."""

    layout: fields.Flag = False


class CarryOrder(NamedTuple):
    """Ask server 0 what it has decided; or tell another server what to apply."""

    since: fields.Since = -1
    order: fields.Decisions = ()
    alive: fields.Alive = ()
    wait_s: fields.Seconds = 0.0


class Pause(NamedTuple):
    """Apply nothing for a moment, or go on."""

    on: fields.Flag = False


class Meet(NamedTuple):
    """Come to a meeting."""

    worker: fields.Worker
    tag: fields.Tag
    value: fields.Value = None
    count: fields.Comers = 1  # type: ignore[assignment]  # nobody counts in a request
    wait_s: fields.Seconds = 0.0


class Flush(NamedTuple):
    """Wait until all others were told."""

    wait_s: fields.Seconds = 0.0


Request = (
    Register
    | Leave
    | Put
    | Get
    | Update
    | StageUpdate
    | Wait
    | Changed
    | Status
    | Slice
    | CarryOrder
    | Pause
    | Meet
    | Flush
)

VERBS: Mapping[str, type[Request]] = {
    "register": Register,
    "leave": Leave,
    "put": Put,
    "get": Get,
    "update": Update,
    "wait": Wait,
    "changed": Changed,
    "status": Status,
    "slice": Slice,
    "stage": StageUpdate,
    "order": CarryOrder,
    "pause": Pause,
    "meet": Meet,
    "flush": Flush,
}

_REQUIRED = object()


class _Form:
    """How the requests of one verb are read."""

    def __init__(self, kind: type[Request]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.kind = kind
        self.reads: dict[str, fields.Field] = {name: hints[name].__metadata__[0] for name in kind._fields}
        self.places = {name: (place, how.read) for place, (name, how) in enumerate(self.reads.items())}
        self.defaults = [kind._field_defaults.get(name, _REQUIRED) for name in kind._fields]


_FORMS = {verb: _Form(kind) for verb, kind in VERBS.items()}


def _form(verb: str) -> _Form:
    form = _FORMS.get(verb)
    if form is None:
        raise RefusedError(f"there is no verb {fields.shown(verb)}; expected one of {', '.join(VERBS)}", 404)
    return form


def parse(verb: str, given: Mapping[str, Any]) -> Request:
    """A request from a verb and fields.

    Raises:
        RefusedError: There is no such verb; a field is missing, unknown, of another type, or out of bounds.
    """
    form = _form(verb)
    places, values = form.places, form.defaults.copy()
    for name, value in given.items():
        if name not in places:
            raise _unknown(verb, name, places)
        if value is not None:
            place, read = places[name]
            values[place] = read(name, value)
    if _REQUIRED in values:
        raise RefusedError(f"'{verb}' came without {form.kind._fields[values.index(_REQUIRED)]}")
    request: Request = form.kind._make(values)
    if isinstance(request, Update | StageUpdate) and (request.shards is not None or request.spans):
        _check_nodes(request)
    return request


def _unknown(verb: str, name: Any, known: Iterable[str]) -> RefusedError:
    there = ", ".join(sorted(known)) or "none"
    return RefusedError(f"'{verb}' has no field {fields.shown(name)}; its fields are: {there}")


def _check_nodes(request: Update | StageUpdate) -> None:
    """Check that spans are nodes of the tree over the shards."""
    if request.shards is None:
        raise RefusedError("spans came without shards")
    nodes = tree.tree_nodes(request.shards)
    for span in request.spans:
        if span not in nodes:
            raise RefusedError(f"{list(span)} is not a node of the tree over {request.shards} shards")
    if any(a[1] > b[0] for a, b in pairwise(request.spans)):
        raise RefusedError("spans overlap, or are not in order")


def from_query(verb: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fields from the parameters of an address: text, or else JSON; a list of names may be `a,b`.

    Raises:
        RefusedError: One is unknown, repeated, or not JSON.
    """
    reads = {name: how for name, how in _form(verb).reads.items() if not how.framed}
    found: dict[str, Any] = {}
    for name, text in pairs:
        how = reads.get(name)
        if how is None:
            raise _unknown(verb, name, reads)
        if name in found:
            raise RefusedError(f"{name} was given twice")
        if how.text:
            found[name] = text
            continue
        try:
            found[name] = read_value(text, f"{name}={fields.shown(text)}")
        except RefusedError:
            if not how.listed:
                raise
            found[name] = text.split(",")
    return found
