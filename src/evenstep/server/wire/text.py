"""JSON on the wire: written as short as possible, and read without trust."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from evenstep.core.errors import RefusedError

__all__ = ["read_json", "read_value", "write_json"]


def write_json(value: Any) -> bytes:
    """Write JSON as short as possible."""
    return "".join(_ENCODE(value, 0)).encode()


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """Read an untrusted JSON object.

    Raises:
        RefusedError: It is not one, or holds what `read_value` refuses.
    """
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise RefusedError(f"{what} is not JSON: {error.reason}") from None
    value = read_value(decoded, what)
    if not isinstance(value, dict):
        raise RefusedError(f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def read_value(text: str, what: str) -> Any:
    """Read untrusted JSON.

    Raises:
        RefusedError: It is not JSON, repeats a name, or holds a number that is not finite or half a character.
    """
    try:
        value = _decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(f"{what} is not JSON: it holds half of a character") from None
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{what} is not JSON: {str(error)[:200]}") from None
    return value


def _decode(text: str) -> Any:
    try:
        value, end = _DECODER.raw_decode(text)
    except ValueError:
        end = -1
    return value if end == len(text) else _DECODER.decode(text)  # raw_decode does not skip spaces


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _encoder() -> Callable[[Any, int], Iterable[str]]:
    """The encoder that json.dumps would make again for every call."""
    plain = json.JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)  # CPython only
    if make is None:
        return lambda value, _: plain.iterencode(value)
    made: Callable[[Any, int], Iterable[str]] = make(
        None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True
    )
    return made


_ENCODE = _encoder()
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
