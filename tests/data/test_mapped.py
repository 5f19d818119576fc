"""Columns that are used where they lie in a file: what pyarrow reads, or left to pyarrow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evenstep
from evenstep.core.errors import ConfigError

pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow: pip install 'evenstep[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

from evenstep.data.mapped import map_column  # noqa: E402  # needs pyarrow

PLAIN = {"compression": "none", "use_dictionary": False}
KINDS = {"float32": np.float32, "float64": np.float64, "int32": np.int32, "int64": np.int64}


def lists(values, length):
    offsets = pa.array(np.arange(0, len(values) + 1, length, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(values))


@settings(max_examples=60)
@given(
    st.integers(1, 70),
    st.integers(1, 600),
    st.sampled_from(list(KINDS)),
    st.integers(1, 300),
    st.sampled_from([64, 1000, 2**20]),
    st.booleans(),
    st.data(),
)
def test_rows_of_plain_files_are_gathered_where_they_lie(
    tmp_path_factory, length, num_rows, kind, group, page, null, data
):
    generator = np.random.default_rng(num_rows)
    values = generator.integers(-100, 100, num_rows * length).astype(KINDS[kind])
    single = generator.random(num_rows).astype(np.float32)
    table = pa.table({"list": lists(values, length), "single": single})
    table = table.cast(
        pa.schema([pa.field(name, table.schema.field(name).type, nullable=null) for name in table.column_names])
    )
    path = tmp_path_factory.mktemp("plain")
    cut = data.draw(st.integers(0, num_rows - 1))
    for name, part in (("a", table.slice(0, cut)), ("b", table.slice(cut))):
        pq.write_table(part, path / f"{name}.parquet", row_group_size=group, data_page_size=page, **PLAIN)
    found = evenstep.data.parquet(path)
    chosen = generator.permutation(num_rows)
    part = found.part(chosen)
    assert torch.equal(part["list"], torch.from_numpy(values.reshape(num_rows, length)[chosen]))
    assert torch.equal(part["single"], torch.from_numpy(single[chosen]))
    assert set(found._map()) == {"list", "single"}
    cuts = sorted(data.draw(st.lists(st.sampled_from([*range(0, num_rows, 16), num_rows]), max_size=4)))
    assert found.parts([]) == [], "of a worker without shards"
    parts = found.parts(np.split(chosen, cuts))
    for name, whole in part.items():
        assert torch.equal(torch.cat([each[name] for each in parts]), whole)
        assert all(each[name].data_ptr() % 64 == 0 for each in parts), "as of a tensor by itself"
        parts[0][name].zero_()
        assert all(each[name]._version == 0 for each in parts[1:]), "each counts its own changes"
    for wrong in (num_rows, -1):
        with pytest.raises(IndexError, match=f"of {num_rows}"):
            found.part([0, wrong])


def test_rows_are_in_the_memory_of_the_cpu_whatever_the_default_device(tmp_path):
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "f.parquet", **PLAIN)
    with torch.device("meta"):
        part = evenstep.data.parquet(tmp_path).part([1, 0])
    assert part["x"].tolist() == [2.0, 1.0]


def test_what_is_not_laid_out_so_is_left_to_pyarrow(tmp_path):
    def mapped(values, **options):
        pq.write_table(pa.table({"x": values}), tmp_path / "f.parquet", **{**PLAIN, **options})
        found = evenstep.data.parquet(tmp_path / "f.parquet")
        expected = pa.array(values).to_pylist()
        assert [row["x"].tolist() for row in found.__getitems__(range(len(found)))] == expected
        return bool(found._map())

    numbers, pairs = [float(n % 7) for n in range(100)], [[float(n), 0.0] for n in range(100)]
    assert mapped(numbers)
    assert mapped(pairs)
    assert not mapped(pairs, compression="zstd")
    assert not mapped(numbers, use_dictionary=True)
    assert not mapped(pairs, data_page_version="2.0")
    assert not mapped(numbers, use_byte_stream_split=True)
    assert not mapped([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert not mapped(pa.array([1, 2], pa.int8()))
    assert not mapped([True, False])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]], "has 2 numbers in row 0 but 1 in row 1"),
        ([[1.0, 2.0], [], [4.0, 5.0, 6.0, 7.0]], "has 2 numbers in row 0 but 0 in row 1"),
        ([[1.0], None], "has no value in row 1"),
        ([[1.0], [None]], "has an element without a value in row 1"),
        ([1.0, None, 2.0], "has no value in row 1"),
    ],
)
def test_lists_that_only_add_up_and_nulls_are_found(tmp_path, values, sentence):
    pq.write_table(pa.table({"x": values}), tmp_path / "f.parquet", **PLAIN)
    with pytest.raises(ConfigError, match=sentence):
        evenstep.data.parquet(tmp_path / "f.parquet").part([0])


def test_files_whose_lists_differ_are_refused(tmp_path):
    pq.write_table(pa.table({"x": [[1.0, 2.0]]}), tmp_path / "a.parquet", **PLAIN)
    pq.write_table(pa.table({"x": [[1.0]]}), tmp_path / "b.parquet", **PLAIN)
    with pytest.raises(ConfigError, match="has 2 numbers in row 0 but 1 in row 1"):
        evenstep.data.parquet(tmp_path).part([0])


def page_head(count, num_bytes):
    """The head of a data page without levels, by Thrift's compact protocol."""

    def number(value):
        coded, found = value << 1 ^ value >> 63, b""
        while coded > 127:
            found, coded = found + bytes([coded & 127 | 128]), coded >> 7
        return found + bytes([coded])

    page = b"\x15" + number(count) + b"\x15" + number(0) + b"\x15" + number(3) + b"\x15" + number(3) + b"\0"
    sizes = b"\x15" + number(num_bytes) + b"\x15" + number(num_bytes)
    return b"\x15" + number(0) + sizes + b"\x2c" + page + b"\0"


@pytest.mark.long
@pytest.mark.parametrize("null", [False, True])
def test_a_page_that_is_not_what_its_head_says_is_never_read_past_its_file(tmp_path, null):
    schema = pa.schema([pa.field("x", pa.int64(), nullable=null)])
    pq.write_table(pa.table({"x": np.arange(50)}, schema=schema), tmp_path / "f.parquet", **PLAIN)
    good = (tmp_path / "f.parquet").read_bytes()
    begin = pq.ParquetFile(tmp_path / "f.parquet").metadata.row_group(0).column(0).data_page_offset
    altered = [good[:at] + bytes([value]) + good[at + 1 :] for at in range(begin, begin + 60) for value in range(256)]
    for count in (50, 1_000_000, -50):  # sizes and numbers of values that agree with each other
        head = page_head(count, 8 * count)
        altered.append(good[:begin] + head + good[begin + len(head) :])
    for each in altered:
        data = pa.py_buffer(each)
        column = map_column([pq.ParquetFile(data)], [data], "x")
        if column is not None:
            firsts, ends = column._firsts[:-1], column._firsts[1:]
            assert (ends > firsts).all()
            assert (column._bases + 8 * firsts.astype(np.uint64) >= data.address).all()
            assert (column._bases + 8 * ends.astype(np.uint64) <= data.address + data.size).all()
            assert column._num_rows == 50
