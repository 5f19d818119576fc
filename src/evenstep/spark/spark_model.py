"""A model trained on an RDD of (features, label) pairs: exactly, or by workers that meet only at a parameter server."""

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from pyspark import RDD
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from torch import nn

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.server import ParameterServer
from evenstep.spark.apart import Meeting, merged_buffers, train_apart
from evenstep.spark.estimator import divide
from evenstep.spark.names import check_functions, is_classification, name_of, resolve
from evenstep.spark.pairs import FEATURES, LABEL, as_row, kinds_of
from evenstep.spark.rows import folder_in, write_into
from evenstep.spark.said import said_in
from evenstep.spark.stage import run
from evenstep.spark.training import Training, figures_of, inputs_of, noting, state_of, train

__all__ = ["SparkModel", "load_spark_model"]

Mode = Literal["synchronous", "asynchronous", "hogwild"]
_MODES = ("synchronous", "asynchronous", "hogwild")
_FREQUENCIES = ("epoch", "batch")


class SparkModel:
    """Trains a PyTorch model on an RDD whose elements are pairs: features, and a label.

    "synchronous": the workers share every batch, and the result does not depend on the number of workers, executors or
    partitions; see `Estimator`, which does the same for DataFrames. "asynchronous": every partition is a worker that
    pulls the parameters from a server on the driver, trains by itself for a batch or an epoch, and pushes what has
    changed; deltas are applied in full, one after the other. "hogwild": the same, but workers on the driver's machine
    subtract their deltas in shared memory without any locking.

    Args:
        model: Builds the model: a function without arguments, or "module:name" of one.
        loss: A function of output and target, "module:name" of one, or the name of one in `torch.nn.functional`.
        optimizer: A function of the parameters, "module:name" of one, or the name of a class in `torch.optim`. In the
            last two modes every worker has its own.
        optimizer_config: Its other arguments.
        metrics: Names or functions; see `Estimator`.
        mode: "synchronous", "asynchronous" or "hogwild".
        frequency: When workers of the last two modes meet the server: after every "epoch" or "batch".
        parameter_server: How they reach it: by "tcp" or "http".
        num_workers: How many workers; None: as many as the RDD has partitions, and when synchronous, task slots.
        batch_size: Samples of a batch; when synchronous, of a global batch.
        classification: Whether labels are class numbers; see `Estimator`.
        shards: Parts of every batch, when synchronous.
        seed: Fixes the order of samples and all randomness.
        storage: A directory that the driver and all executors share; see `Estimator`.
        start_timeout_s: How long synchronous workers may take to get their task slots, which other jobs may have, and
            to start.

    Attributes:
        weights: Parameters and buffers, as safetensors; None: as the model is built.
        training_histories: Figures epoch by epoch: one list for each synchronous `fit`, otherwise one for each worker.
        fingerprint: The fingerprint of the last synchronous run.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] | str,
        loss: Callable[..., Any] | str = "cross_entropy",
        optimizer: Callable[..., Any] | str = "SGD",
        optimizer_config: dict[str, Any] | None = None,
        *,
        metrics: tuple[Any, ...] | list[Any] = (),
        mode: Mode = "asynchronous",
        frequency: Literal["epoch", "batch"] = "epoch",
        parameter_server: Literal["tcp", "http"] = "tcp",
        num_workers: int | None = None,
        batch_size: int = 32,
        classification: bool | None = None,
        shards: int = 8,
        seed: int = 0,
        storage: str | None = None,
        start_timeout_s: float = 3600.0,
    ) -> None:
        for name, value, known in (
            ("mode", mode, _MODES),
            ("frequency", frequency, _FREQUENCIES),
            ("parameter_server", parameter_server, ("tcp", "http")),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}, expected one of {', '.join(map(repr, known))}")
        _check_counts(num_workers=num_workers, batch_size=batch_size, shards=shards)
        options = {"lr": 0.01} if optimizer_config is None else optimizer_config
        check_functions(model, loss, optimizer, options, metrics)
        self._mode, self._frequency, self._over = mode, frequency, parameter_server
        self._num_workers, self._storage, self._start_timeout_s = num_workers, storage, start_timeout_s
        names = {m.rpartition(":")[2] if isinstance(m, str) else m.__name__: m for m in metrics}
        is_classes = is_classification(loss) if classification is None else classification
        self._job = Training(
            model, loss, optimizer, options, names, (FEATURES,), LABEL, is_classes, "", None, 1,
            batch_size, shards, seed,
        )  # fmt: skip
        self.weights: bytes | None = None
        self.training_histories: list[list[dict[str, float]]] = []
        self.fingerprint: str | None = None

    def module(self) -> nn.Module:
        """The model with its present weights."""
        model: nn.Module = resolve("model", self._job.model)()
        if self.weights is not None:
            model.load_state_dict(safetensors.torch.load(self.weights))
        return model

    # ---- fitting ----

    def fit(
        self, rdd: RDD, epochs: int = 10, batch_size: int | None = None, validation_split: float = 0.0
    ) -> "SparkModel":
        """Train on pairs, starting from the present weights.

        Args:
            rdd: Its elements are (features, label): numbers or arrays of one shape.
            epochs: How many times to go through the data.
            batch_size: Instead of the model's.
            validation_split: The fraction of the rows for validation; in the modes with a server, the last rows of
                every worker.

        Raises:
            ConfigError: It is not an RDD, it has no rows, they are not pairs of numbers, or an argument is invalid.
        """
        _check_counts(epochs=epochs, batch_size=batch_size)
        if not isinstance(rdd, RDD):
            raise ConfigError(
                f"the data are a {type(rdd).__name__}; expected an RDD of pairs of features and label (for DataFrames "
                "there is evenstep.spark.Estimator)"
            )
        if not 0 <= validation_split < 1:
            raise ConfigError(f"validation_split={validation_split!r}, expected a fraction from 0 to below 1")
        if rdd.isEmpty():
            raise ConfigError("the RDD has no rows; expected at least one")
        job = replace(self._job, epochs=epochs, batch_size=batch_size or self._job.batch_size, weights=self.weights)
        if self._mode == "synchronous":
            self._fit_together(rdd, job, validation_split)
        else:
            self._fit_apart(rdd, job, validation_split)
        return self

    def _fit_together(self, rdd: RDD, job: Training, validation_split: float) -> None:
        session = SparkSession(rdd.context)
        kinds = kinds_of(rdd.first())
        rows, schema = rdd.map(lambda pair: as_row(pair, kinds)), f"{FEATURES} {kinds[0]}, {LABEL} {kinds[1]}"
        frame = session.createDataFrame(rows, schema, verifySchema=False).persist()  # it is read several times
        with folder_in(self._storage) as folder:
            try:
                train_rows, validation_rows = divide(frame, [FEATURES, LABEL], None, validation_split)
                train_files, validation_files = write_into(folder / "training", train_rows, [FEATURES, LABEL]), None
                if validation_rows is not None:
                    validation_files = write_into(folder / "validation", validation_rows, [FEATURES, LABEL])
            finally:
                frame.unpersist()
            job = replace(job, train=train_files, validation=validation_files)
            most = min(self._num_workers or rdd.getNumPartitions(), job.shards)
            workers = most if self._num_workers else (1, most)
            patience_s = self._start_timeout_s
            fitted = run(train, job, workers=workers, session=session, start_timeout_s=patience_s, quiet=True)
        self.weights, self.fingerprint = fitted.weights, fitted.fingerprint
        self.training_histories.append(fitted.history)

    def _fit_apart(self, rdd: RDD, job: Training, validation_split: float) -> None:
        if self._num_workers is not None and rdd.getNumPartitions() != self._num_workers:
            rdd = rdd.repartition(self._num_workers)
        model = self.module()
        host = rdd.context.getConf().get("spark.driver.host")
        transports = [self._over, "memory"] if self._mode == "hogwild" else [self._over]
        with ParameterServer(
            model,
            host=host,
            staleness=None,
            transports=transports,
            lock=self._mode != "hogwild",
            token=secrets.token_urlsafe(24),
        ) as server:
            meeting = Meeting(
                server.urls[self._over],
                server.urls.get("memory"),
                server.token or "",
                self._frequency,
                validation_split,
            )
            try:
                found = rdd.mapPartitionsWithIndex(
                    lambda number, rows: train_apart(job, meeting, number, rows)
                ).collect()
            except PySparkException as error:
                raise said_in(error) from error
        buffers = {name: value for name, value in merged_buffers(found).items() if name in model.state_dict()}
        self.weights = safetensors.torch.save({**state_of(model), **buffers})
        self.training_histories += [share.history for share in found]

    # ---- using it ----

    def predict(self, data: Any) -> list[np.ndarray[Any, Any]]:
        """Outputs for an array, or an RDD of features, in its order; those of an RDD are computed on the executors."""
        weights = self.weights if self.weights is not None else safetensors.torch.save(state_of(self.module()))
        if not isinstance(data, RDD):
            return list(_outputs(self._job, weights, iter(np.asarray(data))))
        job, held = self._job, data.context.broadcast(weights)
        try:
            return list(data.mapPartitions(lambda rows: _outputs(job, held.value, rows)).collect())
        except PySparkException as error:
            raise said_in(error) from error

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """The mean loss and metrics over all rows, each counted once.

        Raises:
            ConfigError: There are not as many labels as rows.
        """
        if len(x) != len(y):
            raise ConfigError(f"{len(x)} rows of features and {len(y)} labels, expected as many of both")
        part = {FEATURES: torch.as_tensor(np.asarray(x)), LABEL: torch.as_tensor(np.asarray(y))}
        model = self.module().eval()
        with torch.inference_mode():
            found = figures_of(self._job, model, part)
        return {name: float(value.double().mean()) for name, value in found.items()}

    # ---- saving it ----

    def save(self, path: str | Path) -> None:
        """Write weights and configuration to a directory: safetensors and JSON.

        Raises:
            ConfigError: A function cannot be imported by name.
        """
        job = self._job
        config = {
            "model": name_of("model", job.model),
            "loss": name_of("loss", job.loss),
            "optimizer": name_of("optimizer", job.optimizer),
            "optimizer_config": job.optimizer_options,
            "metrics": [name_of("metric", metric) for metric in job.metrics.values()],
            "mode": self._mode,
            "frequency": self._frequency,
            "parameter_server": self._over,
            "num_workers": self._num_workers,
            "batch_size": job.batch_size,
            "classification": job.classification,
            "shards": job.shards,
            "seed": job.seed,
            "storage": self._storage,
            "start_timeout_s": self._start_timeout_s,
        }
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / "weights.safetensors").write_bytes(safetensors.torch.save(state_of(self.module())))


def load_spark_model(path: str | Path) -> SparkModel:
    """A model that `SparkModel.save` has written.

    Raises:
        CheckpointError: The directory holds no such model.
    """
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = (folder / "weights.safetensors").read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no model that SparkModel.save has written: {error}") from error
    model = SparkModel(**config)
    model.weights = weights
    return model


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ConfigError(f"{name}={count!r}, expected a whole number above 0")


def _outputs(job: Training, weights: bytes, rows: Iterator[Any]) -> Iterator[np.ndarray[Any, Any]]:
    torch.set_num_threads(1)
    model: nn.Module = resolve("model", job.model)()
    model.load_state_dict(safetensors.torch.load(weights))
    model.eval()
    waiting: list[Any] = []

    def flush() -> Iterator[np.ndarray[Any, Any]]:
        (given,) = inputs_of({FEATURES: torch.as_tensor(np.stack(waiting))}, (FEATURES,))
        with torch.inference_mode(), noting({FEATURES: given}):
            yield from model(given).numpy()
        waiting.clear()

    for row in rows:
        waiting.append(np.asarray(row))
        if len(waiting) == 1024:
            yield from flush()
    if waiting:
        yield from flush()
