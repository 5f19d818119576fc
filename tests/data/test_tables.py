"""Parquet files as a data set: what pyarrow reads, row by row and in parts, and errors that name file and column."""

import pickle

import numpy as np
import pytest
import torch

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.data.loader import Loader
from evenstep.data.order import Order
from workers import run_workers

pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow: pip install 'evenstep[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 103


def table(rows=ROWS, seed=0):
    generator = np.random.default_rng(seed)
    features = generator.random((rows, 3), dtype=np.float32)
    image = pa.FixedSizeListArray.from_arrays(pa.array(generator.integers(0, 255, rows * 4).astype(np.uint8)), 4)
    return pa.table(
        {
            "features": list(features),
            "image": image,
            "nested": [[[float(row), 1.0]] * 2 for row in range(rows)],
            "label": generator.integers(0, 10, rows),
            "count": generator.integers(0, 60000, rows).astype(np.uint16),
            "flag": generator.random(rows) < 0.5,
            "text": [f"row {row}" for row in range(rows)],
        }
    )


@pytest.fixture
def files(tmp_path):
    """Two files of several row groups, and one that is none of ours."""
    whole = table()
    pq.write_table(whole.slice(60), tmp_path / "b.parquet", row_group_size=17)
    pq.write_table(whole.slice(0, 60), tmp_path / "a.parquet", row_group_size=25, compression="zstd")
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


@pytest.fixture(params=[2**30, 1], ids=["all at once", "a row group at a time"])
def cache_bytes(request):
    return request.param


def test_rows_are_those_that_pyarrow_reads(files, cache_bytes):
    found, expected = evenstep.data.parquet(files, cache_bytes=cache_bytes), table().to_pylist()
    assert len(found) == ROWS
    assert found.columns == list(table().column_names)
    for row in (0, 24, 25, 59, 60, 76, 77, ROWS - 1, -1):
        sample = found[row]
        assert {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in sample.items()} == {
            name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in expected[row].items()
        }
    assert [found[5]["features"].dtype, found[5]["image"].dtype, found[5]["count"].dtype] == [
        torch.float32,
        torch.uint8,
        torch.int32,
    ]
    with pytest.raises(IndexError, match="row 103 of 103"):
        found[ROWS]


def test_a_part_is_what_default_collate_makes_of_its_samples(files, cache_bytes):
    found = evenstep.data.parquet(files, cache_bytes=cache_bytes)
    indices = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:40].tolist()
    part = found.part(indices)
    expected = torch.utils.data.default_collate(found.__getitems__(indices))
    assert part.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, torch.Tensor):
            assert part[name].dtype == values.dtype
            assert torch.equal(part[name], values)
        else:
            assert part[name] == values


def test_columns_are_chosen_and_given_in_their_order(files):
    found = evenstep.data.parquet([files / "b.parquet"], columns=["label", "features"])
    assert len(found) == ROWS - 60
    assert list(found.part([3, 1])) == ["label", "features"]


