"""Parquet files as a map-style data set: any row at any time, and whole parts of batches at once."""

from bisect import bisect_right
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

__all__ = ["Parquet", "parquet"]

_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class _Block:
    """Rows that are decoded together.

    Attributes:
        groups: (file, row group) of each piece, in order.
        first: The number of the first row.
        num_rows: How many.
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
    text is text. Local files are memory-mapped; a row group is decoded when one of its rows is first needed, and stays
    decoded until `cache_bytes` are used up. If everything fits, every row is one index away.

    Args:
        path_or_paths: A file, a directory (its `*.parquet` files in the order of their names), or several of them;
            also addresses that pyarrow knows, such as `s3://` or `hdfs://`.
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
        self._blocks = self._lay_out(cache_bytes)
        self._firsts = [block.first for block in self._blocks]
        self._num_rows = self._blocks[-1].first + self._blocks[-1].num_rows if self._blocks else 0
        if not self._num_rows:
            raise ConfigError(f"{self.files[0]} and what was given with it have no row; expected at least one")
        self._cache_bytes = cache_bytes
        self._decoded: OrderedDict[int, dict[str, Column]] = OrderedDict()  # by block, the last used one last

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        number, row = self._find(index % self._num_rows)
        return {name: column[row] for name, column in self._decode(number).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples, as torch's loaders ask for them."""
        return [self[index] for index in indices]

    def part(self, indices: Sequence[int]) -> dict[str, Any]:
        """Some samples, collated."""
        chosen = torch.from_numpy(np.fromiter(indices, np.int64, len(indices)))
        if len(self._blocks) == 1:
            return {name: _take(column, chosen) for name, column in self._decode(0).items()}
        numbers = torch.searchsorted(torch.tensor(self._firsts), chosen, right=True) - 1
        part: dict[str, Any] = {}
        for number in sorted(set(numbers.tolist())):
            places = (numbers == number).nonzero().flatten()
            rows = chosen[places] - self._firsts[number]
            for name, column in self._decode(number).items():
                _put(part, name, len(indices), places, _take(column, rows))
        return part

    def __getstate__(self) -> dict[str, Any]:
        """Leave out open files and decoded rows: a loader process opens and decodes for itself."""
        return {**self.__dict__, "_opened": {}, "_decoded": OrderedDict()}

    def _find(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]

    def _open(self, number: int) -> pq.ParquetFile:
        if number not in self._opened:
            system, name = self._systems[number], self.files[number]
            try:
                local = isinstance(system, fs.LocalFileSystem)
                self._opened[number] = pq.ParquetFile(name, memory_map=local, filesystem=None if local else system)
            except (pa.ArrowInvalid, OSError) as error:
                raise ConfigError(f"{name} cannot be read as a Parquet file: {error}") from error
        return self._opened[number]

    def _lay_out(self, cache_bytes: int) -> list[_Block]:
        """All rows as one block if they fit, else a block for every row group."""
        groups = [group for number in range(len(self.files)) for group in self._groups(number)]
        firsts = list(accumulate((rows for _, rows, _ in groups), initial=0))
        total = sum(size for _, _, size in groups)
        if total <= cache_bytes:
            return [_Block(tuple(where for where, _, _ in groups), 0, firsts[-1], total)]
        return [
            _Block((where,), first, rows, size)
            for (where, rows, size), first in zip(groups, firsts, strict=False)
            if rows
        ]

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
        block = self._blocks[number]
        pieces = [
            self._open(file).read_row_group(group, columns=self.columns, use_threads=False)
            for file, group in block.groups
        ]
        where = self.files[block.groups[0][0]] + (" and what follows it" if len(block.groups) > 1 else "")
        table = pa.concat_tables(pieces)
        self._decoded[number] = {name: column_of(name, table[name], where) for name in self.columns}
        while len(self._decoded) > 1 and self._held_bytes() > self._cache_bytes:
            self._decoded.popitem(last=False)
        return self._decoded[number]

    def _held_bytes(self) -> int:
        return sum(self._blocks[number].num_bytes for number in self._decoded)


def _files(path: str) -> list[tuple[Any, str]]:
    """The files that a path names, each with the file system that has it."""
    try:
        system, name = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
        info = system.get_file_info(name)
        if info.type == fs.FileType.Directory:
            inside = sorted(file.path for file in system.get_file_info(fs.FileSelector(name)))
            files = [file for file in inside if file.endswith(".parquet") and Path(file).name[0] not in "._"]
            if not files:
                raise ConfigError(f"{path} has no *.parquet file; expected at least one")
            return [(system, file) for file in files]
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"there is no file or directory {path}; expected Parquet files")
    return [(system, name)]


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


def _take(column: Column, rows: Tensor) -> Column:
    if isinstance(column, Tensor):
        return torch.from_numpy(column.numpy().take(rows.numpy(), axis=0))  # twice as fast as index_select
    return [column[row] for row in rows.tolist()]


def _put(part: dict[str, Any], name: str, size: int, places: Tensor, values: Column) -> None:
    """Put the values of some rows into their places in a part."""
    if isinstance(values, Tensor):
        part.setdefault(name, values.new_empty(size, *values.shape[1:]))[places] = values
    else:
        whole = part.setdefault(name, [""] * size)
        for place, value in zip(places.tolist(), values, strict=True):
            whole[place] = value
