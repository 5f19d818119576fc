"""Functions on their way to workers, and what they return on their way back.

They travel as the cluster ships functions itself, by cloudpickle, through its own channels: whoever may submit work to
the cluster may submit this. Nothing of it is ever read from a socket or a checkpoint of ours.
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
        ConfigError: It is no function, or it or what it uses cannot travel.
    """
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise ConfigError(f"{function!r:.80} cannot be called; expected a function, or the path of a script")
    try:
        inspect.signature(function).bind(*args, **(options or {}))
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called like this: {error}") from None
    except ValueError:
        pass  # some built-in functions have no signature
    try:
        return bytes(cloudpickle.dumps((function, args, options or {})))
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be shipped to the workers: {error}; make what it uses inside of it, or pass it as an "
            "argument that can be pickled"
        ) from error


def unship(data: bytes) -> Any:
    """What a function has returned.

    Raises:
        ConfigError: It cannot be read here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ConfigError(f"what the function returned cannot be read here: {error}; return plain values") from error
