"""A PyTorch model as an estimator of `pyspark.ml`: fitted on the executors, without moving rows to the driver."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyspark import keyword_only
from pyspark.ml import Estimator as MLEstimator
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # Spark's own word
from pyspark.sql.types import BooleanType

from evenstep.core.errors import ConfigError
from evenstep.spark.model import Model
from evenstep.spark.names import check_functions
from evenstep.spark.params import TrainingParams, metadata_of
from evenstep.spark.rows import check_numbers, folder_in, named, plain, write_into
from evenstep.spark.stage import run
from evenstep.spark.training import Training, train

__all__ = ["Estimator", "divide"]


class Estimator(TrainingParams, MLEstimator, MLReadable, MLWritable):
    """Trains a PyTorch model on a DataFrame, to the same bits on any number of partitions, executors and workers.

    `fit` has the executors write the rows as Parquet files, in an order that depends on the content of the rows (or on
    `keyCol`), and trains on them in the tasks of a job; see `evenstep.spark.run`. Only metadata, and the weights at the
    end, come to the driver.

    Args:
        model: Builds the model: a function without arguments, or "module:name" of one.
        loss: A function of output and target, "module:name" of one, or the name of one in `torch.nn.functional`.
        optimizer: A function of the parameters, "module:name" of one, or the name of a class in `torch.optim`.
        optimizerConfig: Its other arguments, such as {"lr": 0.1}.
        metrics: "accuracy", "mean_absolute_error", "mean_squared_error", or functions of output and target that give a
            value for every sample.
        classification: Whether labels are class numbers; None: if the loss is "cross_entropy" or "nll_loss".
        featuresCol: A column of numbers, vectors or arrays of one length.
        inputCols: Several columns instead, passed to the model in this order.
        labelCol: The target.
        predictionCol: Where `transform` puts predictions: a class number, a number, or an array of numbers.
        probabilityCol: Where it puts the probabilities of the classes, if this is set.
        epochs: How many times to go through the data.
        batchSize: Samples of a global batch.
        shards: Parts of every batch, the unit of arithmetic.
        numWorkers: How many workers; each takes a task slot.
        validationIndicatorCol: A boolean column: rows where it is true are used for validation, not for training.
        validationSplit: The fraction of the rows to use for validation instead; their content decides which.
        keyCol: The column that determines the order of the rows, instead of their content.
        storage: A directory that the driver and all executors share; required when there are several machines.
        startTimeout: Seconds that workers may take to get their task slots, which other jobs may have, and to start.
        inferenceBatchSize: Rows predicted at once.
        seed: The seed of the run.
    """

    @keyword_only
    def __init__(
        self,
        *,
        model: Callable[[], Any] | str | None = None,
        loss: Callable[..., Any] | str = "cross_entropy",
        optimizer: Callable[..., Any] | str = "Adam",
        optimizerConfig: dict[str, Any] | None = None,  # these are the words of pyspark.ml
        metrics: Sequence[Any] | None = None,
        classification: bool | None = None,
        featuresCol: str = "features",
        inputCols: list[str] | None = None,
        labelCol: str = "label",
        predictionCol: str = "prediction",
        probabilityCol: str | None = None,
        epochs: int = 10,
        batchSize: int = 32,
        shards: int = 8,
        numWorkers: int = 2,
        validationIndicatorCol: str | None = None,
        validationSplit: float = 0.0,
        keyCol: str | None = None,
        storage: str | None = None,
        startTimeout: float = 3600.0,
        inferenceBatchSize: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._set_defaults()
        self.setParams(**self._input_kwargs)

    def setParams(self, **options: Any) -> "Estimator":  # as all of pyspark.ml
        """Set parameters by name."""
        unknown = [name for name in options if not self.hasParam(name)]
        if unknown:
            raise ConfigError(f"Estimator has no parameter {unknown[0]!r}; see help(evenstep.spark.Estimator)")
        return self._set(**{name: value for name, value in options.items() if value is not None})

    def _fit(self, dataset: DataFrame) -> Model:
        if not self.isDefined(self.model):
            raise ConfigError("Estimator(model=...) is missing; expected a function that builds the model")
        self.check_counts("epochs", "batchSize", "shards", "numWorkers", "inferenceBatchSize")
        workers, shards = self.getOrDefault(self.numWorkers), self.getOrDefault(self.shards)
        if workers > shards:
            raise ConfigError(f"numWorkers={workers} and shards={shards}, expected a shard for every worker")
        check_functions(*map(self.getOrDefault, ("model", "loss", "optimizer", "optimizerConfig", "metrics")))
        storage = self.getOrDefault(self.storage) if self.isDefined(self.storage) else None
        with folder_in(storage) as folder:
            job = self._training(dataset, folder)
            patience_s = self.getOrDefault(self.startTimeout)
            session = dataset.sparkSession
            fitted = run(train, job, workers=workers, session=session, start_timeout_s=patience_s, quiet=True)
        model = Model(fitted.weights, fitted.history, fitted.fingerprint, fitted.width)
        return self._copyValues(model)

    def _training(self, dataset: DataFrame, folder: Path) -> Training:
        """Have the executors write the data; returns what is to be trained on them."""
        columns = [*self.inputs(), self.getLabelCol()]
        check_numbers(dataset, columns)
        key = self.getOrDefault(self.keyCol) if self.isDefined(self.keyCol) else None
        train_rows, validation_rows = self._divide(dataset, columns, key)
        train_files, validation_files = write_into(folder / "training", train_rows, columns, key), None
        if validation_rows is not None:
            validation_files = write_into(folder / "validation", validation_rows, columns, key)
        get = self.getOrDefault
        return Training(
            get(self.model),
            get(self.loss),
            get(self.optimizer),
            get(self.optimizerConfig),
            self.metrics_by_name(),
            self.inputs(),
            self.getLabelCol(),
            self.is_classification(),
            train_files,
            validation_files,
            get(self.epochs),
            get(self.batchSize),
            get(self.shards),
            get(self.seed),
        )

    def _divide(self, dataset: DataFrame, columns: list[str], key: str | None) -> tuple[DataFrame, DataFrame | None]:
        """The rows for training, and those for validation; chosen neither at random nor by partition."""
        part = self.getOrDefault(self.validationSplit)
        if self.isDefined(self.validationIndicatorCol):
            mark = self.getValidationIndicatorCol()
            if part:
                raise ConfigError(
                    f"validationSplit={part!r} and validationIndicatorCol={mark!r}, expected one of them: both say "
                    "which rows validate"
                )
            return _marked(dataset, mark)
        return divide(dataset, columns, key, part)

    def write(self) -> Any:
        """The writer that saves it; functions are saved by name."""
        return _EstimatorWriter(self)

    @classmethod
    def read(cls) -> Any:
        """The reader that loads it."""
        return _EstimatorReader(cls)


def _marked(dataset: DataFrame, name: str) -> tuple[DataFrame, DataFrame]:
    """The rows for training, and those that a column marks for validation."""
    kinds = {field.name: field.dataType for field in dataset.schema.fields}
    if name not in kinds:
        raise ConfigError(f"the DataFrame has no column {name!r}; its columns are {', '.join(kinds)}")
    if not isinstance(kinds[name], BooleanType):
        raise ConfigError(f"column {name!r} is {kinds[name].simpleString()}; expected boolean: whether a row validates")
    mark = named(name)
    if dataset.filter(mark.isNull()).head(1):
        raise ConfigError(f"column {name!r} of the DataFrame has rows without a value; expected true or false in each")
    return dataset.filter(~mark), dataset.filter(mark)


def divide(dataset: DataFrame, columns: list[str], key: str | None, part: float) -> tuple[DataFrame, DataFrame | None]:
    """The rows for training and the fraction for validation; the content of a row decides which it is."""
    if not part:
        return dataset, None
    if not 0 < part < 1:
        raise ConfigError(f"validationSplit={part!r}, expected a fraction between 0 and 1")
    rows = plain(dataset, [*columns, *([key] if key is not None else [])])
    hashed = F.pmod(F.xxhash64(*map(named, [key] if key else columns)), F.lit(1 << 20))
    chosen = hashed < F.lit(round(part * (1 << 20)))
    return rows.filter(~chosen), rows.filter(chosen)


class _EstimatorWriter(DefaultParamsWriter):
    def saveImpl(self, path: str) -> None:  # Spark's name
        plain_params = self.instance.plain_params()
        DefaultParamsWriter.saveMetadata(self.instance, path, self.sparkSession, paramMap=plain_params)


class _EstimatorReader(DefaultParamsReader):
    def load(self, path: str) -> Estimator:
        metadata = metadata_of(Estimator, path, self.sparkSession)
        estimator = Estimator()
        estimator._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        return estimator
