"""Requests as typed values: every field of every request is read here, once, whichever way it came.

A request is a verb and fields. Each verb has a class below that says which fields there are, of which type, within
which bounds, and what they are if they are left out (or null, which is the same). Whatever does not fit is refused with
one sentence before anything else looks at it.

`parse` takes fields as JSON has them; `from_query` takes them out of an address.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, get_type_hints

from evenstep.core.errors import RefusedError
from evenstep.plan import tree
from evenstep.server.store.decisions import Decided
from evenstep.server.store.hyperparameters import Hyperparameters
from evenstep.server.wire.recipes import Recipe
from evenstep.server.wire.text import read_value, write_json

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
    "whole",
]

_MAX_NAME = 200
_MAX_SESSION = 64
_MAX_SHARDS = 256
_MAX_SERVERS = 64
_MAX_MEETING = 256
_MAX_NOTE = 16384  # characters
_MAX_VALUE = 1 << 20
_MAX_DEPTH = 32
_MOST = 1 << 62
_SHOWN = 40

Reader = Callable[[str, Any], Any]
Span = tuple[int, int]


class _Read(NamedTuple):
    """How a field is read.

    Attributes:
        read: From its name and value; raises RefusedError.
        text: In an address it is the text itself, not JSON.
        listed: In an address it may be `a,b` instead of JSON.
        framed: It is for frames only.
    """

    read: Reader
    text: bool = False
    listed: bool = False
    framed: bool = False


# ---- how fields are read ----


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def whole(name: str, value: Any, low: int = 0, high: int = _MOST) -> int:
    """A whole number within bounds.

    Raises:
        RefusedError: It is none.
    """
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(f"{name}={_shown(value)}, expected a whole number from {low} to {high}")
    return value


def _whole(low: int = 0, high: int = _MOST) -> _Read:
    return _Read(lambda name, value: whole(name, value, low, high))


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST:
        raise RefusedError(f"{name}={_shown(value)}, expected a number of seconds")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if type(value) is bool or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise RefusedError(f"{name}={_shown(value)}, expected true or false")


def _name(name: str, value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise RefusedError(f"{name}={_shown(value)}, expected a name of at most {_MAX_NAME} characters")
    return value


def _session(name: str, value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_SESSION:
        raise RefusedError(f"{name}={_shown(value)}, expected at most {_MAX_SESSION} characters")
    return value


def _one_of(*choices: str) -> _Read:
    def read(name: str, value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise RefusedError(f"{name}={_shown(value)}, expected one of {', '.join(choices)}")
        return value

    return _Read(read, text=True)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if type(value) is not list or not all(type(each) is str for each in value):
        raise RefusedError(f"{name}={_shown(value)}, expected a list of names")
    return tuple(value)


def _spans(name: str, value: Any) -> tuple[Span, ...]:
    if type(value) is not list or not all(
        type(each) is list and len(each) == 2 and all(type(end) is int for end in each) for each in value
    ):
        raise RefusedError(f"{name}={_shown(value)}, expected a list of [first, end]")
    return tuple((first, end) for first, end in value)


def _anything(most: int) -> _Read:
    def read(name: str, value: Any) -> Any:
        if _depth(value) > _MAX_DEPTH:
            raise RefusedError(f"{name} is nested too deeply, expected at most {_MAX_DEPTH} levels")
        if len(write_json(value)) > most:
            raise RefusedError(f"{name} is longer than {most} characters", 413)
        return value

    return _Read(read)


def _depth(value: Any, at: int = 0) -> int:
    if at > _MAX_DEPTH or type(value) not in (list, dict):
        return at
    return max((_depth(each, at + 1) for each in (value.values() if type(value) is dict else value)), default=at)


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, type(None))


def _are_options(value: Any) -> bool:
    return type(value) is dict and all(
        _is_plain(each) or (type(each) is list and all(map(_is_plain, each))) for each in value.values()
    )


def _options(name: str, value: Any) -> Hyperparameters:
    if type(value) is not list or not all(map(_are_options, value)):
        raise RefusedError(
            f"{name}={_shown(value)}, expected a list with the options of each group: [{{option: value}}]"
        )
    return tuple(value)


def _recipe(name: str, value: Any) -> Recipe:
    groups = value.get("groups") if type(value) is dict else None
    if type(groups) is not list or type(value.get("class")) is not str or value.keys() != {"class", "groups"}:
        raise RefusedError(f'{name}={_shown(value)}, expected {{"class": ..., "groups": [...]}}')
    for group in groups:
        names = group.get("names") if type(group) is dict else None
        if type(names) is not list or not all(type(each) is str for each in names) or not _are_options(group):
            raise RefusedError(f"{name} has a group {_shown(group)}, expected a list of names, and options")
    recipe: Recipe = value
    return recipe


def _decisions(name: str, value: Any) -> tuple[Decided, ...]:
    if type(value) is not list or not all(
        type(each) is list and len(each) == 2 and type(each[1]) is dict and each[1] for each in value
    ):
        raise RefusedError(f"{name}={_shown(value)}, expected a list of [version, {{worker: [sequence, session]}}]")
    return tuple((whole("version", version), _contributors(name, who)) for version, who in value)


def _contributors(name: str, who: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    found = {}
    for worker, update in who.items():
        if type(update) is not list or len(update) != 2:
            raise RefusedError(f"{name} has {_shown(update)}, expected [sequence, session]")
        found[_name("worker", worker)] = (whole("sequence", update[0]), _session("session", update[1]))
    return found


_Worker = Annotated[str, _Read(_name, text=True)]
_Session = Annotated[str, _Read(_session, text=True)]
_Names = Annotated[tuple[str, ...], _Read(_names, listed=True)]
_Version = Annotated[int, _whole()]
_Flag = Annotated[bool, _Read(_flag)]
_FramedFlag = Annotated[bool, _Read(_flag, framed=True)]
_Seconds = Annotated[float, _Read(_seconds)]
_Shards = Annotated[int | None, _whole(1, _MAX_SHARDS)]
_Options = Annotated[Hyperparameters | None, _Read(_options)]
_Kind = Annotated[str, _one_of("gradient", "delta", "peer")]


# ---- the requests ----


class Register(NamedTuple):
    """A worker begins, or shows that it lives."""

    worker: _Worker
    session: _Session = ""


class Leave(NamedTuple):
    """A worker goes."""

    worker: _Worker


class Put(NamedTuple):
    """Give the parameters their values. The tensors follow."""

    worker: _Worker
    force: _Flag = False
    buffers: _Names = ()
    sequence: _Version = 0
    session: _Session = ""
    staged: Annotated[int | None, _whole(1, _MAX_SERVERS)] = None
    optimizer: Annotated[Recipe | None, _Read(_recipe, framed=True)] = None


class Get(NamedTuple):
    """Get parameters, or the state of the optimizer."""

    names: Annotated[tuple[str, ...] | None, _Read(_names, listed=True)] = None
    min_version: _Version = 0
    since: Annotated[int | None, _whole()] = None
    wait_s: _Seconds = 0.0
    bfloat16: _Flag = False
    versions: _Flag = False
    optimizer: _FramedFlag = False
    place_only: _FramedFlag = False
    layout: _FramedFlag = False


class Update(NamedTuple):
    """Apply an update. The tensors follow."""

    worker: _Worker
    sequence: Annotated[int, _whole(1)]
    session: _Session = ""
    kind: _Kind = "gradient"
    base: Annotated[int | None, _whole()] = None
    samples: _Version = 1
    shards: _Shards = None
    spans: Annotated[tuple[Span, ...], _Read(_spans)] = ()
    buffers: _Names = ()
    note: Annotated[Any, _anything(_MAX_NOTE)] = None
    options: _Options = None
    wait_s: _Seconds = 0.0
    staged: Annotated[int | None, _whole(1, _MAX_SERVERS)] = None
    since: Annotated[int, _whole(-1)] = -1


class StageUpdate(NamedTuple):
    """Keep an update until it is decided. The tensors follow."""

    worker: _Worker
    sequence: Annotated[int, _whole(1)]
    session: _Session = ""
    kind: Annotated[str, _one_of("gradient", "delta", "peer", "put")] = "gradient"
    samples: _Version = 1
    shards: _Shards = None
    spans: Annotated[tuple[Span, ...], _Read(_spans)] = ()
    buffers: _Names = ()
    options: _Options = None
    force: _Flag = False


class Wait(NamedTuple):
    """Wait for an update, or for one's turn."""

    worker: _Worker
    sequence: Annotated[int | None, _whole(1)] = None
    wait_s: _Seconds = 0.0


