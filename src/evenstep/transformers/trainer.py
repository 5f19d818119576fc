"""`Trainer`: the loops, callbacks and checkpoints of transformers around steps of a run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import skip_first_batches
from torch import Tensor, nn
from transformers import trainer as loops
from transformers.trainer_utils import get_last_checkpoint

from evenstep.core import env
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.data.batch import Batch
from evenstep.engine.loss import Loss
from evenstep.engine.results import Note
from evenstep.run.followers import Followers
from evenstep.run.run import Run
from evenstep.transformers import checkpoints
from evenstep.transformers.loaders import Deferred, EpochLoader, HeldBatch, loader_of
from evenstep.transformers.logs import Logs, PartLogs, merged
from evenstep.transformers.outputs import joined, mean, weight_of
from evenstep.transformers.places import Acting, changed, once_as_first
from evenstep.transformers.refusals import refuse_arguments, refuse_optimizer, refuse_parts
from evenstep.transformers.stepping import own_optimizer, step_elsewhere, step_here
from evenstep.transformers.tokens import TokenCount

__all__ = ["Trainer"]

_NOTE = "transformers"  # the name of the note that a part leaves: its tokens (all, without padding), weight and logs


class Trainer(transformers.Trainer):
    """Trains with the same weights, bit for bit, on any number of workers, whichever of them die.

    The arguments are those of `transformers.Trainer`. A batch (`per_device_train_batch_size` times
    `gradient_accumulation_steps` samples) is cut into shards, and `compute_loss` is called for each part. Every entry
    point (train, evaluate, predict) is a separate run.

    Args:
        args: As for `transformers.Trainer`.
        shards: K; see `evenstep.Run`.
        sync_batchnorm: Whether batch norm spans all shards.
        whole: Whether the optimizer looks at all parameters at once, so that one worker steps all of them.
        options: More options of `evenstep.Run`, such as `threads`, `timeout_s` or `arithmetic`.
        kwargs: As for `transformers.Trainer`.

    Raises:
        UnsupportedError: The training arguments ask for something that cannot be exact.
    """

    def __init__(
        self,
        *args: Any,
        shards: int | None = None,
        sync_batchnorm: bool = True,
        whole: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._options = {"progress": False, "graphs": False, **(options or {}), "shards": shards}
        self._sync_batchnorm, self._whole = sync_batchnorm, whole
        self._place = env.read()
        self._run: Run | None = None
        self._is_prepared = self._lacks_weights = False
        self._tokens = TokenCount()  # of the last batch
        self._logs = PartLogs()
        super().__init__(*args, **kwargs)
        refuse_arguments(self.args)
        self.accelerator.dataloader_config.dispatch_batches = False  # else only the first process iterates over streams
        Acting(self._place.worker)

    # ---- runs ----

    @property
    def run(self) -> Run:
        """The run of the entry point that is being called.

        Raises:
            ConfigError: There is none.
        """
        if self._run is None:
            raise ConfigError("there is no run; this works only inside trainer.train, evaluate or predict")
        return self._run

    @contextmanager
    def _within(self, **options: Any) -> Iterator[Run]:
        """A run, or the one that is already open."""
        if self._run is not None:
            yield self._run
            return
        with Run(seed=self.args.seed, device=str(self.args.device), **{**self._options, **options}) as self._run:
            try:
                yield self._run
            finally:
                self._run, self._is_prepared = None, False

    def is_local_process_zero(self) -> bool:
        """Whether this is the first worker, which writes logs."""
        return self._place.worker == 0

    is_world_process_zero = is_local_process_zero

    # ---- training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """See `transformers.Trainer`."""
        if trial is not None:
            raise UnsupportedError("a search over hyperparameters; expected plain training: search without evenstep")
        with self._within() as run, ExitStack() as stack:
            stack.enter_context(changed(loops, "skip_first_batches", _skip))
            path = resume_from_checkpoint or None
            if path is True:
                path = run.once(lambda: get_last_checkpoint(self.args.output_dir)) or True
            if isinstance(path, str):
                path, has_weights = stack.enter_context(checkpoints.available(run, path))
                self._lacks_weights = not has_weights
                checkpoints.compare(Path(path), run)
            try:
                return super().train(path, trial, ignore_keys_for_eval)
            finally:
                if self.optimizer is not None:
                    step_here(self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._lacks_weights:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        refuse_parts(self)
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        optimizer = own_optimizer(self.optimizer)
        refuse_optimizer(model, optimizer, self.args.max_grad_norm)
        self.run.prepare(model, optimizer, sync_batchnorm=self._sync_batchnorm, whole=self._whole)
        self._is_prepared = True
        self._followers = Followers(
            self.run,
            model,
            self.callback_handler.callbacks,
            "transformers",
            "prepare an AveragedModel by trainer.run.prepare in on_train_begin, and update it in trainer.run.edit",
        )
        self.run.count_from(self.state.global_step)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        step_elsewhere(self.optimizer)
        return model, loader

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load = super()._load_optimizer_and_scheduler
        self.run.edit(lambda: load(checkpoint))
        scheduler = Path(checkpoint) / "scheduler.pt"
        if scheduler.is_file():  # on every worker
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        self.run.edit(super()._load_best_model)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The batches of a step; their items are counted part by part."""
        del device
        return [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on a batch: forward, backward and update."""
        del num_items_in_batch
        if isinstance(inputs, Deferred):
            self._tokens = TokenCount()
            return torch.zeros((), device=self.args.device)
        self._followers.look()
        model.train()
        limit = self.args.max_grad_norm
        loss, metrics = self.run.step(
            self._cut(inputs),
            partial(self._loss_of, model),
            own_optimizer(self.optimizer),
            clip_norm=limit if limit and limit > 0 else math.inf,  # the norm is logged in any case
        )
        tokens, weights, logs = zip(*metrics[_NOTE], strict=True)
        self._tokens = TokenCount.total(tokens)
        self._log_all(logs, weights)
        found: Tensor = loss.to(device=self.args.device, dtype=torch.float32)
        return found

    def _loss_of(self, model: nn.Module, part: Any) -> tuple[Loss, dict[str, Any]]:
        """The mean loss of a part, with its weight."""
        inputs = self._prepare_inputs(part)
        padding = getattr(self.processing_class, "pad_token_id", None)
        tokens = TokenCount.of(inputs, getattr(self.model, "main_input_name", "input_ids"), padding)
        weight = weight_of(inputs, shifted=self._loss_shifts_labels)
        with self.compute_loss_context_manager(), self._logs.part() as logs:
            found = self.compute_loss(
                model, inputs, num_items_in_batch=self._get_num_items_in_batch([inputs], self.args.device)
            )
        loss = found if isinstance(found, Loss) else Loss(found, weight=weight)
        return loss, {_NOTE: Note([tokens, float(loss.weight), logs])}

    def _cut(self, inputs: Any) -> Batch:
        return inputs.batch if isinstance(inputs, HeldBatch) else self.run.cut(inputs)

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        del model, grad_norm
        return self.run.grad_norm

    # ---- what is logged and counted ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values; those that `compute_loss` logs are logged once for all parts, their mean."""
        if not self._logs.keep(logs):
            super().log(logs, start_time)

    def _log_all(self, logs: Sequence[Logs], weights: Sequence[float]) -> None:
        for values in merged(logs, weights):
            super().log(values)

    def floating_point_ops(self, inputs: Any) -> int:
        """How much there was to compute for the batch."""
        del inputs
        return self._tokens.operations(self.model)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        del inputs
        self.state.num_input_tokens_seen += self._tokens.wanted(self.args.include_num_input_tokens_seen)

    # ---- batches ----

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        made = super()._get_dataloader(*args, is_training=is_training, **kwargs)
        if self._run is None:
            return made
        vars(self).get("_eval_dataloaders", {}).clear()  # a run's loader ends with it
        times = self.args.gradient_accumulation_steps if is_training else 1
        return loader_of(self._run, made, train=is_training, times=times)

    # ---- evaluation ----

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.Trainer`."""
        with self._within():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.Trainer`."""
        with self._within():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.Trainer`."""
        if not self._is_prepared:
            self.run.prepare(self.model, sync_batchnorm=self._sync_batchnorm)
            self._is_prepared = True
        self._preprocess = self.preprocess_logits_for_metrics
        with changed(self, "preprocess_logits_for_metrics", None):  # each part is, before it is sent
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, outputs and labels of a batch, put together over its parts."""
        step, wanted = super().prediction_step, "inputs" in self.args.include_for_metrics
        name = getattr(self.model, "main_input_name", "input_ids")

        def function(part: Any) -> dict[str, Any]:
            weight = weight_of(part, shifted=self._loss_shifts_labels)
            rows = part[name] if wanted else None
            with self._logs.part() as logs:
                loss, outputs, labels = step(model, part, prediction_loss_only, ignore_keys)
            if outputs is not None and self._preprocess is not None:
                outputs = self._preprocess(outputs, labels)
            return {
                "loss": loss, "weight": weight, "outputs": outputs, "labels": labels, "inputs": rows, "logs": logs
            }  # fmt: skip

        found = self.run.collect(self._cut(inputs), function)
        weights = [each["weight"] for each in found]
        self._log_all([each["logs"] for each in found], weights)
        loss = mean([each["loss"] for each in found], weights)
        outputs, labels, rows = (
            None if found[0][key] is None else self._prepare_input(joined([each[key] for each in found]))
            for key in ("outputs", "labels", "inputs")
        )
        if isinstance(inputs, HeldBatch) and wanted:
            inputs.known[name] = rows
        return None if loss is None else loss.to(self.args.device), outputs, labels

    # ---- checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        save = super()._save_checkpoint

        def write() -> str | None:
            save(model, trial)
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            checkpoints.describe(folder, self.run)
            best: str | None = self.state.best_model_checkpoint
            return best

        self.state.best_model_checkpoint = once_as_first(self.run, write)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model for plain transformers; when this returns, on every worker, it is there."""
        save = partial(super().save_model, output_dir, _internal_call)
        if _internal_call:
            save()
            return
        with self._within(quiet=True) as run:
            once_as_first(run, save)


def _skip(loader: Any, num_batches: int = 0) -> Any:
    return loader.after(num_batches) if isinstance(loader, EpochLoader) else skip_first_batches(loader, num_batches)
