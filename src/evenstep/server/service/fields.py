"""The fields of requests: their types and bounds, and how they are read from JSON.

A field is a type annotated with a `Field`. Any other value is refused with one sentence.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from evenstep.core.errors import RefusedError
from evenstep.server.store.decisions import Decided
from evenstep.server.store.hyperparameters import Hyperparameters
from evenstep.server.wire.recipes import Recipe
from evenstep.server.wire.text import write_json

__all__ = ["Field", "Span", "read_whole", "shown"]

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

Span = tuple[int, int]


class Field(NamedTuple):
    """How a field is read.

    Attributes:
        read: Reads it, given its name and value; raises RefusedError.
        text: In an address it is the text itself, not JSON.
        listed: In an address it may be `a,b` instead of JSON.
        framed: It is allowed in frames only.
    """

    read: Callable[[str, Any], Any]
    text: bool = False
    listed: bool = False
    framed: bool = False


def shown(value: Any) -> str:
    """A value as it is shown to its sender."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


# ---- numbers, flags and texts ----


def read_whole(name: str, value: Any, low: int = 0, high: int = _MOST) -> int:
    """A whole number within bounds.

    Raises:
        RefusedError: It is not one.
    """
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(f"{name}={shown(value)}, expected a whole number from {low} to {high}")
    return value


def _whole(low: int = 0, high: int = _MOST) -> Field:
    return Field(lambda name, value: read_whole(name, value, low, high))


def _seconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST:
        raise RefusedError(f"{name}={shown(value)}, expected a number of seconds")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if type(value) is bool or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise RefusedError(f"{name}={shown(value)}, expected true or false")


def _name(name: str, value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise RefusedError(f"{name}={shown(value)}, expected a name of at most {_MAX_NAME} characters")
    return value


def _session(name: str, value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_SESSION:
        raise RefusedError(f"{name}={shown(value)}, expected at most {_MAX_SESSION} characters")
    return value


def _one_of(*choices: str) -> Field:
    def read(name: str, value: Any) -> str:
        if type(value) is not str or value not in choices:
            raise RefusedError(f"{name}={shown(value)}, expected one of {', '.join(choices)}")
        return value

    return Field(read, text=True)


Worker = Annotated[str, Field(_name, text=True)]
Tag = Annotated[str, Field(_name, text=True)]
Session = Annotated[str, Field(_session, text=True)]
Kind = Annotated[str, _one_of("gradient", "delta", "peer")]
StagedKind = Annotated[str, _one_of("gradient", "delta", "peer", "put")]
Number = Annotated[int, _whole()]
SomeNumber = Annotated[int | None, _whole()]
Sequence = Annotated[int, _whole(1)]
SomeSequence = Annotated[int | None, _whole(1)]
Since = Annotated[int, _whole(-1)]
Servers = Annotated[int | None, _whole(1, _MAX_SERVERS)]
Shards = Annotated[int | None, _whole(1, _MAX_SHARDS)]
Comers = Annotated[int, _whole(1, _MAX_MEETING)]
Flag = Annotated[bool, Field(_flag)]
FramedFlag = Annotated[bool, Field(_flag, framed=True)]
Seconds = Annotated[float, Field(_seconds)]


# ---- lists, and what is made of them ----


def _names(name: str, value: Any) -> tuple[str, ...]:
    if type(value) is not list or not all(type(each) is str for each in value):
        raise RefusedError(f"{name}={shown(value)}, expected a list of names")
    return tuple(value)


def _spans(name: str, value: Any) -> tuple[Span, ...]:
    if type(value) is not list or not all(
        type(each) is list and len(each) == 2 and all(type(end) is int for end in each) for each in value
    ):
        raise RefusedError(f"{name}={shown(value)}, expected a list of [first, end]")
    return tuple((first, end) for first, end in value)


def _is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, type(None))


def _are_options(value: Any) -> bool:
    return type(value) is dict and all(
        _is_plain(each) or (type(each) is list and all(map(_is_plain, each))) for each in value.values()
    )


def _options(name: str, value: Any) -> Hyperparameters:
    if type(value) is not list or not all(map(_are_options, value)):
        raise RefusedError(
            f"{name}={shown(value)}, expected a list with the options of each group: [{{option: value}}]"
        )
    return tuple(value)


def _recipe(name: str, value: Any) -> Recipe:
    groups = value.get("groups") if type(value) is dict else None
    if type(groups) is not list or type(value.get("class")) is not str or value.keys() != {"class", "groups"}:
        raise RefusedError(f'{name}={shown(value)}, expected {{"class": ..., "groups": [...]}}')
    for group in groups:
        names = group.get("names") if type(group) is dict else None
        if type(names) is not list or not all(type(each) is str for each in names) or not _are_options(group):
            raise RefusedError(f"{name} has a group {shown(group)}, expected a list of names, and options")
    recipe: Recipe = value
    return recipe


def _decisions(name: str, value: Any) -> tuple[Decided, ...]:
    if type(value) is not list or not all(
        type(each) is list and len(each) == 2 and type(each[1]) is dict and each[1] for each in value
    ):
        raise RefusedError(f"{name}={shown(value)}, expected a list of [version, {{worker: [sequence, session]}}]")
    return tuple((read_whole("version", version), _contributors(name, who)) for version, who in value)


def _contributors(name: str, who: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    found = {}
    for worker, update in who.items():
        if type(update) is not list or len(update) != 2:
            raise RefusedError(f"{name} has {shown(update)}, expected [sequence, session]")
        found[_name("worker", worker)] = (read_whole("sequence", update[0]), _session("session", update[1]))
    return found


def _anything(most: int) -> Field:
    def read(name: str, value: Any) -> Any:
        if _depth(value) > _MAX_DEPTH:
            raise RefusedError(f"{name} is nested too deeply, expected at most {_MAX_DEPTH} levels")
        if len(write_json(value)) > most:
            raise RefusedError(f"{name} is longer than {most} characters", 413)
        return value

    return Field(read)


def _depth(value: Any, at: int = 0) -> int:
    if at > _MAX_DEPTH or type(value) not in (list, dict):
        return at
    return max((_depth(each, at + 1) for each in (value.values() if type(value) is dict else value)), default=at)


Names = Annotated[tuple[str, ...], Field(_names, listed=True)]
SomeNames = Annotated[tuple[str, ...] | None, Field(_names, listed=True)]
Alive = Annotated[tuple[str, ...], Field(_names)]
Spans = Annotated[tuple[Span, ...], Field(_spans)]
Options = Annotated[Hyperparameters | None, Field(_options)]
SomeRecipe = Annotated[Recipe | None, Field(_recipe, framed=True)]
Decisions = Annotated[tuple[Decided, ...], Field(_decisions)]
Note = Annotated[Any, _anything(_MAX_NOTE)]
Value = Annotated[Any, _anything(_MAX_VALUE)]
