"""`Exact`: Lightning's loops, callbacks and loggers around steps of a run."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_only_in_fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import (
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MetricCollection

from evenstep.core import env
from evenstep.core.errors import CheckpointError, ConfigError, UnsupportedError
from evenstep.lightning import checkpoints
from evenstep.lightning.launcher import Launcher
from evenstep.lightning.loaders import SealedBatch, WaitingBatch, loader_of
from evenstep.lightning.refusals import AVERAGE_INSTEAD, refuse_unsupported
from evenstep.lightning.steps import Steps
from evenstep.lightning.trainer import adapted
from evenstep.run.followers import Followers
from evenstep.run.run import Run

__all__ = ["Exact"]


class Exact(Strategy):
    """Trains with the same weights, bit for bit, on any number of workers, whichever of them die.

    `Trainer(strategy=Exact(shards=8))`. Every batch is cut into shards; `training_step` and the like are called once
    for each. Every entry point (fit, validate, test, predict) is a separate run.

    Args:
        shards: K; see `evenstep.Run`.
        seed: Fixes the order of samples and all randomness. None: what `lightning.seed_everything` was given, or 0.
        sync_batchnorm: Whether batch norm spans all shards.
        whole: Whether optimizers look at all parameters at once, so that one worker steps all of them.
        reduction: "sum" if `training_step` returns the sum over its samples instead of the mean.
        options: More options of `evenstep.Run`, such as `threads`, `timeout_s` or `arithmetic`.

    Attributes:
        run: The run of the entry point that is being called.
        global_rank: The number of this worker. There is one world, whatever the number of workers: `world_size` is 1.
    """

    strategy_name = "exact"

    def __init__(
        self,
        shards: int | None = None,
        seed: int | None = None,
        *,
        sync_batchnorm: bool = True,
        whole: bool = False,
        reduction: Literal["mean", "sum"] = "mean",
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = {"progress": False, "graphs": False, **options, "shards": shards}
        self._seed, self._sync_batchnorm, self._whole, self._reduction = seed, sync_batchnorm, whole, reduction
        self._place = env.read()
        self.cluster_environment: ClusterEnvironment | None = None  # these three are set by the Trainer
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self.world_size, self.node_rank = 1, 0
        self._run: Run | None = None
        self._set_rank(self._place.worker)
        self._steps: Steps | None = None
        self._begins_at = 0  # how many steps came before fit: in an earlier fit, or in a checkpoint
        self._stepping = self._lacks_weights = False

    def _set_rank(self, worker: int) -> None:
        self.global_rank = self.local_rank = worker
        rank_zero_only.rank = rank_zero_only_in_fabric.rank = worker

    # ---- runs ----

    @property
    def run(self) -> Run:
        """The run of the entry point that is being called.

        Raises:
            ConfigError: There is none.
        """
        if self._run is None:
            raise ConfigError("there is no run; this works only inside trainer.fit, validate, test or predict")
        return self._run

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "the Trainer sets the environment first"
        assert self.parallel_devices is not None, "the Trainer sets the devices first"
        if self.num_nodes != 1:
            raise UnsupportedError(f"Trainer(num_nodes={self.num_nodes}); expected 1: use `evenstep run`")
        launched = self._place.segment_fd is not None or self._place.torchrun
        asked, found = len(self.parallel_devices), self._place.num_workers
        if launched and self.root_device.type == "cpu" and asked not in (1, found):
            raise ConfigError(f"Trainer(devices={asked}) but {found} workers were started; leave devices out")
        self._launcher = Launcher(self, self.cluster_environment, asked, launched=launched)

    def within(self, trainer: Trainer, function: Callable[[], Any]) -> Any:
        """See `Runs`."""
        if self._run is not None:
            raise UnsupportedError("an entry point of a Trainer was called inside another one of the same strategy")
        with self._open() as self._run:
            try:
                self._set_rank(self._run.worker)
                with adapted(trainer, self._run):
                    return function()
            finally:
                if trainer.state.fn == TrainerFn.FITTING:
                    self._begins_at = self._run.version
                self._run = self._steps = None

    def _open(self, **options: Any) -> Run:
        seed = self._seed if self._seed is not None else env.lightning_seed()
        return Run(seed=seed, device=str(self.root_device), **{**self._options, **options})

    # ---- what the Trainer asks of any strategy ----

    @property
    def root_device(self) -> torch.device:
        """Where this worker computes."""
        devices = self.parallel_devices
        return devices[self.global_rank % len(devices)] if devices else torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first worker, which writes logs."""
        return self.global_rank == 0

    def model_to_device(self) -> None:
        """Move the model to the device."""
        assert self.model is not None, "the Trainer connects the model first"
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        del name
        if self._run is not None:
            self._run.once(lambda: None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all workers what the first one has."""
        del src
        if self._run is None:
            return obj
        return self._run.once(lambda: str(obj) if isinstance(obj, Path) else obj)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Give all workers the first one's decision."""
        del all
        return bool(self.broadcast(bool(decision)))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Nothing to do: outside the parts of a batch all workers have the same."""
        del group, reduce_op
        self._refuse_inside("reduce")
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Nothing to do: outside the parts of a batch all workers have the same."""
        del group, sync_grads
        self._refuse_inside("all_gather")
        return tensor

    def _refuse_inside(self, name: str) -> None:
        if self._steps is not None and self._steps.is_inside:
            raise UnsupportedError(
                f"{name} inside a step, which is called once for each part of a batch; for the rows of all parts "
                "use self.trainer.strategy.run.gather(x) in training_step"
            )

    # ---- models and optimizers ----

    def setup(self, trainer: Trainer) -> None:
        """Take model and optimizers into the run."""
        module = self.lightning_module
        refuse_unsupported(trainer, module)
        super().setup(trainer)
        _make_ready(module)
        if self._lacks_weights and not self.run.catching_up:
            raise CheckpointError("the checkpoint has changed since this run began to read it; start the run again")
        self._lacks_weights = False
        self.run.prepare(module, sync_batchnorm=self._sync_batchnorm)
        if trainer.state.fn == TrainerFn.FITTING:
            for optimizer in self.optimizers:
                self.run.prepare(module, optimizer, sync_batchnorm=self._sync_batchnorm, whole=self._whole)
            self.run.count_from(self._begins_at)
        self._steps = Steps(self.run, trainer, module, self.precision_plugin, self.root_device, self._reduction)
        self._followers = Followers(self.run, module, trainer.callbacks, "lightning", AVERAGE_INSTEAD)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers and schedulers, one or several of each."""
        module = self.lightning_module
        configured = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=module)
        if configured is None:
            raise UnsupportedError("configure_optimizers returned None; expected at least one optimizer")
        optimizers, schedulers, monitor = _configure_optimizers(configured)
        configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        _validate_optimizers_attached(optimizers, configs)
        _validate_scheduler_api(configs, module)
        self.optimizers, self.lr_scheduler_configs = optimizers, configs

    def teardown(self) -> None:
        """Release everything; the model is an ordinary one when the run ends."""
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("_on_before_batch_transfer", None)
        self.precision_plugin.teardown()
        assert self.accelerator is not None, "the Trainer sets the accelerator first"
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- batches ----

    def process_dataloader(self, dataloader: object) -> object:
        """Make a loader give batches of the run."""
        trainer = self.lightning_module.trainer
        training = bool(trainer.training)
        return loader_of(
            self.run,
            dataloader,
            train=training,
            times=trainer.accumulate_grad_batches if training else 1,
            limit=lambda: int(trainer.num_training_batches),
        )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a whole batch; the parts of a batch of the run are moved when they are computed."""
        if not isinstance(batch, SealedBatch):
            return super().batch_to_device(batch, device, dataloader_idx)
        self._in_steps.dataloader_idx = dataloader_idx
        return batch

    @property
    def _in_steps(self) -> Steps:
        assert self._steps is not None, "setup comes before any batch"
        return self._steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch: forward, backward and update."""
        if isinstance(args[0], WaitingBatch):
            return torch.zeros((), device=self.root_device)
        if not self._stepping:
            raise UnsupportedError(
                "optimizer_step called its closure by itself, to compute gradients without stepping on them; expected "
                "optimizer.step(closure=optimizer_closure): a step is one transaction of all workers"
            )
        self._followers.look()
        return self._in_steps.train(partial(Strategy.training_step, self), self.optimizers, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Train on the batch of the closure, which does everything."""
        del optimizer, model, kwargs
        self._stepping = True
        try:
            return closure()
        finally:
            self._stepping = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing to do: the step has gone backward."""
        del optimizer, args, kwargs
        return closure_loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate on a batch."""
        return self._in_steps.evaluate("validation_step", partial(Strategy.validation_step, self), *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test on a batch."""
        return self._in_steps.evaluate("test_step", partial(Strategy.test_step, self), *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict for a batch."""
        return self._in_steps.evaluate("predict_step", partial(Strategy.predict_step, self), *args, **kwargs)

    # ---- checkpoints ----

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, the same on all workers."""
        load = partial(self.checkpoint_io.load_checkpoint, checkpoint_path, weights_only=weights_only)
        found = checkpoints.read(self.run, checkpoint_path, load)
        self._lacks_weights = checkpoints.is_without_weights(found)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._begins_at = checkpoints.begin_of(found, self.run)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, unless the run already has newer ones."""
        if not self._lacks_weights:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of optimizers, for all workers."""
        load = super().load_optimizer_state_dict
        self.run.edit(lambda: load(checkpoint))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint that Lightning can load with any strategy."""
        write = partial(self.checkpoint_io.save_checkpoint, checkpoint, filepath, storage_options=storage_options)

        def write_for_all(run: Run) -> None:
            steps = self._begins_at if self._run is None else run.version
            checkpoint[checkpoints.OURS] = checkpoints.about(run, steps)
            run.once(lambda: write() and None)

        if self._run is not None:
            write_for_all(self._run)
        elif not self.lightning_module.trainer.interrupted:  # by the script, after fit
            with self._open(quiet=True) as run:
                write_for_all(run)
        elif self.is_global_zero:  # the run has failed on all workers
            write()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint."""
        if self._run is None:
            super().remove_checkpoint(filepath)
        else:
            self._run.once(lambda: self.checkpoint_io.remove_checkpoint(filepath) and None)


def _make_ready(module: LightningModule) -> None:
    """Prepare a module to be called for parts of batches."""
    for child in module.modules():
        if isinstance(child, MetricCollection) and child._enable_compute_groups:
            # metrics of a group share states, which their first update finds out: but a worker that comes later has
            # not seen it
            if child._groups_checked:
                child._compute_groups_create_state_ref(copy=True)
            child._enable_compute_groups, child._groups_checked, child._groups = False, False, {}
    before = module._on_before_batch_transfer

    def of_whole_batches(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, SealedBatch) else before(batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = of_whole_batches
