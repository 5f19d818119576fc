"""What every worker does when an estimator is fitted: train on the files that the executors have written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.spark.names import resolve

__all__ = ["Fitted", "Means", "Training", "build", "figures_of", "inputs_of", "loss_of", "noting", "state_of", "train"]


@dataclass(frozen=True)
class Training:
    """What to train, on what, and how.

    Attributes:
        model: Builds the model, without arguments.
        loss: The mean loss, from output and target.
        optimizer: Creates an optimizer from parameters.
        optimizer_options: Its other arguments.
        metrics: By name: functions of output and target that give a value for each sample.
        inputs: The columns that are passed to the model.
        label: The column that holds the target.
        classification: Whether the target is a class number.
        train: Where the training files are.
        validation: Where the validation files are, if any.
        epochs: How many times to go through the data.
        batch_size: Samples of a global batch.
        shards: Parts of every batch.
        seed: The seed of the run.
        weights: The initial weights, as safetensors; None: as the model is built.
    """

    model: Any
    loss: Any
    optimizer: Any
    optimizer_options: dict[str, Any]
    metrics: dict[str, Any]
    inputs: tuple[str, ...]
    label: str
    classification: bool
    train: str
    validation: str | None
    epochs: int
    batch_size: int
    shards: int
    seed: int
    weights: bytes | None = None


@dataclass(frozen=True)
class Fitted:
    """The result of training.

    Attributes:
        weights: Parameters and buffers, as safetensors.
        history: For every epoch the mean loss and metrics; those of validation begin with "validation_".
        fingerprint: The fingerprint of the run.
        width: How many numbers the model outputs for a row.
    """

    weights: bytes
    history: list[dict[str, float]]
    fingerprint: str
    width: int


def train(job: Training) -> Fitted:
    """Train, as one of the workers of a run."""
    for directory in (job.train, job.validation):
        if directory is not None and not Path(directory).is_dir():
            raise ConfigError(
                f"{directory} does not exist on this node; set storage= to a directory that the driver and all "
                "executors share"
            )
    columns = [*job.inputs, job.label]
    with evenstep.Run(shards=job.shards, seed=job.seed) as run:
        model, optimizer = run.prepare(*build(job))
        data = evenstep.data.parquet(job.train, columns)
        checked = evenstep.data.parquet(job.validation, columns) if job.validation is not None else None
        epochs: list[Means] = [Means() for _ in range(job.epochs)]
        history: list[dict[str, float]] = []
        for batch in run.batches(data, job.batch_size, job.epochs):
            assert batch.position is not None, "batches of a data set have a position"
            means = epochs[batch.position.epoch]
            found = run.step(batch, lambda part: loss_of(job, model, part), optimizer)
            loss, metrics = found if job.metrics else (found, {})
            means.add(len(batch), {"loss": float(loss), **metrics})
            if batch.is_last:
                history.append(means.value)
                if checked is not None:
                    figures = run.evaluate(checked, job.batch_size, lambda part: figures_of(job, model, part))
                    history[-1] |= {f"validation_{name}": value for name, value in figures.items()}
        fingerprint = run.fingerprint()
    with torch.inference_mode():
        width = model.eval()(*inputs_of(data.part([0]), job.inputs))[0].numel()
    return Fitted(safetensors.torch.save(state_of(model)), history, fingerprint, width)


class Means:
    """Means over the samples of an epoch."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, count: int, values: dict[str, float]) -> None:
        """Add the means over `count` samples."""
        self._count += count
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + count * float(value)

    @property
    def value(self) -> dict[str, float]:
        """The means over all samples."""
        return {name: total / self._count for name, total in self._sums.items()}


def build(job: Training) -> tuple[nn.Module, Optimizer]:
    """The model with its initial weights, and its optimizer."""
    model: nn.Module = resolve("model", job.model)()
    if job.weights is not None:
        model.load_state_dict(safetensors.torch.load(job.weights))
    return model, resolve("optimizer", job.optimizer)(model.parameters(), **job.optimizer_options)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Separate copies of a model's parameters and buffers."""
    return {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}


def inputs_of(part: dict[str, Tensor], names: tuple[str, ...]) -> list[Tensor]:
    """The columns that are passed to a model: doubles in single precision, everything else unchanged."""
    return [value.float() if (value := part[name]).dtype == torch.float64 else value for name in names]


def loss_of(job: Training, model: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of a part, and its metrics; an error of the model or the loss says what they were given."""
    given = inputs_of(part, job.inputs)
    with noting(dict(zip((*job.inputs, job.label), (*given, part[job.label]), strict=True))):
        output = model(*given)
        target = _target(job, part, output)
        metrics = {name: resolve("metric", function)(output.detach(), target) for name, function in job.metrics.items()}
        return resolve("loss", job.loss)(output, target), metrics


@contextmanager
def noting(columns: dict[str, Tensor]) -> Iterator[None]:
    """Whatever the user's functions raise inside this says what they were given."""
    try:
        yield
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        shown = ", ".join(f"{name!r} {str(value.dtype)[6:]} {list(value.shape)}" for name, value in columns.items())
        error.add_note(f"The model was given the columns {shown}.")
        raise


def figures_of(job: Training, model: nn.Module, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss and metrics of a part, as `run.evaluate` takes them."""
    loss, metrics = loss_of(job, model, part)
    return {"loss": loss, **metrics}


def _target(job: Training, part: dict[str, Tensor], output: Tensor) -> Tensor:
    """The target as the loss takes it.

    Raises:
        ConfigError: A label is not the number of a class, or does not have as many numbers as the output.
    """
    label = part[job.label]
    if not job.classification:
        if label.numel() != output.numel():
            widths = [value.numel() // len(value) for value in (output, label)]
            raise ConfigError(
                f"the model gives {widths[0]} numbers for a row and column {job.label!r} has {widths[1]}; expected "
                "as many of both"
            )
        return label.to(output.dtype).reshape(output.shape)
    classes = label.long()
    wrong = label != classes
    if wrong.any():
        raise ConfigError(
            f"column {job.label!r} has the value {label[wrong][0]:g}; expected the number of a class, from 0 on, or a "
            "loss of regression such as 'mse_loss'"
        )
    if output.ndim == 2 and (wrong := (classes < 0) | (classes >= output.shape[1])).any():
        raise ConfigError(
            f"column {job.label!r} has the value {classes[wrong][0]}, but the model gives scores for {output.shape[1]} "
            f"classes; expected numbers from 0 to {output.shape[1] - 1}"
        )
    return classes
