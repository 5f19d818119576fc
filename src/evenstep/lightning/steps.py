"""A batch of Lightning's loops becomes a step, or an evaluation, of the run: the module is called for each part."""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.types import _DEVICE
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.data.batch import Batch
from evenstep.engine.loss import Loss
from evenstep.engine.results import Note
from evenstep.lightning.effects import carry_out, join
from evenstep.lightning.loaders import SealedBatch
from evenstep.lightning.records import Forms, PartRecorder
from evenstep.run.run import Run
from evenstep.run.values import pack, unpack

__all__ = ["Steps"]

_NOTE = "lightning"  # the name of the note that a part leaves

Call = Callable[..., Any]


class Steps:
    """The steps of one entry point.

    Args:
        run: Its run.
        trainer: Its trainer.
        module: The user's module.
        precision: Converts its inputs.
        device: Where this worker computes.
        reduction: What `training_step` returns: the mean over its samples, or the sum.

    Attributes:
        dataloader_idx: Which of several loaders the batch is from.
    """

    def __init__(
        self,
        run: Run,
        trainer: Trainer,
        module: LightningModule,
        precision: Precision,
        device: _DEVICE,
        reduction: Literal["mean", "sum"],
    ) -> None:
        self._reduction: Literal["mean", "sum"] = reduction
        self._run, self._trainer, self._module, self._precision, self._device = run, trainer, module, precision, device
        self._one_loss_each = is_param_in_hook_signature(module.training_step, "optimizer_idx", explicit=True)
        self._recording: PartRecorder | None = None
        self._forms = Forms()
        self.dataloader_idx = 0

    @property
    def is_inside(self) -> bool:
        """Whether the module is computing a part in this thread."""
        return self._recording is not None and self._recording.is_inside

    def train(self, call: Call, optimizers: Sequence[Optimizer], batch: Any, *rest: Any) -> dict[str, Any]:
        """Train on a batch.

        Args:
            call: Calls `training_step`.
            optimizers: All optimizers; they step on one loss, unless `training_step` takes an `optimizer_idx`.
            batch: The batch.
            rest: The other arguments of `training_step`.

        Returns:
            What `on_train_batch_end` gets: the loss of the last step, and the rest of what was returned.
        """
        if not self._one_loss_each:
            return self._step(call, optimizers, batch, *rest)
        outputs = [self._step(call, [each], batch, *rest, number) for number, each in enumerate(optimizers)]
        return outputs[-1]

    def _step(self, call: Call, optimizers: Sequence[Optimizer], batch: Any, *rest: Any) -> dict[str, Any]:
        samples, trainer = self._cut(batch), self._trainer

        def function(part: Any) -> Any:
            with recording.part() as record:
                loss, others = _split(call(self._of_part(batch, part), *rest))
            numbers = {name: value for name, value in others.items() if _is_number(value)}
            note = {
                **self._forms.shorten(record.pack()),
                "numbers": numbers,
                "others": [name for name in others if name not in numbers],
            }
            if self._reduction == "sum":
                loss = loss / trainer.accumulate_grad_batches  # as Lightning does, to what it adds up
            return loss, {_NOTE: Note(base64.b64encode(pack(note, "what training_step did")).decode())}

        limit, by_value = trainer.gradient_clip_val or None, trainer.gradient_clip_algorithm == "value"
        with self._record("training_step") as recording:
            loss, metrics = self._run.step(
                samples,
                function,
                optimizers,
                clip_norm=None if by_value else limit,
                clip_value=limit if by_value else None,
                clip_order="optimizer",  # as Lightning's plugins have it
                reduction=self._reduction,
                scaler=getattr(self._precision, "scaler", None),
            )
        notes = self._forms.restore([unpack(base64.b64decode(text)) for text in metrics[_NOTE]])
        sizes = [size for size in samples.sizes if size]
        carry_out(self._module, "training_step", notes, sizes)
        numbers = join([{name: _as_tensor(v) for name, v in note["numbers"].items()} for note in notes], sizes)
        others = {name: _Elsewhere(name) for name in notes[0]["others"]}
        found = loss.to(device=self._device, dtype=torch.get_default_dtype())
        found = found * trainer.accumulate_grad_batches  # Lightning divides what each batch adds
        return {"loss": found, **move_data_to_device(numbers, self._device), **others}

    def evaluate(self, hook: str, call: Call, batch: Any, *rest: Any) -> Any:
        """Validate, test or predict on a batch; returns what all parts returned, as one.

        Args:
            hook: The method to call.
            call: Calls it.
            batch: The batch.
            rest: Its other arguments.
        """
        samples = self._cut(batch)

        def function(part: Any) -> Any:
            with recording.part() as record:
                output = call(self._of_part(batch, part), *rest)
            return {
                **self._forms.shorten(record.pack()),
                "output": output if predicts else _sendable(output) if wanted else None,
            }

        predicts, wanted = hook == "predict_step", self._is_wanted(hook.replace("_step", "_batch_end"))
        with self._record(hook) as recording:
            found = self._run.collect(samples, function)
        sizes = [size for size in samples.sizes if size]
        carry_out(self._module, hook, self._forms.restore(found), sizes)
        outputs = [each["output"] for each in found]
        try:
            return move_data_to_device(join(outputs, sizes), self._device)
        except ValueError as error:
            if not predicts:
                return outputs
            raise UnsupportedError(
                f"predict_step returned {error}, which cannot be put together from the parts of a batch; expected "
                "tensors with a row for each sample or lists with an item for each, in tuples or dicts"
            ) from error

    def _is_wanted(self, hook: str) -> bool:
        """Whether anything besides Lightning itself, which ignores it, gets what a step returns."""
        theirs = [each for each in self._trainer.callbacks if not type(each).__module__.startswith("lightning.")]
        return is_overridden(f"on_{hook}", self._module) or any(
            is_overridden(f"on_{hook}", c, Callback) for c in theirs
        )

    @contextmanager
    def _record(self, hook: str) -> Iterator[PartRecorder]:
        self._recording = PartRecorder(self._trainer, self._module, hook)
        try:
            with self._recording.running():
                yield self._recording
        finally:
            self._recording = None

    def _cut(self, batch: Any) -> Batch:
        if isinstance(batch, SealedBatch):
            return batch.batch
        if isinstance(batch, list | tuple | dict) and any(isinstance(b, SealedBatch) for b in _items(batch)):
            raise UnsupportedError(
                "several DataLoaders at once give one batch; expected one: let a data set put their samples together "
                "(torch.utils.data.StackDataset), or give them one after the other (ConcatDataset)"
            )
        return self._run.cut(batch)

    def _of_part(self, batch: Any, part: Any) -> Any:
        """A part as the module gets it. A whole batch has already been through the hooks."""
        if not isinstance(batch, SealedBatch):
            return part
        part = self._precision.convert_input(part)
        part = LightningModule._on_before_batch_transfer(self._module, part, self.dataloader_idx)
        return self._module._apply_batch_transfer_handler(part, device=self._device, dataloader_idx=self.dataloader_idx)


class _Elsewhere:
    """Replaces something that a part returned besides its loss, which stays on the worker that computed the part."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise UnsupportedError(
            f"'{self._name}' of what training_step returned was asked for its {attribute}; it is not a number, so it "
            "stays with the worker that computed the part: log it, or append it to a list of the module"
        )


def _split(output: Any) -> tuple[Any, dict[str, Any]]:
    """The loss that `training_step` returned, and the rest."""
    others = {key: value for key, value in output.items() if key != "loss"} if isinstance(output, dict) else {}
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor | Loss):
        raise UnsupportedError(
            f"training_step returned {'a dict whose loss is ' if isinstance(output, dict) else ''}a "
            f"{type(loss).__name__}; expected the loss: to skip a batch, leave it out of the data, or return loss * 0"
        )
    return loss, others


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point())


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _sendable(output: Any) -> Any:
    """What a part returned, if it can be sent to others."""
    try:
        pack(output, "what was returned")
    except ConfigError:
        return None
    return output


def _items(batch: Any) -> Sequence[Any]:
    return list(batch.values()) if isinstance(batch, dict) else batch
