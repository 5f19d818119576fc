"""DataFrames as Parquet files whose rows are ordered by their content; executors write them, each row once."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # Spark's own word
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DecimalType,
    IntegerType,
    LongType,
    NumericType,
    StringType,
    StructField,
    StructType,
)

from evenstep.core.errors import ConfigError
from evenstep.data.content import FILE, KEY, keyed, num_files, write_file
from evenstep.spark.said import said_in

__all__ = [
    "check_numbers",
    "folder_in",
    "named",
    "numbers_of",
    "plain",
    "plain_columns",
    "required",
    "write",
    "write_into",
]


def check_numbers(frame: DataFrame, columns: Sequence[str]) -> None:
    """Check that columns which models are given hold numbers, as far as the schema says.

    Raises:
        ConfigError: One of them holds text.
    """
    for field in frame.schema.fields:
        if field.name in columns and isinstance(_innermost(field.dataType), StringType):
            raise ConfigError(
                f"column {field.name!r} is {field.dataType.simpleString()}; expected numbers: index it first, as "
                "StringIndexer of pyspark.ml.feature does"
            )


def plain(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Some columns of a DataFrame, converted by `plain_columns`."""
    names = list(dict.fromkeys(columns))
    chosen = plain_columns(frame, names)
    return frame.select(*[column.alias(name) for name, column in zip(names, chosen, strict=True)])


def plain_columns(frame: DataFrame, columns: Sequence[str]) -> list[Any]:
    """Some columns of a DataFrame, with vectors as arrays and decimals as doubles.

    Raises:
        ConfigError: A column is missing, there are several of its name, or it holds anything but numbers, vectors,
            arrays of numbers or text.
    """
    kinds = {field.name: field.dataType for field in frame.schema.fields}
    chosen = []
    for name in columns:
        if name not in kinds:
            raise ConfigError(f"the DataFrame has no column {name!r}; its columns are {', '.join(kinds)}")
        if (count := frame.columns.count(name)) > 1:
            raise ConfigError(f"the DataFrame has {count} columns {name!r}; expected one: rename or drop the others")
        kind, column = kinds[name], named(name)
        if isinstance(kind, VectorUDT):
            column = F.when(column.isNotNull(), vector_to_array(column, "float32"))
        elif isinstance(kind, DecimalType):
            column = column.cast("double")
        elif not _is_plain(kind):
            raise ConfigError(
                f"column {name!r} is {kind.simpleString()}; expected numbers, a vector, an array of numbers or text"
            )
        chosen.append(column)
    return chosen


def required(frame: DataFrame, columns: Sequence[str]) -> list[Any]:
    """As `plain_columns`, but a null ends the job with one sentence, which Spark raises without Python's traceback."""
    return [
        F.when(column.isNotNull(), column).otherwise(
            F.raise_error(
                F.lit(f"column {name!r} of the DataFrame has no value in some row; fill it, or leave such rows out")
            )
        )
        for name, column in zip(columns, plain_columns(frame, columns), strict=True)
    ]


def numbers_of(columns: Sequence[str]) -> list[str]:
    """Names for columns by their numbers: where Arrow meets Spark, it takes a dot in a name for a path."""
    return [f"c{number}" for number in range(len(columns))]


def named(column: str) -> Any:
    """The column of exactly this name, whatever characters it has."""
    quoted = column.replace("`", "``")
    return F.col(f"`{quoted}`")


def _is_plain(kind: Any) -> bool:
    return isinstance(_innermost(kind), NumericType | BooleanType | StringType)


def _innermost(kind: Any) -> Any:
    while isinstance(kind, ArrayType):
        kind = kind.elementType
    return kind


@contextmanager
def folder_in(storage: str | None) -> Iterator[Path]:
    """A directory for files of executors, removed at the end.

    Args:
        storage: Where; None: among this machine's temporary files.

    Raises:
        ConfigError: `storage` is not a directory.
    """
    if storage is not None and not Path(storage).is_dir():
        raise ConfigError(f"storage={storage!r} is not a directory; create one that the driver and all executors share")
    folder = Path(tempfile.mkdtemp(prefix="evenstep-", dir=storage))
    folder.chmod(0o777)  # executors may be another user's
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_into(folder: Path, frame: DataFrame, columns: Sequence[str], key: str | None = None) -> str:
    """Create a directory, named after what the rows are for, and `write` them there; returns its path."""
    folder.mkdir()
    folder.chmod(0o777)  # executors may be another user's
    write(frame, columns, str(folder), key, f" for {folder.name}")
    return str(folder)


def write(frame: DataFrame, columns: Sequence[str], directory: str, key: str | None = None, purpose: str = "") -> int:
    """Write some columns of a DataFrame as Parquet files; returns the number of rows.

    Which row is where in which file depends on the rows alone: another number of partitions or executors gives the same
    bytes. Executors write the files; only their sizes come to the driver.

    Args:
        frame: The rows. It is read twice: to measure, and to write.
        columns: Which columns.
        directory: An existing directory that all executors share.
        key: The column that determines the order, instead of the content of all `columns`.
        purpose: What the rows are for, for errors.

    Raises:
        ConfigError: There is no row, or a column is missing, has nulls, or cannot be a tensor.
    """
    names = list(dict.fromkeys(columns))
    chosen = plain(frame, [*names, *([key] if key is not None else [])])
    try:
        count, num_bytes = _measure(chosen.select(*map(named, names)))
    except PySparkException as error:
        raise said_in(error) from error
    if not count:
        raise ConfigError(f"the DataFrame has no rows{purpose}; expected at least one")
    files, all_names = num_files(count, num_bytes), chosen.columns
    numbered = chosen.toDF(*numbers_of(all_names))

    def prepare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = pa.Table.from_batches([batch]).rename_columns(all_names)
            rows = keyed(rows, names, key, files, "the DataFrame")
            yield from rows.rename_columns([*numbers_of(names), KEY, FILE]).to_batches()

    def store(rows: pa.Table) -> pa.Table:
        number = rows[FILE][0].as_py()
        named_rows = rows.rename_columns([*names, KEY, FILE])
        return pa.table({"file": [number], "rows": [write_file(named_rows, directory, number, "the DataFrame")]})

    fields = numbered.schema.fields[: len(names)]
    added = StructType([*fields, StructField(KEY, LongType()), StructField(FILE, IntegerType())])
    try:
        stored = numbered.mapInArrow(prepare, added).groupBy(FILE).applyInArrow(store, "file bigint, rows bigint")
        written = sum(row["rows"] for row in stored.collect())
    except PySparkException as error:
        raise said_in(error) from error
    if written != count:
        raise ConfigError(
            f"the DataFrame had {count} rows when they were counted and {written} when they were written; expected the "
            "same rows every time it is computed: persist it, or seed what is random in it"
        )
    return count


def _measure(frame: DataFrame) -> tuple[int, int]:
    """How many rows there are, and how many bytes they have: numbers as the first, since lists have one length."""
    texts = [field.name for field in frame.schema.fields if isinstance(field.dataType, StringType)]
    totals = [F.count(F.lit(1)), *(F.sum(F.octet_length(named(name))) for name in texts)]
    count, *sizes = frame.agg(*totals).first() or (0,)
    numbers = [named(name) for name in frame.columns if name not in texts]
    first = frame.select(*numbers).head() if count and numbers else None
    return count, sum(size or 0 for size in sizes) + count * sum(map(_width, first or ()))


def _width(value: Any) -> int:
    """About how many bytes a number, or a list of them, has in a file."""
    return sum(map(_width, value)) if isinstance(value, list) else 8
