"""Columns of Arrow become arrays with a row for each sample; what cannot is one sentence that names it."""

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")

from evenstep.core.errors import ConfigError  # noqa: E402  # after what may be missing
from evenstep.data.columns import check_type, column_of  # noqa: E402  # likewise


def chunked(*chunks, kind=None):
    return pa.chunked_array([pa.array(chunk, kind) for chunk in chunks], kind)


@pytest.mark.parametrize("fixed", [False, True])
def test_lists_become_dimensions(fixed):
    inner = pa.list_(pa.float32(), 2) if fixed else pa.list_(pa.float32())
    kind = pa.list_(inner, 3) if fixed else pa.list_(inner)
    rows = [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
    found = column_of("x", chunked(rows[:1], rows[1:], kind=kind), "a file")
    assert found.dtype == np.float32
    assert found.tolist() == rows


def test_numbers_bools_and_texts_are_what_they_are():
    assert column_of("x", chunked([1, 2], [3]), "a file").tolist() == [1, 2, 3]
    assert column_of("x", chunked([True, False]), "a file").dtype == np.bool_
    assert column_of("x", chunked(["a"], ["b"]), "a file") == ["a", "b"]


@pytest.mark.parametrize(("kind", "wider"), [(pa.uint16(), np.int32), (pa.uint32(), np.int64)])
def test_types_that_torch_hardly_knows_are_widened(kind, wider):
    assert column_of("x", chunked([1, 2], kind=kind), "a file").dtype == wider


def test_rows_are_counted_over_chunks_in_errors():
    with pytest.raises(
        ConfigError, match="column 'x' of a file has no value in row 3; fill it, or leave such rows out"
    ):
        column_of("x", chunked([1, 2], [3, None]), "a file")
    with pytest.raises(ConfigError, match="has 2 numbers in row 0 but 3 in row 2; expected as many in each: pad them"):
        column_of("x", chunked([[1, 2], [1, 2]], [[1, 2, 3]]), "a file")
    with pytest.raises(ConfigError, match="has an element without a value in row 1"):
        column_of("x", chunked([[1, 2]], [[1, None]]), "a file")


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.bool_(), pa.list_(pa.list_(pa.float64())), pa.large_string(), pa.binary()]
)
def test_numbers_lists_and_texts_are_taken(kind):
    check_type("x", kind)


@pytest.mark.parametrize("kind", [pa.date32(), pa.uint64(), pa.list_(pa.string()), pa.struct([("a", pa.int8())])])
def test_other_types_are_refused(kind):
    with pytest.raises(ConfigError, match=r"column 'x' is .*; expected numbers, lists of numbers of one length, text"):
        check_type("x", kind)


def test_a_column_of_nulls_is_refused():
    with pytest.raises(ConfigError, match="column 'x' has only nulls"):
        check_type("x", pa.null())