class Changed(NamedTuple):
    """Parameters were changed in shared memory."""

    worker: _Worker
    names: _Names = ()


class Status(NamedTuple):
    """Everything that people may want to see."""


class Slice(NamedTuple):
    """Which of several servers this is."""

    layout: _Flag = False


class CarryOrder(NamedTuple):
    """What server 0 has decided; to another: what it shall apply."""

    since: Annotated[int, _whole(-1)] = -1
    order: Annotated[tuple[Decided, ...], _Read(_decisions)] = ()
    alive: Annotated[tuple[str, ...], _Read(_names)] = ()
    wait_s: _Seconds = 0.0


class Pause(NamedTuple):
    """Apply nothing for a moment, or go on."""

    on: _Flag = False


class Meet(NamedTuple):
    """Come to a meeting."""

    worker: _Worker
    tag: Annotated[str, _Read(_name, text=True)]
    value: Annotated[Any, _anything(_MAX_VALUE)] = None
    count: Annotated[int, _whole(1, _MAX_MEETING)] = 1  # type: ignore[assignment]  # nobody counts in a request
    wait_s: _Seconds = 0.0


class Flush(NamedTuple):
    """Wait until all others were told."""

    wait_s: _Seconds = 0.0


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
        self.reads: dict[str, _Read] = {name: hints[name].__metadata__[0] for name in kind._fields}
        self.places = {name: (place, how.read) for place, (name, how) in enumerate(self.reads.items())}
        self.defaults = [kind._field_defaults.get(name, _REQUIRED) for name in kind._fields]


