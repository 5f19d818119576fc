"""Rows ordered by their content: any writer, from any number of parts, produces the same files.

A row's key is 64 bits mixed from its values, or from those of one column that the user names. The high bits say which
file it belongs to, and a file is sorted by key, then by content. Rows that tie in both are identical.
"""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evenstep.core.errors import ConfigError
from evenstep.data.columns import check_type, column_of, flatten, is_list, is_text

__all__ = ["FILE", "KEY", "keyed", "num_files", "size_of", "write_file"]

KEY, FILE = "evenstep_key", "evenstep_file"
"""The columns that `keyed` adds: the sort key, and the number of the file."""

_ROWS_OF_A_FILE, _BYTES_OF_A_FILE = 65536, 2**26  # whoever writes a file has all of it in memory
_ROWS_OF_A_GROUP, _BYTES_OF_A_GROUP = 16384, 2**24
_MOST_FILES = 4096
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def num_files(num_rows: int, num_bytes: int) -> int:
    """How many files rows of so many bytes (see `size_of`) are written to: a power of two, fixed by this alone."""
    files = 1
    while files < _MOST_FILES and (files * _ROWS_OF_A_FILE < num_rows or files * _BYTES_OF_A_FILE < num_bytes):
        files *= 2
    return files


def size_of(table: pa.Table) -> int:
    """How many bytes the values of a table have, whatever memory Arrow takes for them."""
    return sum(map(_size_of, table.columns))


def _size_of(values: Any) -> int:
    while is_list(values.type):
        values = flatten(values)
    if is_text(values.type):
        return int(pc.sum(pc.binary_length(values)).as_py() or 0)
    return len(values) * (max(8, values.type.bit_width) // 8 if pa.types.is_primitive(values.type) else 0)


def keyed(table: pa.Table, columns: Sequence[str], key: str | None, files: int, where: str = "the data") -> pa.Table:
    """Some columns of a table, with the key and file number of each row.

    Args:
        table: Some rows.
        columns: Which columns to keep, in order.
        key: The column that the order depends on; None: all of `columns`.
        files: How many files there will be.
        where: Where the rows come from, for errors.

    Raises:
        ConfigError: A column is missing, has a null, a list of another length, a type that cannot be a tensor, or the
            name of one that is added.
    """
    named = list(columns) if key is None else [key]
    for name in {*columns, *named}:
        if name in (KEY, FILE):
            raise ConfigError(f"there is a column {name!r} in {where}, a name that is needed for another; rename it")
        if name not in table.column_names:
            raise ConfigError(f"there is no column {name!r} in {where}, which has {', '.join(table.column_names)}")
        check_type(name, table.schema.field(name).type)
    numbers = np.zeros(table.num_rows, np.uint64)
    for name in columns:
        values = _bits(column_of(name, table[name], where))
        if name in named:
            numbers = _mix(numbers, values)
    if key is not None and key not in columns:
        numbers = _mix(numbers, _bits(column_of(key, table[key], where)))
    file = (numbers >> np.uint64(32)) % np.uint64(files)
    kept = table.select(list(columns))
    return kept.append_column(KEY, pa.array(numbers.view(np.int64))).append_column(
        FILE, pa.array(file.astype(np.int32))
    )


def write_file(table: pa.Table, directory: str, number: int, where: str = "the data") -> int:
    """Write the rows of one file, sorted; return how many. Doing it again writes the same bytes.

    Args:
        table: All rows to which `keyed` has given this number, in any order.
        directory: Where it goes.
        number: The number of the file.
        where: Where the rows come from, for errors.

    Raises:
        ConfigError: The lists of a column differ in length.
    """
    table = table.combine_chunks()
    columns = [name for name in table.column_names if name not in (KEY, FILE)]
    for name in columns:
        column_of(name, table[name], where)  # lists may have one length in each part, but not over all parts
    keys = table[KEY].to_numpy()
    order = np.argsort(keys, kind="stable")
    order = _untie(table.select(columns), keys, order)
    path = Path(directory) / f"part-{number:05d}.parquet"
    partly = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    rows = table.select(columns).take(pa.array(order))
    group = min(_ROWS_OF_A_GROUP, max(1, _BYTES_OF_A_GROUP * rows.num_rows // max(1, size_of(rows))))
    try:
        pq.write_table(rows, partly, row_group_size=group, compression="none", use_dictionary=False)
        os.replace(partly, path)
    finally:
        partly.unlink(missing_ok=True)
    return int(rows.num_rows)


def _bits(column: Any) -> np.ndarray[Any, Any]:
    """A column as 64-bit words, ``[rows, words]``; a text is one word mixed from its bytes."""
    if isinstance(column, np.ndarray):
        flat = column.reshape(len(column), -1)
        size = flat.dtype.itemsize
        words = flat.view(f"u{size}") if size > 1 else flat.view(np.uint8)
        return words.astype(np.uint64)
    texts = [text.encode() if isinstance(text, str) else text for text in column]
    found = np.zeros((len(texts), 1), np.uint64)
    for row, text in enumerate(texts):
        padded = np.frombuffer(text + bytes(-len(text) % 8), np.uint64)
        found[row] = _mix(np.array([len(text)], np.uint64), padded[None, :])
    return found


def _mix(numbers: np.ndarray[Any, Any], words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix further words into the number of every row."""
    step, first, second = map(np.uint64, _MIX)
    with np.errstate(over="ignore"):
        for column in range(words.shape[1]):
            numbers = (numbers ^ words[:, column]) + step
            numbers = (numbers ^ (numbers >> np.uint64(30))) * first
            numbers = (numbers ^ (numbers >> np.uint64(27))) * second
            numbers = numbers ^ (numbers >> np.uint64(31))
    return numbers


def _untie(table: pa.Table, keys: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Order rows with equal keys by content: otherwise they would stay in the order in which they came."""
    sorted_keys = keys[order]
    if not (sorted_keys[1:] == sorted_keys[:-1]).any():
        return order
    contents = [_bits(column_of(name, table[name], "the data")) for name in table.column_names]
    words = [content[:, column] for content in contents for column in range(content.shape[1])]
    return np.lexsort([*reversed(words), keys])
