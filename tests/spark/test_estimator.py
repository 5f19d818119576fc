"""The estimator: one fingerprint for all partitions and workers, and everything that pyspark.ml expects of a stage."""

import numpy as np
import pytest
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def single():
    return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))


def frame(session, partitions=4):
    from pyspark.ml.linalg import Vectors

    generator = np.random.default_rng(0)
    points = generator.random((240, 3))
    rows = [
        (Vectors.dense(p), [float(v) for v in p], float(p[0]), int(p.argmax()), float(p.sum()), n % 5 == 0)
        for n, p in enumerate(points)
    ]
    columns = ["features", "array", "first", "label", "total", "checks"]
    return session.createDataFrame(rows, columns).repartition(partitions)


def fit_on_partitions(session):
    from evenstep.spark import Estimator

    estimator = Estimator(
        model=build, epochs=4, batchSize=45, optimizerConfig={"lr": 0.1}, metrics=["accuracy"], validationSplit=0.25,
        probabilityCol="scores", shards=4, numWorkers=1,
    )  # fmt: skip
    one = estimator.fit(frame(session, 1))
    other = estimator.copy({estimator.numWorkers: 3}).fit(frame(session, 6))
    odd = frame(session).withColumnRenamed("first", "the `first.one`")
    rows = one.transform(odd).select("label", "prediction", "scores", "features").collect()
    model = one.module().eval()
    with torch.inference_mode():
        expected = model(torch.tensor(np.stack([row["features"].toArray() for row in rows])).float()).softmax(1)
    try:
        one.transform(odd.selectExpr("if(label = 1, null, features) as features")).collect()
        null = ""
    except Exception as error:  # noqa: BLE001  # looked at by the test
        null = str(error)
    apart = np.abs(np.array([row["scores"] for row in rows]) - expected.double().numpy()).max()
    right = np.mean([row["label"] == row["prediction"] for row in rows])
    return one.fingerprint, other.fingerprint, one.weights == other.weights, one.history, right, apart, null


def test_partitions_and_workers_change_no_bit_and_predictions_are_the_models(spark):
    one, other, same, history, right, apart, null = spark.call(fit_on_partitions)
    assert null == (
        "[USER_RAISED_EXCEPTION] column 'features' of the DataFrame has no value in some row; fill it, or leave such "
        "rows out SQLSTATE: P0001"
    ), "one sentence, without a traceback"
    assert one == other
    assert same
    assert len(history) == 4
    assert history[-1].keys() == {"loss", "accuracy", "validation_loss", "validation_accuracy"}
    assert history[-1]["loss"] < history[0]["loss"]
    assert right > 0.7
    assert apart < 1e-6


def regress(session, directory):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    from evenstep.spark import Estimator, Model

    data = frame(session).withColumnRenamed("features", "given")
    assembler = VectorAssembler(inputCols=["array_0", "first", "total_1"], outputCol="features")
    data = data.selectExpr("array[1] as array_0", "first", "array[2] as total_1", "total", "checks")
    estimator = Estimator(
        model=single, loss="mse_loss", labelCol="total", predictionCol="guess",
        validationIndicatorCol="checks", epochs=1, batchSize=64, metrics=["mean_absolute_error"], numWorkers=1,
        shards=4,
    )  # fmt: skip
    pipeline = Pipeline(stages=[assembler, estimator])
    fitted = pipeline.fit(data)
    guesses = [row["guess"] for row in fitted.transform(data).collect()]
    try:
        estimator.copy({estimator.model: lambda: single()}).save(f"{directory}/lambda")
        refused = ""
    except Exception as error:  # noqa: BLE001  # looked at by the test
        refused = str(error)
    import importlib.util
    import sys

    mine = f"{directory}/mine_for_spark.py"
    with open(mine, "w") as file:
        file.write("from torch import nn\n\ndef single():\n    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))\n")
    spec = importlib.util.spec_from_file_location("mine_for_spark", mine)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mine_for_spark"] = module
    spec.loader.exec_module(module)
    session.sparkContext.addPyFile(mine)
    stage = fitted.stages[1].copy()
    assert isinstance(stage, Model)
    stage._set(model=module.single)
    PipelineModel([fitted.stages[0], stage]).save(f"{directory}/fitted")
    loaded = PipelineModel.load(f"{directory}/fitted")
    again = [row["guess"] for row in loaded.transform(data).collect()]
    Pipeline(stages=[assembler, estimator.copy({estimator.model: "mine_for_spark:single"})]).save(f"{directory}/begun")
    kept = Pipeline.load(f"{directory}/begun").getStages()[1]
    stage.save(f"{directory}/model")
    try:
        Estimator.load(f"{directory}/model")
    except Exception as error:  # noqa: BLE001  # looked at by the test
        refused = [refused, f"{type(error).__name__}: {error}"]
    same = np.allclose(sorted(guesses), sorted(again), rtol=1e-6)  # Spark gives no order to rows
    return same, refused, loaded.stages[1].history == fitted.stages[1].history, {
        kept.getOrDefault(name) for name in ("loss", "labelCol", "model")
    }  # fmt: skip