_FORMS = {verb: _Form(kind) for verb, kind in VERBS.items()}


def _form(verb: str) -> _Form:
    form = _FORMS.get(verb)
    if form is None:
        raise RefusedError(f"there is no verb {_shown(verb)}; expected one of {', '.join(VERBS)}", 404)
    return form


def parse(verb: str, fields: Mapping[str, Any]) -> Request:
    """A request from a verb and fields.

    Raises:
        RefusedError: There is no such verb; a field is missing, unknown, of another type, or out of bounds.
    """
    form = _form(verb)
    places, values = form.places, form.defaults.copy()
    for name, value in fields.items():
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
    return RefusedError(f"'{verb}' has no field {_shown(name)}; there are: {there}")


def _check_nodes(request: Update | StageUpdate) -> None:
    """See that spans are nodes of the tree over the shards."""
    if request.shards is None:
        raise RefusedError("spans came without shards")
    nodes = tree.tree_nodes(request.shards)
    for span in request.spans:
        if span not in nodes:
            raise RefusedError(f"{list(span)} is no node of the tree over {request.shards} shards")
    if any(a[1] > b[0] for a, b in pairwise(request.spans)):
        raise RefusedError("spans overlap, or are not in order")


def from_query(verb: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fields out of the parameters of an address: those that are no text are JSON, and a list of names may be `a,b`.

    Raises:
        RefusedError: One is unknown, there twice, or no JSON.
    """
    reads = {name: how for name, how in _form(verb).reads.items() if not how.framed}
    fields: dict[str, Any] = {}
    for name, text in pairs:
        how = reads.get(name)
        if how is None:
            raise _unknown(verb, name, reads)
        if name in fields:
            raise RefusedError(f"{name} is there twice")
        if how.text:
            fields[name] = text
            continue
        try:
            fields[name] = read_value(text, f"{name}={_shown(text)}")
        except RefusedError:
            if not how.listed:
                raise
            fields[name] = text.split(",")
    return fields
