"""The fitted model of an estimator: a transformer that predicts on the executors, in Arrow batches."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from pyspark.ml import Model as MLModel
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType
from torch import Tensor, nn

from evenstep.core.errors import ConfigError
from evenstep.data.columns import column_of
from evenstep.spark.names import resolve
from evenstep.spark.params import TrainingParams, metadata_of
from evenstep.spark.rows import check_numbers, numbers_of, required
from evenstep.spark.training import inputs_of, noting

__all__ = ["Model", "Predictor"]

_loaded: dict[str, nn.Module] = {}  # by fingerprint: a process loads a model once


@dataclass(frozen=True)
class Predictor:
    """How rows are predicted, on an executor.

    Attributes:
        model: Builds the model.
        weights: Its parameters and buffers, in a broadcast variable.
        fingerprint: Identifies the weights.
        names: The columns that a row has; those that are passed to the model follow them once more.
        inputs: Which these are.
        classification: Whether outputs are scores of classes.
        prediction: The name of the column for predictions.
        probability: The name of the column for probabilities, if they are wanted.
        batch_size: Rows predicted at once.
        several: Whether a prediction is an array of numbers.
    """

    model: Any
    weights: Any
    fingerprint: str
    names: tuple[str, ...]
    inputs: tuple[str, ...]
    classification: bool
    prediction: str
    probability: str | None
    batch_size: int
    several: bool

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows with their predictions."""
        torch.set_num_threads(1)
        model = self._load()
        for batch in batches:
            for first in range(0, batch.num_rows, self.batch_size):
                yield self._predict(model, batch.slice(first, self.batch_size))

    def _load(self) -> nn.Module:
        if self.fingerprint not in _loaded:
            model: nn.Module = resolve("model", self.model)()
            model.load_state_dict(safetensors.torch.load(self.weights.value))
            _loaded.clear()
            _loaded[self.fingerprint] = model.eval()
        return _loaded[self.fingerprint]

    def _predict(self, model: nn.Module, batch: pa.RecordBatch) -> pa.RecordBatch:
        part: dict[str, Any] = {}
        for number, name in enumerate(self.inputs, len(self.names)):
            column = column_of(name, batch.column(number), "the DataFrame")
            part[name] = torch.from_numpy(column) if isinstance(column, np.ndarray) else column
        given = inputs_of(part, self.inputs)
        with torch.inference_mode(), noting(dict(zip(self.inputs, given, strict=True))):
            output = model(*given)
        return self._append(batch.columns[: len(self.names)], output)

    def _append(self, columns: list[pa.Array], output: Tensor) -> pa.RecordBatch:
        names = list(self.names)
        if self.classification:
            columns.append(pa.array(output.argmax(-1).double().numpy()))
            names.append(self.prediction)
            if self.probability is not None:
                columns.append(_lists(output.softmax(-1)))
                names.append(self.probability)
        else:
            flat = output.double().reshape(len(output), -1)
            columns.append(_lists(flat) if self.several else pa.array(flat[:, 0].numpy()))
            names.append(self.prediction)
        return pa.RecordBatch.from_arrays(columns, names)


def _lists(rows: Tensor) -> pa.Array:
    offsets = torch.arange(0, rows.numel() + 1, max(1, rows.shape[1]), dtype=torch.int32)
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), pa.array(rows.double().reshape(-1).numpy()))


class Model(TrainingParams, MLModel, MLReadable, MLWritable):
    """A fitted model. `transform` adds predictions; `save` and `load` keep everything without pickling anything.

    Attributes:
        weights: Parameters and buffers, as safetensors.
        history: For every epoch, the means of loss and metrics.
        fingerprint: The fingerprint of the run that trained it.
        width: How many numbers the model outputs for a row.
    """

    def __init__(
        self,
        weights: bytes = b"",
        history: list[dict[str, float]] | None = None,
        fingerprint: str = "",
        width: int = 1,
    ) -> None:
        super().__init__()
        self._set_defaults()
        self.weights, self.history, self.fingerprint, self.width = weights, history or [], fingerprint, width

    def module(self) -> nn.Module:
        """The trained PyTorch model."""
        model: nn.Module = resolve("model", self.getOrDefault(self.model))()
        model.load_state_dict(safetensors.torch.load(self.weights))
        return model

    def _transform(self, dataset: DataFrame) -> DataFrame:
        self.check_counts("inferenceBatchSize")
        classification, inputs = self.is_classification(), self.inputs()
        probability = self.getProbabilityCol() if self.isSet(self.probabilityCol) else None
        if probability is not None and not classification:
            raise ConfigError(
                f"probabilityCol={probability!r}, but the loss is not one of classification; leave it out"
            )
        for name in (self.getPredictionCol(), probability):
            if name in dataset.columns:
                raise ConfigError(f"the DataFrame already has a column {name!r}; choose another predictionCol")
        check_numbers(dataset, inputs)
        several = self.width > 1 and not classification
        fields = [StructField(self.getPredictionCol(), ArrayType(DoubleType()) if several else DoubleType())]
        if probability is not None:
            fields.append(StructField(probability, ArrayType(DoubleType())))
        session = dataset.sparkSession
        how = Predictor(
            self.getOrDefault(self.model),
            session.sparkContext.broadcast(self.weights),
            self.fingerprint,
            tuple(dataset.columns),
            inputs,
            classification,
            self.getPredictionCol(),
            probability,
            self.getOrDefault(self.inferenceBatchSize),
            several,
        )
        widened = dataset.select("*", *required(dataset, inputs))
        widened = widened.toDF(*numbers_of(widened.columns))
        schema = StructType([*dataset.schema.fields, *fields])
        return widened.mapInArrow(lambda batches: how.rows(batches), schema)

    def copy(self, extra: Any = None) -> "Model":
        """A copy with the same weights."""
        found: Model = super().copy(extra)
        found.weights, found.history, found.fingerprint, found.width = (
            self.weights,
            self.history,
            self.fingerprint,
            self.width,
        )
        return found

    def write(self) -> Any:
        """The writer that saves it."""
        return _ModelWriter(self)

    @classmethod
    def read(cls) -> Any:
        """The reader that loads it."""
        return _ModelReader(cls)


class _ModelWriter(DefaultParamsWriter):
    def saveImpl(self, path: str) -> None:  # Spark's name
        model: Model = self.instance
        DefaultParamsWriter.saveMetadata(model, path, self.sparkSession, paramMap=model.plain_params())
        held = [(bytearray(model.weights), json.dumps(model.history), model.fingerprint, model.width)]
        columns = "weights binary, history string, fingerprint string, width int"
        rows = self.sparkSession.createDataFrame(held, columns)
        rows.coalesce(1).write.parquet(f"{path}/data")


class _ModelReader(DefaultParamsReader):
    def load(self, path: str) -> Model:
        metadata = metadata_of(Model, path, self.sparkSession)
        row = self.sparkSession.read.parquet(f"{path}/data").head()
        model = Model(bytes(row["weights"]), json.loads(row["history"]), row["fingerprint"], row["width"])
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
