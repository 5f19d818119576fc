"""Features of Lightning that cannot be exact: found before anything is trained, and refused with a sentence."""

from collections.abc import Iterator

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from evenstep.core.errors import UnsupportedError

__all__ = ["AVERAGE_INSTEAD", "refuse_unsupported"]

AVERAGE_INSTEAD = "prepare an AveragedModel by trainer.strategy.run.prepare in on_fit_start, and update it in run.edit"

_INSIDE = {
    "on_before_backward": "the loss is in what on_train_batch_end gets",
    "on_after_backward": "for the norm of gradients, Trainer(gradient_clip_val=...) and trainer.strategy.run.grad_norm",
    "on_before_optimizer_step": "for the norm of gradients, Trainer(gradient_clip_val=...) and "
    "trainer.strategy.run.grad_norm",
    "configure_gradient_clipping": "Trainer(gradient_clip_val=..., gradient_clip_algorithm=...)",
    "backward": "return the loss from which backward starts",
    "optimizer_zero_grad": "nothing: gradients are those of the step",
}
"""Hooks inside a step, which is one transaction of all workers; and what to do instead."""

_CALLBACKS: dict[type[Callback], str] = {
    StochasticWeightAveraging: f"it changes parameters between steps; {AVERAGE_INSTEAD}",
    WeightAveraging: "it averages a copy of its own, which a worker that replaces another would not have; "
    f"{AVERAGE_INSTEAD}",
    ModelPruning: "it replaces parameters; prune before trainer.fit",
    GradientAccumulationScheduler: "let the DataLoader's batch_size grow instead",
    BatchSizeFinder: "it trains and then undoes it; use more shards if memory is short",
    LearningRateFinder: "it trains and then undoes it; find the learning rate without the exact mode",
}


def refuse_unsupported(trainer: Trainer, module: LightningModule) -> None:
    """Check that what is about to run can be exact.

    Raises:
        UnsupportedError: It cannot.
    """
    if trainer.state.fn == TrainerFn.FITTING:
        for sentence in _found(trainer, module):
            raise UnsupportedError(sentence)


def _found(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    yield from _of_training(trainer, module)
    for callback in trainer.callbacks:
        for kind, instead in _CALLBACKS.items():
            if isinstance(callback, kind):
                yield f"the callback {type(callback).__name__} has no exact equivalent: {instead}"
    for hook, instead in _INSIDE.items():
        for owner in (module, *trainer.callbacks):
            if hasattr(owner, hook) and is_overridden(hook, owner, Callback if isinstance(owner, Callback) else None):
                yield (
                    f"{type(owner).__name__} has a {hook}, which would be called in the middle of a step, but that is "
                    f"one transaction of all workers; instead: {instead}"
                )


def _of_training(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if not module.automatic_optimization:
        yield (
            "the module has automatic_optimization=False, so training_step would call backward by itself, but a step "
            "is computed by all workers together; return the loss, with several optimizers from configure_optimizers "
            "either one loss for all, or that of each: training_step(self, batch, batch_idx, optimizer_idx)"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield "training_step takes a dataloader_iter; expected the batch: each worker loads the parts that it computes"
    if trainer._val_check_time_interval is not None:
        yield (
            f"Trainer(val_check_interval=...) is a time ({trainer._val_check_time_interval:g} s), which each worker "
            "has by its own clock; expected a number of batches or a part of an epoch"
        )