def test_regression_in_a_pipeline_is_saved_and_loaded(spark, tmp_path):
    same, refused, history, kept = spark.call(regress, str(tmp_path))
    assert same
    assert history
    assert "cannot be saved: expected a function that can be imported by name" in refused[0]
    assert refused[1] == f"ConfigError: {tmp_path}/model holds one Model, expected one Estimator; Model.load reads it"
    assert kept == {"mse_loss", "total", "mine_for_spark:single"}


def mistakes(session):
    from evenstep.spark import Estimator

    data = frame(session)
    good = Estimator(model=build, epochs=1, numWorkers=1)

    def said(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            return f"{type(error).__name__}: {error}"

    return [
        said(lambda: Estimator().fit(data)),
        said(lambda: Estimator(model=build, loss="crossentropy").fit(data)),
        said(lambda: good.copy({good.featuresCol: "nowhere"}).fit(data)),
        said(lambda: good.copy({good.validationSplit: 1.5}).fit(data)),
        said(lambda: good.copy({good.storage: "/nowhere"}).fit(data)),
        said(lambda: good.setParams(epochz=3)),
        said(lambda: good.copy({good.labelCol: "word"}).fit(data.selectExpr("*", "'a' as word"))),
        said(lambda: good.copy({good.labelCol: "total"}).fit(data)),
        said(lambda: good.copy({good.validationSplit: 0.5, good.validationIndicatorCol: "checks"}).fit(data)),
        said(lambda: good.copy({good.numWorkers: 3, good.shards: 2}).fit(data)),
        said(lambda: good.copy({good.metrics: ["precision"]}).fit(data)),
        *[said(lambda name=name: good.copy({good.getParam(name): 0}).fit(data)) for name in ("epochs", "shards")],
        *[
            said(lambda mark=mark: good.copy({good.validationIndicatorCol: "mark"}).fit(data.selectExpr("*", mark)))
            for mark in ("int(first) as mark", "nullif(first > 0.5, true) as mark", "false as mark")
        ],
    ]


def test_mistakes_get_a_sentence(spark):
    missing, loss, column, split, storage, name, *others = spark.call(mistakes)
    text, label, both, workers, metric, epochs, shards, kind, null, none = others
    assert missing == "ConfigError: Estimator(model=...) is missing; expected a function that builds the model"
    assert loss.startswith("ConfigError: loss='crossentropy'; expected a function of torch.nn.functional")
    assert column.startswith("ConfigError: the DataFrame has no column 'nowhere'; its columns are features")
    assert split == "ConfigError: validationSplit=1.5, expected a fraction between 0 and 1"
    assert storage.startswith("ConfigError: storage='/nowhere' is not a directory")
    assert name.startswith("ConfigError: Estimator has no parameter 'epochz'")
    assert text == (
        "ConfigError: column 'word' is string; expected numbers: index it first, as StringIndexer of "
        "pyspark.ml.feature does"
    )
    assert label.startswith("ConfigError: column 'total' has the value ")
    assert both == (
        "ConfigError: validationSplit=0.5 and validationIndicatorCol='checks', expected one of them: both say which "
        "rows validate"
    )
    assert workers == "ConfigError: numWorkers=3 and shards=2, expected a shard for every worker"
    assert metric.startswith("ConfigError: metric='precision'; expected one of accuracy")
    assert epochs == "ConfigError: epochs=0, expected a whole number above 0"
    assert shards == "ConfigError: shards=0, expected a whole number above 0"
    assert kind == "ConfigError: column 'mark' is int; expected boolean: whether a row validates"
    assert null == (
        "ConfigError: column 'mark' of the DataFrame has rows without a value; expected true or false in each"
    )
    assert none == "ConfigError: the DataFrame has no rows for validation; expected at least one"


@pytest.mark.parametrize("what", ["loss", "optimizer", "metric", "model"])
def test_functions_are_found_by_name_or_refused(what):
    pytest.importorskip("pyspark", reason="Spark is not there: pip install 'evenstep[spark]'")
    from evenstep.core.errors import ConfigError
    from evenstep.spark.names import name_of, resolve

    names = {"loss": "mse_loss", "optimizer": "SGD", "metric": "accuracy", "model": "torch.nn:Identity"}
    assert callable(resolve(what, names[what]))
    assert name_of(what, names[what]) == names[what]
    with pytest.raises(ConfigError, match=f"{what}='nothing'; expected"):
        resolve(what, "nothing")
    with pytest.raises(ConfigError, match="cannot be saved"):
        name_of(what, lambda: None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"metrics": "accuracy"}, r"metrics='accuracy', expected a list: metrics=\['accuracy'\]"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear; expected a function that builds it"),
        ({"options": {"rate": 1}}, "optimizer SGD cannot be made with {'rate': 1}: got an unexpected keyword argument"),
        ({"options": [1]}, r"options of the optimizer are \[1\]; expected a dict"),
    ],
)
def test_what_is_to_be_trained_is_checked_before_anything_runs(changes, sentence):
    pytest.importorskip("pyspark", reason="Spark is not there: pip install 'evenstep[spark]'")
    from evenstep.core.errors import ConfigError
    from evenstep.spark.names import check_functions

    good = {"model": single, "loss": "mse_loss", "optimizer": "SGD", "options": {"lr": 0.1}, "metrics": ["accuracy"]}
    check_functions(**good)
    with pytest.raises(ConfigError, match=sentence):
        check_functions(**{**good, **changes})
