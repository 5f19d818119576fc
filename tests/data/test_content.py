"""Rows in the order of their content: the same files from any parts in any order."""

import subprocess
import sys

import numpy as np
import pytest

from evenstep.core.errors import ConfigError

pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow: pip install 'evenstep[parquet]'")
content = pytest.importorskip("evenstep.data.content")


def rows(count=1000):
    generator = np.random.default_rng(2)
    return pa.table(
        {
            "x": list(generator.random((count, 2))),
            "y": generator.integers(0, 3, count),
            "t": [f"t{n % 7}" for n in range(count)],
        }
    )


def written(tmp_path, table, parts, key, name):
    """Key the parts one by one, shuffle what came of them, and write the files."""
    files, generator = 4, np.random.default_rng(len(parts))
    keyed = [content.keyed(table.slice(a, b - a), ["x", "y", "t"], key, files) for a, b in parts]
    whole = pa.concat_tables(keyed)
    whole = whole.take(pa.array(generator.permutation(whole.num_rows)))
    place = tmp_path / name
    place.mkdir()
    for number in range(files):
        own = whole.filter(pa.compute.equal(whole[content.FILE], number))
        content.write_file(own, str(place), number)
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.mark.parametrize("key", [None, "y"])
def test_parts_and_their_order_change_no_byte(tmp_path, key):
    import pyarrow.compute  # noqa: F401  # used above

    table = rows()
    one = written(tmp_path, table, [(0, 1000)], key, "one")
    other = written(tmp_path, table, [(500, 1000), (0, 123), (123, 500)], key, "other")
    assert one == other
    assert len(one) == 4


def test_rows_spread_evenly_over_files():
    found = content.keyed(rows(8000), ["x", "y"], None, 8)[content.FILE].to_numpy()
    counts = np.bincount(found, minlength=8)
    assert counts.min() > 900
    assert counts.max() < 1100


def test_the_number_of_files_rests_on_the_number_of_rows_and_bytes():
    assert [content.num_files(n, 8 * n) for n in (1, 65536, 65537, 10**6, 10**12)] == [1, 1, 2, 16, 4096]
    assert [content.num_files(1000, n) for n in (1, 2**26, 2**26 + 1, 2**30)] == [1, 1, 2, 16]


def test_bytes_are_those_of_the_values_whatever_holds_them():
    table = pa.table(
        {"x": [[1.0, 2.0], [3.0, 4.0]], "t": ["a", "bcd"], "n": pa.array([1, 2], pa.int16()), "b": [True] * 2}
    )
    assert content.size_of(table) == 4 * 8 + 4 + 2 * 2 + 2
    assert content.size_of(table.slice(1)) == 2 * 8 + 3 + 2 + 1
    assert content.size_of(pa.concat_tables([table, table])) == 2 * content.size_of(table)


def test_wide_rows_are_written_in_groups_of_bounded_bytes(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    monkeypatch.setattr(content, "_BYTES_OF_A_GROUP", 1000)
    table = content.keyed(pa.table({"x": list(np.random.default_rng(0).random((40, 10)))}), ["x"], None, 1)
    content.write_file(table, str(tmp_path), 0)
    file = pq.ParquetFile(tmp_path / "part-00000.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [12, 12, 12, 4]


def test_a_missing_column_is_named():
    with pytest.raises(ConfigError, match="there is no column 'z' in the data, which has x, y, t"):
        content.keyed(rows(3), ["x"], "z", 1)


def test_a_name_that_is_needed_for_another_column_is_refused():
    with pytest.raises(ConfigError, match="there is a column 'evenstep_key' in the data, a name that is needed"):
        content.keyed(pa.table({content.KEY: [1.0]}), [content.KEY], None, 1)


def test_a_part_with_nulls_only_is_refused():
    with pytest.raises(ConfigError, match="column 'x' has only nulls, at least in some part of the data; fill it"):
        content.keyed(pa.table({"x": pa.nulls(3)}), ["x"], None, 1)


def test_tasks_that_write_rows_do_not_import_torch():
    code = "import sys, evenstep.data.content; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
