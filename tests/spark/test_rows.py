"""DataFrames as files: the same bytes whatever the partitions; what cannot be a tensor is named."""

import hashlib
from pathlib import Path

import numpy as np

ROWS = 500


def frame(session, partitions):
    from pyspark.ml.linalg import Vectors

    generator = np.random.default_rng(0)
    rows = [
        (Vectors.dense(generator.random(3)), int(generator.integers(0, 3)), float(n // 2), f"row {n}", [1, n])
        for n in range(ROWS)
    ]
    return session.createDataFrame(rows, ["features", "label", "id", "text", "pair"]).repartition(partitions)


def digests(session, directory, key):
    from evenstep.spark.rows import write

    found = []
    for partitions in (1, 5):
        place = Path(directory, f"{key}-{partitions}")
        place.mkdir()
        assert write(frame(session, partitions), ["features", "label", "text", "pair"], str(place), key) == ROWS
        assert not [file for file in place.iterdir() if file.suffix != ".parquet"]
        found.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in place.iterdir()})
    return found


def test_the_same_rows_in_other_partitions_are_the_same_bytes(spark, tmp_path):
    one, five = spark.call(digests, str(tmp_path), None)
    assert one == five
    by_key = spark.call(digests, str(tmp_path), "id")
    assert by_key[0] == by_key[1], "two rows have each key: the content decides between them"
    assert by_key[0] != one
    import evenstep

    data = evenstep.data.parquet(tmp_path / "None-1")
    assert sorted(data[row]["text"] for row in range(ROWS)) == sorted(f"row {n}" for n in range(ROWS))


def mistakes(session, directory):
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.types import IntegerType, StructField, StructType

    from evenstep.spark.rows import write

    def said(rows, schema, columns):
        try:
            write(session.createDataFrame(rows, schema), columns, directory)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            return f"{type(error).__name__}: {error}"

    vectors = StructType([StructField("features", VectorUDT()), StructField("label", IntegerType())])
    return [
        said([], "x double", ["x"]),
        said([(1.0,)], "x double", ["y"]),
        said([(1.0,), (None,)], "x double", ["x"]),
        said([(None, 1)], vectors, ["features"]),
        said([([1.0],), ([1.0, 2.0],)], "x array<double>", ["x"]),
        said([({"a": 1},)], "x map<string,int>", ["x"]),
        said([(1.0, 2.0)], "x double, x double", ["x"]),
        said([(1.0,)], "`x``.y` double", ["x`.y"]),
    ]


def test_what_cannot_be_trained_on_is_one_sentence(spark, tmp_path):
    empty, missing, null, no_vector, ragged, other, two, quoted = spark.call(mistakes, str(tmp_path))
    assert empty == "ConfigError: the DataFrame has no rows; expected at least one"
    assert missing == "ConfigError: the DataFrame has no column 'y'; its columns are x"
    assert null.startswith("ConfigError: column 'x' of the DataFrame has no value in row ")
    assert no_vector.startswith("ConfigError: column 'features' of the DataFrame has no value in row 0")
    assert ragged.startswith("ConfigError: column 'x' of the DataFrame has ")
    assert (
        other == "ConfigError: column 'x' is map<string,int>; expected numbers, a vector, an array of numbers or text"
    )
    assert two == "ConfigError: the DataFrame has 2 columns 'x'; expected one: rename or drop the others"
    assert quoted is None, "a name may have any characters"
