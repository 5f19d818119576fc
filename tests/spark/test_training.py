"""What a worker does when an estimator is fitted, in this process: no Spark is needed to see it."""

import traceback
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from evenstep.core.errors import ConfigError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not there: pip install 'evenstep[spark]'")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not there: pip install 'evenstep[spark]'")

from evenstep.server import ParameterServer  # noqa: E402  # only where pyarrow is
from evenstep.spark.apart import Meeting, merged_buffers, train_apart  # noqa: E402
from evenstep.spark.training import Training, train  # noqa: E402

POINTS = np.random.default_rng(0).random((24, 3)).astype(np.float32)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


@pytest.fixture
def job(tmp_path):
    def made(labels, **changes):
        directory = tmp_path / "rows"
        directory.mkdir()
        pq.write_table(pa.table({"features": list(POINTS), "label": labels}), directory / "0.parquet")
        plain = Training(
            build,
            "cross_entropy",
            "SGD",
            {"lr": 0.1},
            {},
            ("features",),
            "label",
            True,
            str(directory),
            None,
            2,
            12,
            4,
            0,
        )
        return replace(plain, **changes)

    return made


def test_a_model_is_trained_without_any_metrics(job):
    fitted = train(job(POINTS.argmax(1)))
    assert [list(epoch) for epoch in fitted.history] == [["loss"], ["loss"]]
    assert fitted.history[1]["loss"] < fitted.history[0]["loss"]


@pytest.mark.parametrize("label", [1.5, float("nan")])
def test_a_label_that_is_no_number_of_a_class_is_refused(job, label):
    with pytest.raises(ConfigError, match=rf"column 'label' has the value {label}; expected the number of a class"):
        train(job(np.full(24, label)))


@pytest.mark.parametrize("label", [3, -1, -100])
def test_a_label_beyond_the_classes_of_the_model_is_refused(job, label):
    with pytest.raises(ConfigError, match=rf"column 'label' has the value {label}, .* scores for 3 classes"):
        train(job(np.full(24, label)))


def test_a_target_of_another_width_than_the_output_is_refused(job):
    with pytest.raises(ConfigError, match="the model gives 3 numbers for a row and column 'label' has 1"):
        train(job(POINTS[:, 0], loss="mse_loss", classification=False))


def test_an_error_of_the_model_says_what_it_was_given(job):
    with pytest.raises(RuntimeError) as caught:
        train(job(POINTS.argmax(1), model=lambda: nn.Linear(4, 3)))
    assert "was given the columns 'features' float32 [3, 3], 'label' int64 [3]." in "".join(
        traceback.format_exception(caught.value)
    )


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))


@pytest.mark.parametrize("frequency", ["epoch", "batch"])
def test_statistics_of_workers_that_train_apart_are_averaged_over_their_rows(job, frequency):
    """As plain torch finds them, on the rows of each worker."""
    apart = job(POINTS.argmax(1), model=normed, epochs=3, batch_size=100)
    parts = POINTS[:8], POINTS[8:]
    with ParameterServer(normed(), host="127.0.0.1", staleness=None, transports=["tcp"], token="secret") as server:
        meeting = Meeting(server.urls["tcp"], None, "secret", frequency, 0.0)
        shares = [
            share
            for number, points in enumerate(parts)
            for share in train_apart(apart, meeting, number, iter([(p, int(p.argmax())) for p in points]))
        ]
    merged = merged_buffers(shares)
    expected = []
    for points in parts:
        layer = nn.BatchNorm1d(3)
        for _ in range(3):
            layer(torch.from_numpy(points))
        expected.append(layer)
    for name in ("running_mean", "running_var"):
        one, two = (getattr(layer, name) for layer in expected)
        torch.testing.assert_close(merged[f"0.{name}"], (8 * one + 16 * two) / 24)
    assert merged["0.num_batches_tracked"] == 3
