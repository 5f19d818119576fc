"""Columns of Parquet files that need no decoding: rows are gathered from where the file is mapped into memory.

That is possible where numbers are stored as they are: uncompressed, without dictionary or nulls, in lists of one
length, as `evenstep.data.content` writes them. All workers of a machine then share what is in memory of a file. Any
other layout is not an error: it is left to pyarrow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from evenstep.data.order import Indices
from evenstep.native import core

__all__ = ["MappedColumn", "map_column"]

_DTYPES = {pa.float32(): torch.float32, pa.float64(): torch.float64, pa.int32(): torch.int32, pa.int64(): torch.int64}
_STARTS_OF_A_PAGE = 16  # so that most rows are found at once, and the table stays in the cache
_LINE_BYTES = 64  # of the cache; torch puts tensors at multiples of it
_DATA_PAGE, _PLAIN, _RLE = 0, 0, 3  # of Parquet's format
_SKIPPED_BYTES = {1: 0, 2: 0, 3: 1, 7: 8}  # by Thrift's number of a type: true, false, a byte, a double


class _NotMappable(Exception):  # no error, but a way out
    """A column is not laid out as is needed; never leaves this module."""


@dataclass(frozen=True)
class _Page:
    """Where the values of a page lie."""

    address: int
    num_rows: int


class MappedColumn:
    """Rows of numbers in mapped files.

    Args:
        pages: Where they lie, in order.
        shape: The shape of a row.
        dtype: The type of its numbers.
        buffers: The mappings, which live as long as this.
    """

    def __init__(
        self, pages: Sequence[_Page], shape: tuple[int, ...], dtype: torch.dtype, buffers: Sequence[Any]
    ) -> None:
        self._row_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._firsts = np.cumsum([0, *(page.num_rows for page in pages)], dtype=np.int64)
        before = self._firsts[:-1] * self._row_bytes
        self._bases = np.array([page.address for page in pages], np.uint64) - before.astype(np.uint64)
        self._num_rows, self._shape, self._dtype, self._buffers = int(self._firsts[-1]), shape, dtype, buffers
        shift = (self._num_rows // (_STARTS_OF_A_PAGE * len(pages))).bit_length()
        starts = np.searchsorted(self._firsts, np.arange(0, self._num_rows, 1 << shift), side="right") - 1
        self._starts = starts.astype(np.uint32)
        bases, firsts, begins = (each.ctypes.data for each in (self._bases, self._firsts, self._starts))
        self._where = (bases, firsts, begins, shift, self._row_bytes, self._num_rows)

    def take(self, rows: Indices, counts: Sequence[int]) -> list[Tensor]:
        """The given rows as tensors ``[count, *shape]``, one after the other.

        Where each then begins at a line of the cache, as a tensor by itself does, they are gathered together, and share
        a storage.

        Raises:
            IndexError: One of the rows is not there.
        """
        if any(count * self._row_bytes % _LINE_BYTES for count in counts[:-1]):
            return [self._gathered(part) for part in np.split(rows, np.cumsum(counts[:-1]))]
        return list(torch.unsafe_split_with_sizes(self._gathered(rows), counts))  # no views: each counts its changes

    def _gathered(self, rows: Indices) -> Tensor:
        taken = torch.empty(len(rows), *self._shape, dtype=self._dtype, device="cpu")
        if not core.gather(taken.data_ptr(), *self._where, rows):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {self._num_rows}")
        return taken


def map_column(files: Sequence[pq.ParquetFile], buffers: Sequence[pa.Buffer], name: str) -> MappedColumn | None:
    """A column of files that are mapped, if nothing of it must be decoded.

    Args:
        files: The files; all have the column, with one type.
        buffers: What they hold.
        name: The column.
    """
    kind = files[0].schema_arrow.field(name).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    dtype = _DTYPES.get(kind.value_type if is_list else kind)
    if dtype is None:
        return None
    try:
        pages: list[_Page] = []
        lengths = set()
        for file, buffer in zip(files, buffers, strict=True):
            for chunk, num_rows in _chunks(file, name):
                lengths.add(length := chunk.length(num_rows))
                pages += chunk.pages(buffer, length, dtype.itemsize)
    except (_NotMappable, IndexError, RecursionError):  # or the file is not what it says
        return None
    if len(lengths) != 1:
        return None
    return MappedColumn(pages, (lengths.pop(),) if is_list else (), dtype, buffers)


@dataclass(frozen=True)
class _Chunk:
    """The column in a row group.

    Attributes:
        held: What the file says of it.
        top_repetition: The highest repetition level.
        top_definition: The highest definition level, that of a value which is there.
    """

    held: Any
    top_repetition: int
    top_definition: int

    def length(self, num_rows: int) -> int:
        """How many values each row has, if all have as many."""
        length, rest = divmod(self.held.num_values, num_rows)
        if rest or not length:
            raise _NotMappable
        return int(length)

    def pages(self, buffer: pa.Buffer, length: int, value_bytes: int) -> Iterator[_Page]:
        """Its pages, looked through."""
        view = memoryview(buffer)
        held, seen, at = self.held, 0, self.held.data_page_offset
        if held.compression != "UNCOMPRESSED" or held.has_dictionary_page or self.top_repetition > 1:
            raise _NotMappable
        while seen < held.num_values:
            count, begin, at = _read_header(view, at)
            if count > held.num_values - seen:
                raise _NotMappable
            values = at - count * value_bytes
            for top, of_list in ((self.top_repetition, length), (self.top_definition, 0)):
                if top:
                    begin = _check_levels(view, buffer.address, begin, count, top, of_list)
            if begin != values or count % length:
                raise _NotMappable
            seen += count
            yield _Page(buffer.address + values, count // length)


def _chunks(file: pq.ParquetFile, name: str) -> Iterator[tuple[_Chunk, int]]:
    (column,) = [c for c in range(len(file.schema)) if file.schema.column(c).path.split(".")[0] == name]
    schema = file.schema.column(column)
    for group in range(file.num_row_groups):
        held = file.metadata.row_group(group)
        if held.num_rows:
            levels = schema.max_repetition_level, schema.max_definition_level
            yield _Chunk(held.column(column), *levels), held.num_rows


def _read_header(view: memoryview, at: int) -> tuple[int, int, int]:
    """How many values a page of plain values has, and where it begins and ends behind its header at a place."""
    header, begin = _read_struct(view, at)
    page, size = header.get(5), _number(header, 3)
    if _number(header, 1) != _DATA_PAGE or not isinstance(page, dict):
        raise _NotMappable
    count, *encodings = (_number(page, field) for field in (1, 2, 3, 4))
    if encodings != [_PLAIN, _RLE, _RLE] or count <= 0 or not 0 < size <= len(view) - begin:
        raise _NotMappable
    return count, begin, begin + size


def _check_levels(view: memoryview, address: int, at: int, count: int, top: int, length: int) -> int:
    """Check that the levels at a place are those of lists of one length without nulls; returns where they end."""
    begin = at + 4
    end = begin + int.from_bytes(view[at:begin], "little")
    if end > len(view) or not core.levels_are(address + begin, end - begin, top.bit_length(), count, top, length):
        raise _NotMappable
    return end


# ---- Thrift's compact protocol, as far as the headers of pages need it ----


def _read_struct(view: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """A structure's numbers and structures, by the numbers of their fields, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while head := view[at]:
        at += 1
        number += head >> 4
        if not head >> 4:
            number, at = _read_number(view, at)
        fields[number], at = _read_value(view, at, head & 15)
    return fields, at + 1


def _read_value(view: memoryview, at: int, kind: int) -> tuple[Any, int]:
    """A number or a structure, or None for what no header of a page needs; and where it ends."""
    if kind in _SKIPPED_BYTES:
        return None, at + _SKIPPED_BYTES[kind]
    match kind:
        case 4 | 5 | 6:
            return _read_number(view, at)
        case 8:  # bytes
            size, at = _read_varint(view, at)
            return None, at + size
        case 12:
            return _read_struct(view, at)
    raise _NotMappable


def _number(fields: dict[int, Any], field: int) -> int:
    found = fields.get(field)
    if not isinstance(found, int):
        raise _NotMappable
    return found


def _read_number(view: memoryview, at: int) -> tuple[int, int]:
    coded, at = _read_varint(view, at)
    return coded >> 1 ^ -(coded & 1), at


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = view[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            return found, at
