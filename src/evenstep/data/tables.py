"""Parquet files as a map-style data set: any row at any time, and whole parts of batches at once."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.data.columns import Column, check_type, column_of
from evenstep.data.loader import Tabular
from evenstep.data.mapped import MappedColumn, map_column
from evenstep.data.order import Indices

__all__ = ["Parquet", "parquet"]

_CACHE_BYTES = 2**30
_RETRYING_S = 60


@dataclass(frozen=True)
class _Block:
    """Rows that are decoded together.

    Attributes:
        groups: (file, row group) of each piece, in order.
        first: The number of the first row.
        num_rows: How many there are.
        num_bytes: Their approximate size when decoded.
    """

    groups: tuple[tuple[int, int], ...]
    first: int
    num_rows: int
    num_bytes: int


def parquet(
    path_or_paths: str | Path | Sequence[str | Path],
    columns: Sequence[str] | None = None,
    *,
    cache_bytes: int = _CACHE_BYTES,
) -> "Parquet":
    """Parquet files as a map-style data set of dicts, for `run.batches`, `run.evaluate` and `run.predict`.

    The samples are the rows, file after file. A sample is a dict by column: numbers and lists of numbers are tensors,
    text is text. Local files are memory-mapped. Columns of numbers, or lists of one length, that were written without
    compression, dictionary and nulls, as `evenstep.ray.write` and Spark's estimator write them, are used where they
    lie, and take no memory of a worker. Of others a row group is decoded when one of its rows is first needed, and
    stays decoded until `cache_bytes` are used up. If everything fits, every row is one index away.

    Args:
        path_or_paths: A file, a directory (its `*.parquet` files in the order of their names), or several of them;
            also addresses that pyarrow knows, such as `s3://`, `gs://` or `hdfs://`, or that fsspec knows, if it is
            installed.
        columns: Which columns, in this order; None: all.
        cache_bytes: How much decoded data each worker keeps. If the data are larger and shuffled, row groups are
            decoded again and again.

    Raises:
        ConfigError: There is no such file, directory or column, a file is not a Parquet file or its columns differ
            from the first's, there is no row, or a column cannot become a tensor.
    """
    several = isinstance(path_or_paths, Sequence) and not isinstance(path_or_paths, str)
    paths = list(path_or_paths) if several else [path_or_paths]  # type: ignore[arg-type]  # a str is a Sequence of str
    return Parquet([str(path) for path in paths], columns, cache_bytes)


class Parquet(Tabular):
    """What `parquet` returns.

    Attributes:
        files: The files, in the order of their rows.
        columns: The names of the columns, in order.
    """

    def __init__(self, paths: Sequence[str], columns: Sequence[str] | None, cache_bytes: int) -> None:
        found = [file for path in paths for file in _files(path)]
        if not found:
            raise ConfigError("no path to a Parquet file was given; expected at least one")
        self.files = [name for _, name in found]
        self._systems = [system for system, _ in found]
        self._opened: dict[int, pq.ParquetFile] = {}
        schema = self._open(0).schema_arrow
        self.columns = _chosen(schema, columns, self.files[0])
        self._types = {name: schema.field(name).type for name in self.columns}
        for name, kind in self._types.items():
            check_type(name, kind)
        groups = [group for number in range(len(self.files)) for group in self._groups(number)]
        self._num_rows = sum(rows for _, rows, _ in groups)
        if not self._num_rows:
            raise ConfigError(f"{self.files[0]} and what was given with it have no row; expected at least one")
        self._cache_bytes = cache_bytes
        self._mapped: dict[str, MappedColumn] | None = None
        self._blocks = _lay_out(groups, cache_bytes)
        self._firsts = [block.first for block in self._blocks]
        self._decoded: OrderedDict[int, dict[str, Column]] = OrderedDict()  # by block, the last used one last

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        return {name: values[0] for name, values in self.part([index % self._num_rows]).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples, as torch's loaders ask for them."""
        return [self[index] for index in indices]

    def part(self, indices: Sequence[int] | Indices) -> dict[str, Any]:
        """Some samples, collated.

        Raises:
            IndexError: There is no such sample.
        """
        return self.parts([np.asarray(indices, np.int64)])[0]

    def parts(self, indices: Sequence[Indices]) -> list[dict[str, Any]]:
        """See `Tabular`.

        Raises:
            IndexError: There is no such sample.
        """
        if not indices:
            return []
        mapped, rows, counts = self._map(), np.concatenate(indices), [len(chosen) for chosen in indices]
        taken = [column.take(rows, counts) for column in mapped.values()]
        parts: list[dict[str, Any]] = [dict(zip(mapped, columns, strict=True)) for columns in zip(*taken, strict=True)]
        if len(mapped) == len(self.columns):
            return parts
        parts = parts or [{} for _ in indices]
        for part, chosen in zip(parts, indices, strict=True):
            self._put_decoded(part, chosen)
        return [{name: part[name] for name in self.columns} for part in parts]

    def _put_decoded(self, part: dict[str, Any], chosen: Indices) -> None:
        """Put those columns into a part that must be decoded."""
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self._num_rows:
            raise IndexError(f"rows {chosen.min()} to {chosen.max()} of {self._num_rows}")
        if len(self._blocks) == 1:
            part.update({name: _take(column, chosen) for name, column in self._decode(0).items()})
            return
        numbers = np.searchsorted(self._firsts, chosen, side="right") - 1
        for number in sorted(set(numbers.tolist())):
            places = np.flatnonzero(numbers == number)
            rows = chosen[places] - self._firsts[number]
            for name, column in self._decode(number).items():
                _put(part, name, len(chosen), places, _take(column, rows))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out open files and rows: a loader process opens, maps and decodes for itself."""
        return {**self.__dict__, "_opened": {}, "_mapped": None, "_decoded": OrderedDict()}

    def _map(self) -> dict[str, MappedColumn]:
        """The columns that need no decoding."""
        if self._mapped is None:
            self._mapped = {}
            if all(isinstance(system, fs.LocalFileSystem) for system in self._systems):
                files, buffers = [self._open(n) for n in range(len(self.files))], list(map(_mapping, self.files))
                found = {name: map_column(files, buffers, name) for name in self.columns}
                self._mapped = {name: column for name, column in found.items() if column is not None}
        return self._mapped

    def _open(self, number: int) -> pq.ParquetFile:
        if number not in self._opened:
            system, name = self._systems[number], self.files[number]
            try:
                local = isinstance(system, fs.LocalFileSystem)
                self._opened[number] = pq.ParquetFile(name, memory_map=local, filesystem=None if local else system)
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"{name} cannot be read as a Parquet file: {error}") from error
        return self._opened[number]

    def _groups(self, number: int) -> Iterator[tuple[tuple[int, int], int, int]]:
        """The row groups of a file: where, how many rows, and about how many bytes they take."""
        file = self._open(number)
        for name, kind in self._types.items():
            index = file.schema_arrow.get_field_index(name)
            if index < 0 or file.schema_arrow.field(index).type != kind:
                theirs = "has none" if index < 0 else f"has {file.schema_arrow.field(index).type}"
                raise ConfigError(
                    f"column {name!r} is {kind} in {self.files[0]}, but {self.files[number]} {theirs}; expected the "
                    "same in every file"
                )
        used = [c for c in range(len(file.schema)) if file.schema.column(c).path.split(".")[0] in self._types]
        for group in range(file.num_row_groups):
            held = file.metadata.row_group(group)
            size = sum(held.column(column).total_uncompressed_size for column in used)
            yield (number, group), held.num_rows, size

    def _decode(self, number: int) -> dict[str, Column]:
        if number in self._decoded:
            self._decoded.move_to_end(number)
            return self._decoded[number]
        block, columns = self._blocks[number], [name for name in self.columns if name not in self._map()]
        pieces = [
            self._open(file).read_row_group(group, columns=columns, use_threads=False) for file, group in block.groups
        ]
        where = self.files[block.groups[0][0]] + (" and what follows it" if len(block.groups) > 1 else "")
        table = pa.concat_tables(pieces)
        self._decoded[number] = {name: column_of(name, table[name], where) for name in columns}
        while len(self._decoded) > 1 and self._held_bytes() > self._cache_bytes:
            self._decoded.popitem(last=False)
        return self._decoded[number]

    def _held_bytes(self) -> int:
        return sum(self._blocks[number].num_bytes for number in self._decoded)


def _files(path: str) -> list[tuple[Any, str]]:
    """The files that a path names, each with the file system that has it."""
    try:
        system, name = _system_of(path)
        info = system.get_file_info(name)
        if info.type == fs.FileType.Directory:
            inside = sorted(file.path for file in system.get_file_info(fs.FileSelector(name)))
            files = [file for file in inside if file.endswith(".parquet") and Path(file).name[0] not in "._"]
            if not files:
                raise ConfigError(f"{path} has no *.parquet file; expected at least one")
            return [(system, file) for file in files]
    except ConfigError:
        raise
    except Exception as error:  # of any file system, and any library behind it
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"there is no file or directory {path}; expected Parquet files")
    return [(system, name)]


def _system_of(path: str) -> tuple[Any, str]:
    """The file system that a path or address is of, and what the file is called there."""
    if "://" not in path and not path.startswith("file:"):
        return fs.LocalFileSystem(), path
    if path.startswith(("gs://", "gcs://")) and "?" not in path:
        path += f"?retry_limit_seconds={_RETRYING_S}"  # otherwise it is 15 minutes until a mistake is one
    try:
        return fs.FileSystem.from_uri(path)  # type: ignore[no-any-return]  # pyarrow has no types
    except pa.ArrowInvalid:
        return fs.FileSystem.from_uri(f"fsspec+{path}")  # type: ignore[no-any-return]  # likewise


def _mapping(file: str) -> pa.Buffer:
    with pa.memory_map(file) as opened:
        return opened.read_buffer()  # stays mapped for as long as it is used


def _lay_out(groups: Sequence[tuple[tuple[int, int], int, int]], cache_bytes: int) -> list[_Block]:
    """All rows as one block if they fit, else a block for every row group."""
    firsts = list(accumulate((rows for _, rows, _ in groups), initial=0))
    total = sum(size for _, _, size in groups)
    if total <= cache_bytes:
        return [_Block(tuple(where for where, _, _ in groups), 0, firsts[-1], total)]
    return [
        _Block((where,), first, rows, size) for (where, rows, size), first in zip(groups, firsts, strict=False) if rows
    ]


def _chosen(schema: pa.Schema, columns: Sequence[str] | None, file: str) -> list[str]:
    if columns is None:
        return list(schema.names)
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}, expected a list of names: columns=[{columns!r}]")
    missing = [name for name in columns if name not in schema.names]
    if missing or not columns:
        raise ConfigError(
            f"there is no column {missing[0]!r} in {file}, which has {', '.join(schema.names)}"
            if missing
            else f"columns=[], expected at least one of {', '.join(schema.names)}"
        )
    return list(columns)


def _take(column: Column, rows: Indices) -> Tensor | list[Any]:
    if not isinstance(column, np.ndarray):
        return [column[row] for row in rows.tolist()]
    taken = torch.from_numpy(column).new_empty(len(rows), *column.shape[1:])
    column.take(rows, axis=0, out=taken.numpy(), mode="clip")  # "raise" would need a buffer, and be slower
    return taken


def _put(part: dict[str, Any], name: str, size: int, places: Indices, values: Tensor | list[Any]) -> None:
    """Put the values of some rows into their places in a part."""
    if isinstance(values, Tensor):
        part.setdefault(name, values.new_empty(size, *values.shape[1:])).numpy()[places] = values.numpy()
    else:
        whole = part.setdefault(name, [""] * size)
        for place, value in zip(places.tolist(), values, strict=True):
            whole[place] = value