def test_loaders_give_the_same_as_loading_inline(files, cache_bytes):
    order = Order(ROWS, 20, num_shards=4, seed=3, shuffle=True, drop_last=False)
    found = evenstep.data.parquet(files, ["features", "label"], cache_bytes=cache_bytes)
    found[0]  # a copy of a data set that is in use

    def parts(dataset, loaders):
        loader = Loader(dataset, lambda: range(4), 3, "sample", loaders=loaders, timeout_s=60.0)
        return [part for batch in loader.load(order.requests(0)) for part in batch.parts.values()]

    for one, other in zip(parts(found, 0), parts(pickle.loads(pickle.dumps(found)), 2), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_on_files_ends_on_one_fingerprint(files):
    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = torch.nn.Linear(3, 10)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            data = evenstep.data.parquet(files, ["features", "label"])
            for batch in run.batches(data, batch_size=16):
                run.step(batch, lambda part: torch.nn.functional.cross_entropy(model(part["features"]), part["label"]))
            return run.fingerprint()

    assert len({*run_workers(1, body), *run_workers(3, body)}) == 1


def test_a_hugging_face_data_set_trains_as_it_is():
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    data = datasets.Dataset.from_dict({"x": [[float(row), 1.0] for row in range(20)]}).with_format("torch")

    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = torch.nn.Linear(2, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
            for batch in run.batches(data, batch_size=8):
                run.step(batch, lambda part: model(part["x"]).square().mean())
            return run.fingerprint()

    assert len({*run_workers(1, body), *run_workers(2, body)}) == 1


@pytest.mark.parametrize("cache", [2**30, 1])
def test_little_is_kept_decoded(files, cache):
    found = evenstep.data.parquet(files, ["label"], cache_bytes=cache)
    for row in range(ROWS):
        found[row]
    assert len(found._decoded) == 1
    assert sum(len(block["label"]) for block in found._decoded.values()) == (ROWS if cache > 1 else 9)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([[1.0, 2.0], [1.0]], "column 'x' of .*f.parquet has 2 numbers in row 0 but 1 in row 1"),
        ([1.0, None], "column 'x' of .*f.parquet has no value in row 1; fill it"),
        ([[1.0, 2.0], [None, 1.0]], "column 'x' of .*f.parquet has an element without a value in row 1"),
    ],
)
def test_what_cannot_be_a_tensor_is_named(tmp_path, values, sentence):
    pq.write_table(pa.table({"x": values}), tmp_path / "f.parquet")
    with pytest.raises(ConfigError, match=sentence):
        evenstep.data.parquet(tmp_path / "f.parquet")[0]


def test_paths_types_and_columns_that_do_not_fit_are_refused(files, tmp_path):
    def refused(sentence, *args, **options):
        with pytest.raises(ConfigError, match=sentence):
            evenstep.data.parquet(*args, **options)

    refused("there is no file or directory .*nowhere", tmp_path / "nowhere")
    refused("there is no column 'lable' in .*a.parquet, which has features, image", files, columns=["lable"])
    refused(r"columns='label', expected a list of names: columns=\['label'\]", files, columns="label")
    refused(r"columns=\[\], expected at least one of features", files, columns=[])
    refused("no path to a Parquet file was given", [])
    (tmp_path / "empty").mkdir()
    refused(r"empty has no \*.parquet file", tmp_path / "empty")
    (tmp_path / "text.parquet").write_text("no table at all, and no footer")
    refused("text.parquet cannot be read as a Parquet file", tmp_path / "text.parquet")
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"label": [1.5]}), other / "c.parquet")
    refused(
        "column 'label' is int64 in .*a.parquet, but .*c.parquet has double", [files / "a.parquet", other], ["label"]
    )
    refused("column 'text' is string in .*a.parquet, but .*c.parquet has none", [files / "a.parquet", other], ["text"])
    pq.write_table(pa.table({"when": pa.array([1], pa.timestamp("s"))}), other / "d.parquet")
    refused("column 'when' is timestamp.* expected numbers, lists of numbers", other / "d.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.float32())}), other / "e.parquet")
    refused("e.parquet and what was given with it have no row", other / "e.parquet")
    refused("nosuch://x cannot be read", "nosuch://x")


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd", "lz4", "brotli"])
def test_compressed_files_and_addresses_give_the_rows_that_were_written(tmp_path, compression):
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=25, compression=compression)
    expected = torch.from_numpy(np.stack(table()["features"].to_pylist()).astype(np.float32))
    for address in (path, f"file://{path}", f"file:{path}"):
        found = evenstep.data.parquet(address, ["features"]).part(np.arange(ROWS)[::-1])
        assert torch.equal(found["features"], expected.flip(0)), address


def test_files_of_fsspec_are_read():
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not there")
    memory = fsspec.filesystem("memory")
    with memory.open("/evenstep-test/a.parquet", "wb") as file:
        pq.write_table(table(), file)
    try:
        found = evenstep.data.parquet("memory://evenstep-test", ["label"])
        assert found.part(range(ROWS))["label"].tolist() == table()["label"].to_pylist()
    finally:
        memory.rm("/evenstep-test", recursive=True)
