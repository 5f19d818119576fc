"""The parameters of estimator and model as pyspark.ml keeps them: each a `Param` that is set, copied and saved."""

from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasSeed,
    HasValidationIndicatorCol,
)
from pyspark.ml.util import DefaultParamsReader

from evenstep.core.errors import ConfigError
from evenstep.spark.names import is_classification, name_of

__all__ = ["TrainingParams", "metadata_of"]

_FUNCTIONS = ("model", "loss", "optimizer")


def _param(name: str, doc: str, convert: Any = TypeConverters.identity) -> Any:
    return Param(Params._dummy(), name, doc, typeConverter=convert)


class TrainingParams(
    HasFeaturesCol,
    HasInputCols,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasSeed,
    HasValidationIndicatorCol,
):
    """The parameters that `Estimator` documents."""

    model = _param("model", "builds the model: a function, or 'module:name'")
    loss = _param(
        "loss", "the name of a function in torch.nn.functional, a function of output and target, 'module:name'"
    )
    optimizer = _param(
        "optimizer", "the name of a class in torch.optim, a function of the parameters, or 'module:name'"
    )
    optimizerConfig = _param("optimizerConfig", "other arguments of the optimizer")
    metrics = _param("metrics", "names of metrics, or functions that give a value for each sample")
    classification = _param("classification", "whether labels are class numbers", TypeConverters.toBoolean)
    epochs = _param("epochs", "how many times to go through the data", TypeConverters.toInt)
    batchSize = _param("batchSize", "samples of a global batch", TypeConverters.toInt)
    shards = _param("shards", "parts of every batch, the unit of arithmetic", TypeConverters.toInt)
    numWorkers = _param("numWorkers", "how many workers, each in a task slot", TypeConverters.toInt)
    validationSplit = _param("validationSplit", "the fraction of the rows for validation", TypeConverters.toFloat)
    keyCol = _param("keyCol", "the column that determines the order of the rows", TypeConverters.toString)
    storage = _param("storage", "a directory that the driver and all executors share", TypeConverters.toString)
    startTimeout = _param(
        "startTimeout", "seconds that workers may take to get their slots and start", TypeConverters.toFloat
    )
    inferenceBatchSize = _param("inferenceBatchSize", "rows predicted at once", TypeConverters.toInt)

    def _set_defaults(self) -> None:
        self._setDefault(
            loss="cross_entropy",
            optimizer="Adam",
            optimizerConfig={},
            metrics=[],
            epochs=10,
            batchSize=32,
            shards=8,
            numWorkers=2,
            validationSplit=0.0,
            startTimeout=3600.0,
            inferenceBatchSize=1024,
            seed=0,
        )

    def check_counts(self, *names: str) -> None:
        """Check parameters that count something.

        Raises:
            ConfigError: One of them is not above 0.
        """
        for name in names:
            if self.getOrDefault(name) < 1:
                raise ConfigError(f"{name}={self.getOrDefault(name)}, expected a whole number above 0")

    def inputs(self) -> tuple[str, ...]:
        """The columns that are passed to the model."""
        if self.isDefined(self.inputCols):
            return tuple(self.getInputCols())
        return (self.getFeaturesCol(),)

    def is_classification(self) -> bool:
        """Whether labels are class numbers: as the user says, or else as the loss takes them."""
        if self.isDefined(self.classification):
            return bool(self.getOrDefault(self.classification))
        return is_classification(self.getOrDefault(self.loss))

    def metrics_by_name(self) -> dict[str, Any]:
        """The metrics that were asked for."""
        found = self.getOrDefault(self.metrics)
        return {m.rpartition(":")[2] if isinstance(m, str) else m.__name__: m for m in found}

    def plain_params(self) -> dict[str, Any]:
        """What was set, as JSON can hold it: functions by name.

        Raises:
            ConfigError: A function cannot be found by name.
        """
        found = {param.name: value for param, value in self._paramMap.items()}
        for name in _FUNCTIONS:
            if name in found:
                found[name] = name_of(name, found[name])
        if "metrics" in found:
            found["metrics"] = [name_of("metric", metric) for metric in found["metrics"]]
        return found


def metadata_of(kind: type, path: str, session: Any) -> dict[str, Any]:
    """The metadata of a saved stage.

    Raises:
        ConfigError: It is a stage of another kind.
    """
    found: dict[str, Any] = DefaultParamsReader.loadMetadata(path, session)
    if found["class"] != f"{kind.__module__}.{kind.__name__}":
        other = found["class"].rpartition(".")[2]
        raise ConfigError(f"{path} holds one {other}, expected one {kind.__name__}; {other}.load reads it")
    return found
