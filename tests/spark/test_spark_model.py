"""Models trained on RDDs, in all modes: what comes of it, and the arithmetic of deltas."""

import numpy as np
import pytest
import torch


def build():
    torch.manual_seed(5)
    return torch.nn.Linear(3, 3)


def pairs():
    points = np.random.default_rng(0).random((240, 3)).astype(np.float32)
    return [(point, int(point.argmax())) for point in points]


def fit(session, mode, options, epochs, directory):
    from evenstep.spark import SparkModel, load_spark_model

    rdd = session.sparkContext.parallelize(pairs(), 2)
    model = SparkModel(build, optimizer_config={"lr": 1.0}, mode=mode, metrics=["accuracy"], seed=3, **options)
    x, y = np.stack([x for x, _ in pairs()]), np.array([y for _, y in pairs()])
    before = model.evaluate(x, y)
    model.fit(rdd, epochs=epochs, batch_size=40)
    after = model.evaluate(x, y)
    of_array, of_rdd = model.predict(x), model.predict(session.sparkContext.parallelize(list(x), 5))
    assert np.array_equal(np.stack(of_array), np.stack(of_rdd)), "in the order of the rows"
    kept = None
    if directory:
        other = SparkModel("torch.nn:Identity", mode=mode)
        other.save(directory)
        kept = vars(load_spark_model(directory)._job) == vars(other._job)
    return before, after, len(model.training_histories), model.fingerprint, kept


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("synchronous", {"num_workers": 1, "shards": 4}),
        ("asynchronous", {"frequency": "epoch"}),
        ("asynchronous", {"frequency": "batch", "parameter_server": "http", "num_workers": 3}),
        ("hogwild", {"frequency": "batch"}),
    ],
    ids=str,
)
def test_every_mode_learns_and_predicts_in_order(spark, mode, options, tmp_path):
    before, after, histories, fingerprint, kept = spark.call(fit, mode, options, 8, str(tmp_path / "model"))
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > 0.7, "whoever sends when: less than 0.8 takes a rare order of updates"
    assert (fingerprint is not None) == (mode == "synchronous")
    assert kept
    assert histories == {"synchronous": 1}.get(mode, options.get("num_workers", 2))


def one_partition_alone(session):
    """With one worker, the server has what the worker has: that of plain torch on the same batches."""
    from evenstep.engine.randomness import derive
    from evenstep.spark import SparkModel

    rdd = session.sparkContext.parallelize(pairs(), 1)
    found = {}
    for frequency in ("epoch", "batch"):
        model = SparkModel(build, optimizer_config={"lr": 0.2}, mode="asynchronous", frequency=frequency, seed=3)
        model.fit(rdd, epochs=2)
        found[frequency] = [value.numpy() for value in model.module().state_dict().values()]
    x = torch.tensor(np.stack([x for x, _ in pairs()]))
    y = torch.tensor([y for _, y in pairs()])
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), 0.2)
    for epoch in range(2):
        order = torch.randperm(240, generator=torch.Generator().manual_seed(derive("order", 3, 0, epoch)))
        for first in range(0, 240, 32):
            chosen = order[first : first + 32]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(plain(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return found, [value.detach().numpy() for value in plain.parameters()]


def test_one_worker_and_a_server_are_plain_training(spark):
    found, plain = spark.call(one_partition_alone)
    for values in found.values():
        for ours, theirs in zip(values, plain, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_arguments_that_make_no_sense_are_refused():
    pytest.importorskip("pyspark", reason="Spark is not there: pip install 'evenstep[spark]'")
    from evenstep.core.errors import CheckpointError, ConfigError
    from evenstep.spark import SparkModel, load_spark_model

    with pytest.raises(ConfigError, match="mode='sync', expected one of 'synchronous', 'asynchronous', 'hogwild'"):
        SparkModel(build, mode="sync")
    with pytest.raises(ConfigError, match="frequency='step', expected one of 'epoch', 'batch'"):
        SparkModel(build, frequency="step")
    with pytest.raises(ConfigError, match="metric='precision'; expected one of accuracy"):
        SparkModel(build, metrics=["precision"])
    for name in ("num_workers", "batch_size", "shards"):
        with pytest.raises(ConfigError, match=f"{name}=0, expected a whole number above 0"):
            SparkModel(build, **{name: 0})
    for name in ("epochs", "batch_size"):
        with pytest.raises(ConfigError, match=f"{name}=0, expected a whole number above 0"):
            SparkModel(build).fit(None, **{name: 0})
    with pytest.raises(ConfigError, match="the data are a list; expected an RDD of pairs of features and label"):
        SparkModel(build).fit([])
    with pytest.raises(ConfigError, match="2 rows of features and 1 labels, expected as many of both"):
        SparkModel(build).evaluate(np.zeros((2, 3)), [0])
    with pytest.raises(CheckpointError, match="holds no model"):
        load_spark_model("/nowhere")
