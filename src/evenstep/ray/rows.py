"""Ray's data sets as Parquet files whose rows are ordered by their content; tasks of the cluster write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from evenstep.core.errors import ConfigError
from evenstep.data.columns import is_text
from evenstep.data.content import FILE, keyed, num_files, size_of, write_file

__all__ = ["write"]


def write(dataset: Any, directory: str | Path, columns: Sequence[str] | None = None, key: str | None = None) -> int:
    """Write a `ray.data.Dataset` as Parquet files, for `evenstep.data.parquet(directory)`; returns the number of rows.

    Which row is where in which file depends on the rows alone: another number of blocks or nodes gives the same bytes.
    Tasks of the cluster write the files; only their sizes come back.

    Args:
        dataset: The rows. It is read twice, to measure and to write; once more if there is text in it.
        directory: An existing directory that all nodes share, without Parquet files in it.
        columns: Which columns; None: all.
        key: The column that determines the order, instead of the content of all `columns`.

    Raises:
        ConfigError: There is no row, or a column is missing, has nulls, or cannot be a tensor; or the directory is not
            there, or has Parquet files.
    """
    if not hasattr(dataset, "map_batches"):
        raise ConfigError(f"the data set is a {type(dataset).__name__}; expected a ray.data.Dataset")
    _check_directory(Path(directory))
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}, expected a list of names: columns=[{columns!r}]")
    count = dataset.count()
    if not count:
        raise ConfigError("the data set has no rows; expected at least one")
    names, where = _names(list(dataset.columns()), columns, key), str(directory)

    def prepare(rows: pa.Table) -> pa.Table:
        return keyed(_as_lists(rows), names, key, files, "the data set")

    def store(rows: pa.Table) -> pa.Table:
        number = rows[FILE][0].as_py()
        return pa.table({"rows": [write_file(rows, where, number, "the data set")]})

    try:
        files = num_files(count, _num_bytes(dataset.select_columns(names), count))
        keyed_rows = dataset.map_batches(prepare, batch_format="pyarrow")
        stored = keyed_rows.groupby(FILE, num_partitions=files).map_groups(store, batch_format="pyarrow")
        written = sum(row["rows"] for row in stored.take_all())
    except Exception as error:
        raise _said(error) from error
    if written != count:
        raise ConfigError(
            f"the data set had {count} rows when they were counted and {written} when they were written; expected the "
            "same rows every time it is computed: materialize() it"
        )
    return int(count)


def _names(there: Sequence[str], columns: Sequence[str] | None, key: str | None) -> Sequence[str]:
    """The columns to write."""
    names = there if columns is None else list(columns)
    for name in (*names, *([] if key is None else [key])):
        if name not in there:
            raise ConfigError(f"there is no column {name!r} in the data set, which has {', '.join(there)}")
    return names


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {directory}; make one that all nodes share")
    if found := sorted(file.name for file in directory.glob("*.parquet")):
        raise ConfigError(
            f"{directory} has Parquet files already ({found[0]}), whose rows would be read with these; expected an "
            "empty directory"
        )


def _num_bytes(dataset: Any, count: int) -> int:
    """How many bytes the rows have: each as many as the first, since lists have one length, unless there is text."""

    def measure(rows: pa.Table) -> pa.Table:
        return pa.table({"bytes": [size_of(_as_lists(rows))]})

    first = _as_lists(dataset.take_batch(1, batch_format="pyarrow"))
    if not any(is_text(kind) for kind in first.schema.types):
        return count * size_of(first)
    return int(dataset.map_batches(measure, batch_format="pyarrow").sum("bytes"))


def _as_lists(rows: pa.Table) -> pa.Table:
    """The same rows with arrays, such as images, as lists of lists: Ray has a type of its own for them."""
    for number, field in enumerate(rows.schema):
        shape = getattr(field.type, "shape", None) if isinstance(field.type, pa.BaseExtensionType) else None
        if shape is None or None in shape:
            continue  # what is left as it is will be refused where it cannot become a tensor
        values = pa.concat_arrays([chunk.storage.flatten() for chunk in rows.column(number).chunks])
        for size in reversed(shape):
            values = pa.LargeListArray.from_arrays(np.arange(0, len(values) + 1, size), values)
        rows = rows.set_column(number, field.name, values)
    return rows


def _said(error: BaseException) -> BaseException:
    """The ConfigError that our own code raised on a node, if there is one; otherwise the error itself."""
    found: BaseException | None = error
    while found is not None:
        for each in (getattr(found, "cause", None), found):  # Ray's own error is one of ours too, with a longer text
            if isinstance(each, ConfigError):
                return ConfigError(str(each))
        found = found.__cause__
    for line in str(error).splitlines():
        if "ConfigError: " in line:
            return ConfigError(line.partition("ConfigError: ")[2])
    return error
