"""Pairs of features and label, the elements of an RDD, as rows of a DataFrame.

Importing this module does not import torch, which the processes that convert them do not need.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenstep.core.errors import ConfigError

__all__ = ["FEATURES", "LABEL", "as_row", "kinds_of"]

FEATURES, LABEL = "features", "label"


def as_row(pair: Any, kinds: Sequence[str]) -> tuple[Any, Any]:
    """A pair as Spark takes it, without a look of its own at every number.

    Raises:
        ConfigError: It is not of the kinds that the first one is of.
    """
    for name, value, found, expected in zip((FEATURES, LABEL), pair, kinds_of(pair), kinds, strict=True):
        if value is not None and _shape_of(found) != _shape_of(expected):
            raise ConfigError(
                f"the {name} of a row are of the kind {found}, and those of the first row {expected}; expected one "
                "kind: make all of them floats, or all whole numbers, with as many dimensions"
            )
    features, label = map(_plain, pair)
    return features, label


def kinds_of(pair: Any) -> tuple[str, str]:
    """The kinds of features and label, as Spark calls them.

    Raises:
        ConfigError: It is not a pair of numbers or arrays of numbers.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ConfigError(f"a row is {pair!r:.80}; expected a pair: features and label")
    return _kind(pair[0]), _kind(pair[1])


def _kind(value: Any) -> str:
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" and value is not None:
        raise ConfigError(f"a row has {value!r:.80}; expected a number or an array of numbers")
    text = "bigint" if array.dtype.kind in "biu" else "double" if array.dtype == np.float64 else "float"
    for _ in range(array.ndim):
        text = f"array<{text}>"
    return text


def _shape_of(kind: str) -> tuple[bool, int]:
    return "bigint" in kind, kind.count("array<")


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return (array.astype(np.int64) if array.dtype.kind == "b" else array).tolist()
