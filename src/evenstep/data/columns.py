"""Columns of Arrow tables as arrays: one row for each sample, no nulls, rows of one length.

Tasks of a cluster that only write rows need not wait for torch: it is not imported here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from evenstep.core.errors import ConfigError

__all__ = ["Column", "check_type", "column_of", "flatten", "is_list", "is_text"]

Column = np.ndarray[Any, Any] | list[str] | list[bytes]
"""``[rows, ...]`` of numbers, or texts."""

_WIDER = {"uint16": np.int32, "uint32": np.int64}  # torch has few operations for the narrower types


def check_type(name: str, kind: pa.DataType) -> None:
    """Check that a column can become an array, or texts.

    Raises:
        ConfigError: It cannot.
    """
    if pa.types.is_null(kind):
        raise ConfigError(
            f"column {name!r} has only nulls, at least in some part of the data; fill it, or leave such rows out"
        )
    leaf = kind
    while is_list(leaf):
        leaf = leaf.value_type
    is_number = pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf)
    if not (is_number and leaf != pa.uint64()) and not is_text(kind):
        raise ConfigError(
            f"column {name!r} is {kind}; expected numbers, lists of numbers of one length, text or bytes: convert it, "
            "or name the others in columns=[...]"
        )


def column_of(name: str, values: pa.ChunkedArray | pa.Array, where: str) -> Column:
    """A column as an array ``[rows, ...]``, or a list of texts; the numbers are copied once.

    Args:
        name: The name of the column, for errors.
        values: Its values.
        where: Where they come from, for errors.

    Raises:
        ConfigError: A value is null, or the lists differ in length.
    """
    if values.null_count:
        row = values.is_null().index(pa.scalar(True)).as_py()
        raise ConfigError(f"column {name!r} of {where} has no value in row {row}; fill it, or leave such rows out")
    if is_text(values.type):
        return values.to_pylist()  # type: ignore[no-any-return]  # texts
    if not is_list(values.type):
        return _numbers(values)
    shape = [len(values)]
    while is_list(values.type):
        length = _length(name, values, where)
        shape.append(length)
        values = flatten(values)
        if values.null_count:
            row = values.is_null().index(pa.scalar(True)).as_py() // max(1, _product(shape[1:]))
            raise ConfigError(
                f"column {name!r} of {where} has an element without a value in row {row}; fill it, or leave such rows "
                "out"
            )
    return _numbers(values).reshape(shape)


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are text or bytes."""
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _product(sizes: Sequence[int]) -> int:
    return int(np.prod(sizes, dtype=np.int64))


def flatten(values: Any) -> Any:
    """What the lists of a column hold, one after the other."""
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array([chunk.flatten() for chunk in values.chunks], values.type.value_type)
    return values.flatten()


def _length(name: str, values: Any, where: str) -> int:
    """How long every list of a column is."""
    if pa.types.is_fixed_size_list(values.type):
        return int(values.type.list_size)
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks] or [np.zeros(0, np.int64)])
    if not len(lengths):
        return 0
    different = np.flatnonzero(lengths != lengths[0])
    if len(different):
        row = int(different[0])
        raise ConfigError(
            f"column {name!r} of {where} has {lengths[0]} numbers in row 0 but {lengths[row]} in row {row}; expected "
            "as many in each: pad them"
        )
    return int(lengths[0])


def _numbers(values: Any) -> np.ndarray[Any, Any]:
    array = values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else values.to_numpy()
    array = array.astype(_WIDER.get(array.dtype.name, array.dtype), copy=not array.flags.writeable)
    return np.ascontiguousarray(array)
