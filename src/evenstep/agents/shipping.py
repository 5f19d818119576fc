"""Serializing functions for the workers, and their results for the caller.

They travel as the cluster's own functions do: by cloudpickle, through its channels. Anyone who may submit work to the
cluster may submit this. None of it is ever read from one of our sockets or checkpoints.
"""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from evenstep.core.errors import ConfigError

__all__ = ["ship", "unship"]


def ship(function: Callable[..., Any], args: tuple[Any, ...] = (), options: dict[str, Any] | None = None) -> bytes:
    """A call as bytes.

    Raises:
        ConfigError: It is not a function, or something that it uses cannot be pickled.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise ConfigError(f"{function!r:.80} cannot be called; expected a function or the path of a script")
    try:
        inspect.signature(function).bind(*args, **(options or {}))
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called with these arguments: {error}") from None
    except ValueError:
        pass  # some built-in functions have no signature
    try:
        return bytes(cloudpickle.dumps((function, args, options or {})))
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be shipped to the workers: {error}; create what it uses inside the function, or pass it as "
            "an argument that can be pickled"
        ) from error


def unship(data: bytes) -> Any:
    """What a function returned.

    Raises:
        ConfigError: It cannot be unpickled here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ConfigError(f"what the function returned cannot be read here: {error}; return plain values") from error
