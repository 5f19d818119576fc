"""The facade: `Run` and its batches, step, evaluate, save and load."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core import env as environment
from evenstep.core.config import RunConfig
from evenstep.core.errors import ConfigError
from evenstep.data.batch import Batch
from evenstep.data.order import Deal
from evenstep.data.whole import cut_whole
from evenstep.engine.carries import Carry
from evenstep.engine.clipping import Clipping, warn_of_torchs
from evenstep.engine.determinism import device_of
from evenstep.engine.editing import edit
from evenstep.engine.logged import checked
from evenstep.engine.models import check_model
from evenstep.engine.optimizer_set import chosen
from evenstep.engine.randomness import derive
from evenstep.engine.scaling import Scaling
from evenstep.engine.step import StepTask
from evenstep.nn.convert import convert_sync_batchnorm
from evenstep.nn.gather import gather, rows_of_part
from evenstep.page.process import check_port
from evenstep.run.agreement import check_arithmetic, find_standing
from evenstep.run.assembly import Assembly
from evenstep.run.feed import Arrangement, Batches, Loading
from evenstep.run.server import Server
from evenstep.run.sharing import collect, exchange, once
from evenstep.run.summed import Summed

__all__ = ["Run"]

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741  # the type of the user's optimizer


class Run:
    """A training run whose result does not depend on the number of workers.

    Making it joins the other workers, seeds torch, NumPy and `random`, and pins what the bits depend on. Use it as a
    context manager: leaving it waits for all workers, prints the fingerprint and returns models and optimizers to
    ordinary ones.

    Args:
        shards: K, the number of parts of every batch and the unit of arithmetic; default 8. A run with another K is
            another computation.
        seed: Fixes the order of samples and all randomness.
        device: "cpu", "cuda" (worker i takes GPU i modulo their number) or "cuda:N".
        threads: Intra-op threads of every shard's computation; part of the arithmetic.
        timeout_s: How long any wait for another worker may take.
        quiet: No progress display and no closing fingerprint line.
        progress: Whether there is a progress display.
        on_nondeterminism: "error" raises where torch knows an operation to be non-deterministic, or where user code
            changes what the bits depend on; "warn" only warns.
        graphs: On a GPU, "auto" replays steps from CUDA graphs where they can be captured, with the same bits; True
            makes it an error where they cannot; False never does.
        overlap: On a GPU, replay the graphs of two shards at the same time: the same bits, and faster if one shard does
            not fill the GPU. Not for kernels of your own that write to memory which they keep between calls.
        recheck: Compute one in this many steps twice before it commits, by different workers, to find a machine that
            computes wrong; 0: none. See docs/wrong-machines.md. `evenstep run --recheck` takes precedence.
        tolerate_wrong: How often a worker may be found to compute wrong before it is dismissed; such a step is done
            again in any case.
        image: On a GPU, after how many steps the state is copied to the host, where it outlives all workers; "auto": as
            often as costs at most 2 % of a step; 0: never, and a run that loses all workers goes on from a checkpoint.
        arithmetic: "native": as this processor is fastest. "portable": the same bits on every processor with AVX2; see
            docs/processors.md. Default: what `evenstep run --arithmetic` says, or "native".
        server: The parameter server at which workers meet, as an `evenstep.Server`, or its address if the defaults
            suit. None: workers add up gradients among themselves.
        page: Whether a page of this run is served on this machine: True, or at which port. `evenstep run --page` takes
            precedence. See docs/watching.md.

    Attributes:
        worker: The number of this worker in its group, 0 for the first.
        group: The number of its group, 0 for the first; see `evenstep run --groups`.
        num_groups: How many groups there are.
        grad_norm: The norm of the gradients of the last step that was asked to clip it, before clipping.

    Raises:
        ConfigError: An argument makes no sense, or there are more workers than shards.
    """

    def __init__(
        self,
        shards: int | None = None,
        seed: int = 0,
        *,
        device: str = "cpu",
        threads: int = 1,
        timeout_s: float = 300.0,
        quiet: bool = False,
        progress: bool = True,
        on_nondeterminism: Literal["error", "warn"] = "error",
        graphs: Literal["auto"] | bool = "auto",
        overlap: bool = False,
        image: Literal["auto"] | int = "auto",
        arithmetic: Literal["native", "portable"] | None = None,
        recheck: int = 0,
        tolerate_wrong: int = 0,
        server: Server | str | None = None,
        page: bool | int = False,
    ) -> None:
        self._env = env = environment.read()
        self.config = RunConfig.resolve(
            env,
            shards=shards,
            seed=seed,
            threads=threads,
            device=device_of(str(device), env.worker, env.num_workers),
            timeout_s=timeout_s,
            quiet=quiet,
            on_nondeterminism=on_nondeterminism,
            graphs=graphs,
            overlap=overlap,
            image=image,
            arithmetic=arithmetic,
            recheck=recheck,
            tolerate_wrong=tolerate_wrong,
        )
        self.grad_norm: float | None = None
        server, port = Server.of(server), check_port(page)
        standing = find_standing(env, server)
        served = standing is not None or server is not None
        check_arithmetic(self.config, env, sys._getframe(1), served=served)
        self._made = made = Assembly(self.config, env, server, standing, page=port, progress=progress)
        self._engine, self._ledger, self._others = made.engine, made.ledger, made.others
        self._operations, self._saving, self._meter = made.operations, made.saving, made.meter
        self.worker, self.group, self.num_groups = made.worker, made.group, made.num_groups

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._operations.tell_others()
            self._made.release()

    def close(self) -> None:
        """Finish: wait for all workers, print the fingerprint (worker 0, unless quiet), release everything."""
        self._made.finish(self._fingerprint)

    # ---- what a user calls ----

    @property
    def shards(self) -> int:
        """K, the number of parts of every batch."""
        return self.config.shards

    @property
    def version(self) -> int:
        """How many steps have been committed."""
        return self._engine.version

    @property
    def local_shards(self) -> range:
        """The shards of this worker now; they may change at any step, when workers come, go or are slow."""
        return self._engine.sharing.mine

    @property
    def num_workers(self) -> int:
        """How many workers compute shards now."""
        return self._ledger.group.num_workers - self._ledger.group.keeper

    @overload
    def prepare(self, model: M, *, sync_batchnorm: bool = True) -> M: ...

    @overload
    def prepare(self, model: M, optimizer: O, *, sync_batchnorm: bool = True, whole: bool = False) -> tuple[M, O]: ...

    def prepare(
        self, model: M, optimizer: O | None = None, *, sync_batchnorm: bool = True, whole: bool = False
    ) -> M | tuple[M, O]:
        """Take a model, and the optimizer that trains it, into the run. All workers must call this alike.

        The model keeps its identity and its parameters theirs; their memory moves into the shared segment, and worker
        0's values become everyone's. May be called several times, for several models or optimizers.

        Args:
            model: The bare module, on any device.
            optimizer: Any optimizer of `torch.optim` over parameters of prepared models.
            sync_batchnorm: Convert `nn.BatchNorm*d` so that statistics span all shards; False leaves them per shard.
            whole: Whether the optimizer looks at all parameters at once, as Lamb's global norm does, so that one worker
                must step all of them. Otherwise every worker steps some.

        Returns:
            The model, or (model, optimizer): the objects that were passed, except that a model that is itself a batch
            norm is replaced by its converted one.

        Raises:
            UnsupportedError: Something in the model or the optimizer cannot be trained exactly.
            MismatchError: Another worker prepares something else.
        """
        with self._operations.alike():
            check_model(model)
            if sync_batchnorm:
                model = convert_sync_batchnorm(model)
            self._engine.intake.prepare(model, optimizer, whole=whole)
        return model if optimizer is None else (model, optimizer)

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        shuffle: bool | None = None,
        sampler: Any = None,
        drop_last: bool = False,
        batch_per_worker: bool = False,
        deal: Deal = "position",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
        prefetch: int = 2,
        train: bool = True,
    ) -> Batches:
        """Global batches, of which this worker loads only the samples of its own shards.

        Every iteration goes on with the next epoch. After `load`, what the checkpoint had seen is skipped, to the
        batch. Their `len` is how many there are.

        Args:
            dataset: Any map-style data set. Randomness in its `__getitem__` is seeded by (seed, epoch, index). Or an
                `evenstep.data.stream`, for data that can only be read in order.
            batch_size: Samples in a global batch. None: the sampler gives whole batches, or the stream whole parts.
            epochs: How often to go through the data.
            shuffle: A new order for every epoch, fixed by (seed, epoch). None: yes, unless there is a sampler.
            sampler: Which samples an epoch has, in which order: a sampler of `torch.utils.data` (such as
                `WeightedRandomSampler`), a list of indices, or a function of the epoch that returns one. It may give
                lists of indices, which are whole global batches, of any sizes. What it draws from torch's, NumPy's or
                Python's generators, or from a `generator` that it has as torch's do, is seeded by (seed, epoch).
            drop_last: Leave out a last batch that is short. It need not be: uneven batches are exact.
            batch_per_worker: The global batch has `batch_size` samples for each worker that the run was started with
                (weak scaling). That number is then part of the arithmetic, and stays what it was when workers come
                and go, and when the run is resumed on another number of them.
            deal: How a batch becomes shards: "position" cuts it into neighbours, "round-robin" deals sample r to shard
                r mod K. Part of the arithmetic.
            collate_fn: Makes a part from a list of samples; torch's `default_collate` if None.
            loaders: Loader processes of each worker; 0 loads inline.
            prefetch: Batches that each loader process holds ready.
            train: False for batches that no step trains on, such as those for `collect`: they do not count as epochs.

        Raises:
            ConfigError: The arguments contradict each other, or the data set is not map-style.
            CheckpointError: What was loaded had global batches of another size, with `batch_per_worker`.
        """
        arrangement = Arrangement(batch_size, shuffle, sampler, drop_last, batch_per_worker, deal, train)
        return self._made.feed.batches(dataset, arrangement, epochs, Loading(collate_fn, loaders, prefetch))

    def metrics(self) -> dict[str, float]:
        """Mean loss and metrics of the steps of this epoch so far, or of the last one, over the samples of all groups.

        The same on every worker of every group. All workers must call this alike, between steps; with several groups
        it waits for all of them.
        """
        return self._made.evaluation.metrics(self._meter)

    def step(
        self,
        batch: Any,
        function: Callable[[Any], Any],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        clip_order: Literal["model", "optimizer"] = "model",
        reduction: Literal["mean", "sum"] = "mean",
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Do one step on a batch. All workers must call this alike; blocks until all have committed it, or none.

        Args:
            batch: One of `batches`, or a whole global batch, the same on every worker, which is cut by position: any
                structure of tensors, arrays and lists of samples (see `data.whole`).
            function: Called once for every part of this worker; returns the mean loss over the part's samples, or
                (loss, {"metric": per-sample values or their mean}).
            optimizer: Which of several prepared optimizers steps; not needed if there is one. Or several that step
                on one backward, in this order, such as [muon, adamw]; then norms are over the parameters of all.
            clip_norm: Scale all gradients down to this global norm, as `torch.nn.utils.clip_grad_norm_` does. Infinity
                only measures: see `grad_norm`.
            clip_value: Clip every element of the gradients to this magnitude.
            clip_order: In which order norms are added up, which decides the last bit: as for
                `clip_grad_norm_(model.parameters(), ...)`, or in the order of the optimizer's groups.
            reduction: "sum" if the function returns the sum over the part's samples instead of the mean; the loss is
                then the sum over all samples, and so are gradients.
            scaler: For float16: the loss is multiplied by its scale before backward, gradients are divided by it, and
                if they are not finite the step changes no parameter, on any worker; `grad_norm` is then infinite. The
                scale is updated as by `scaler.update()`; the script calls none of its methods.

        Returns:
            The mean loss over all samples, the same on every worker, as a tensor with one element; or (loss, metrics)
            if the function returns metrics.

        Raises:
            PeerError: Another worker failed; its error is in the message.
            MismatchError: Workers or shards reached different exchanges.
            UnsupportedError: The step met something that cannot be trained exactly.
        """
        if clip_norm is None and clip_value is None:
            warn_of_torchs(sys._getframe(1))
        with self._operations.step():
            if self._env.resume:
                self._saving.say_if_none()
            trained = self._engine.holdings.together(chosen(self._engine.optimizers, optimizer))
            samples = batch if isinstance(batch, Batch) else self.cut(batch)
            if reduction not in ("mean", "sum"):
                raise ConfigError(f"reduction={reduction!r}, expected 'mean' or 'sum'")
            function = function if reduction == "mean" else Summed(function, len(samples))
            self._made.digests.before_step()
            clipping = Clipping(clip_norm, clip_value, clip_order)
            outcome = self._engine.step(StepTask(samples, function, trained, clipping, Scaling(scaler)))
            self._made.digests.after_step()
            self._saving.heed()
        self.grad_norm = outcome.grad_norm if clip_norm is not None else self.grad_norm
        self._meter.add(sum(samples.sizes), float(outcome.loss), outcome.metrics)
        return (outcome.loss, outcome.metrics) if outcome.metrics else outcome.loss

    def cut(self, batch: Any) -> Batch:
        """A whole global batch, the same on every worker, as `step` cuts it by position: its `sizes` are the parts'."""
        return cut_whole(batch, f"batch {self.version}", self.shards, self.config.device)

    def evaluate(
        self,
        dataset: Any,
        batch_size: int,
        metrics: Callable[[Any], dict[str, Any]],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
        prefetch: int = 2,
    ) -> dict[str, float]:
        """Mean metrics over a data set, every sample counted exactly once; the same on every worker.

        The prepared models are in eval mode meanwhile. All workers must call this alike. Several groups wait for each
        other, evaluate one model, and share out the batches.

        Args:
            dataset: Any map-style data set.
            batch_size: Samples of a global batch; it is cut into K parts as in training.
            metrics: Called with a part; returns {"metric": per-sample values or their mean}.
            collate_fn: As for `batches`.
            loaders: As for `batches`.
            prefetch: As for `batches`.
        """
        return self._made.evaluation.evaluate(dataset, batch_size, metrics, Loading(collate_fn, loaders, prefetch))

    def predict(
        self,
        dataset: Any,
        batch_size: int,
        function: Callable[[Any], Any],
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
        prefetch: int = 2,
    ) -> Any:
        """Outputs for every sample, in data-set order, on the CPU, the same on every worker.

        Args:
            dataset: Any map-style data set.
            batch_size: Samples of a global batch; it is cut into K parts as in training.
            function: Called with a part; returns tensors (in tuples, lists, dicts) with one row for each sample.
            collate_fn: As for `batches`.
            loaders: As for `batches`.
            prefetch: As for `batches`.
        """
        return self._made.evaluation.predict(dataset, batch_size, function, Loading(collate_fn, loaders, prefetch))

    def collect(self, batch: Any, function: Callable[[Any], Any]) -> list[Any]:
        """What a function gives for every part of a batch, in the order of the parts; the same on every worker.

        For evaluations that are neither means nor rows, batch by batch. The prepared models are in eval mode meanwhile,
        and no gradients are kept. All workers must call this alike.

        Args:
            batch: One of `batches(..., train=False)`, or a whole global batch as for `step`.
            function: Called with every part that has samples; returns numbers, texts, tensors and arrays, in lists,
                tuples and dicts.
        """
        batch = batch if isinstance(batch, Batch) else self.cut(batch)
        return collect(self._engine, self._operations.perform, batch, function)

    def once(self, function: Callable[[], Any]) -> Any:
        """Let one worker do something for all, exactly once: write a file, list a directory, read the clock.

        All workers must call this alike, between steps, and wait for it (`timeout_s` at most). A worker that replaces
        another, and a run that is resumed, get the earlier result without doing it again. It is done again only if the
        worker that does it dies in the middle.

        Args:
            function: Returns numbers, texts, tensors and arrays, in lists, tuples and dicts; or nothing.

        Returns:
            What it returned, on every worker.
        """
        return once(self._engine, self._operations.perform, function)

    @property
    def catching_up(self) -> bool:
        """Whether others have already done the next call: parameters are then newer than the script expects."""
        return self._ledger.catching_up

    def count_from(self, step: int) -> None:
        """Go on as a run that has done this many steps: the random numbers of a step are seeded by its number.

        For scripts that bring checkpoints of their own. All workers must call this alike, before the first step.

        Raises:
            ConfigError: A step was already done, or this is not a number of steps.
        """
        if self.version or step < 0:
            raise ConfigError(
                f"count_from({step}) after {self.version} steps; expected a number >= 0, before the first"
            )
        self._engine.holdings.version = step

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these are parameters of prepared models. For frameworks."""
        names = self._engine.holdings.names
        return all(id(tensor) in names for tensor in tensors)

    def edit(self, function: Callable[[], None]) -> None:
        """Change parameters or buffers of prepared models between steps: clip, reset, average, load.

        They are one tensor for all workers, so only worker 0 calls the function, without gradients and with random
        numbers seeded by (seed, step); afterwards everyone has the result. All workers must call this alike.
        """
        with self._operations.alike():
            self._operations.check_untouched()
            self._engine.updates.refuse("edit")
            seed = derive("edit", self.config.seed, self.version)
            edit(self._engine.holdings, self._engine.updates, function, seed)

    def carry(self, initial: Callable[[int], Any]) -> Carry:
        """What a step function hands on to the next step, separately for each part, such as the state of an LSTM.

        All workers must call this alike, before the steps that use it. Inside a step function `carry.get()` gives what
        the last step has set for the same part, and `carry.set(value)` hands something on; between steps,
        `carry.reset()` starts again. It is committed with the step, and saved in checkpoints. The parts of all batches
        must be equally large.

        Args:
            initial: Called with the number of samples of a part; returns what the first step begins with: tensors in
                tuples, lists and dicts.
        """
        self._operations.check_open()
        self._engine.updates.refuse("carry")
        return self._engine.holdings.carries.add(initial)

    def gather(self, tensor: Tensor) -> Tensor:
        """Inside a step function: the rows of all shards, in their order, for losses over the whole batch.

        Blocks until all shards have come; the step function must call it alike for every part. The gradient of what it
        returns goes back to the shards that gave the rows, and is the same to the bit on any number of workers. `rows`
        says which of the rows are this part's, if there is one for each sample.

        Args:
            tensor: ``[samples of the part, ...]``; all but the first dimension, and the type, the same in every part.

        Returns:
            ``[samples of the batch, ...]``.
        """
        return gather(tensor)

    @property
    def rows(self) -> range:
        """Inside a step function: the rows of its part in the batch, as `gather` puts it together.

        Raises:
            ConfigError: This is not inside a step function.
        """
        return rows_of_part()

    def exchange(self, tag: str, rows: Tensor | Callable[[int], Tensor]) -> Tensor:
        """The one primitive: each shard offers a vector under a tag, all receive the tree sum.

        Args:
            tag: What is exchanged; the same on all workers.
            rows: A function that gives the vector [n] of a shard; or [shards of this worker, n], one row for each, in
                order. Only a function can be called again when another worker has died and its shards come here.

        Returns:
            The sum over all shards in tree order, [n], the same bits on every worker.
        """
        self._engine.updates.refuse("exchange")
        return exchange(self._engine, self._operations.perform, tag, rows)

    def print(self, *values: object, sep: str = " ") -> None:
        """As Python's `print`, once for the whole run: by the first worker, and no line twice if it is replaced.

        All workers must call this alike; it does not wait.
        """
        self._made.voice.print(sep.join(map(str, values)))

    def log(self, name: str, value: float | Tensor) -> None:
        """Log a value of your own, for `evenstep run --page`, `--log-json` and `--tensorboard`.

        It comes with the next step, or with the last one if no other follows, as the mean over all calls on all workers
        since the step before. All workers must call this alike, between steps, perhaps with different values; it does
        not wait. Means over samples are metrics: return them from the step function.

        Args:
            name: The name under which it is shown.
            value: A number, or a tensor with one element.

        Raises:
            ConfigError: It is called inside a step function, or with something else.
        """
        self._operations.check_open()
        self._engine.logged.add(*checked(name, value))

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of parameters, buffers and optimizer state.

        Any worker may call this between steps; it does not communicate. With servers it waits for what is on its way,
        and covers the optimizer's state only when the run is over: until then the servers have it.
        """
        if not self._operations.closed:
            self._operations.check_untouched()
        return self._fingerprint()

    def _fingerprint(self) -> str:
        self._others.collect()
        return self._engine.state.fingerprint()

    # ---- checkpoints ----

    def track(self, name: str, value: Any) -> None:
        """Save and load something else with the run, such as a scheduler: anything with a plain `state_dict`."""
        self._saving.track(name, value)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint (worker 0; the others wait). All workers must call this alike, between steps.

        Through a server, it holds the server's parameters, and not the state of its optimizer; workers that send
        updates on their own do not wait. Several groups wait for each other, and the first writes.
        """
        self._saving.save(Path(path), writes=self._made.speaks)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, on any number of workers. All workers must call this alike, after `prepare`.

        Raises:
            CheckpointError: It is missing, torn, altered, or of another model, seed or number of shards; nothing was
                changed.
        """
        self._engine.updates.refuse("load")
        self._saving.load(Path(path))

    def checkpoint(self, directory: str | Path, *, every: int | str, keep: int = 3, resume: bool | None = None) -> None:
        """Write checkpoints from now on, in the background. All workers must call this alike, after `prepare`.

        A checkpoint holds everything: the script goes on from it as if it had never stopped, on any number of workers.
        For that the script is run from its beginning, and gets the results of what was done from the checkpoint.

        Args:
            directory: Where they go, each into a folder of its own.
            every: Steps between two of them, or a time such as "30s", "10min" or "2h".
            keep: How many of the newest to keep.
            resume: Go on from the newest good one, if there is any. None: if `evenstep run --resume` says so.

        Raises:
            CheckpointError: The newest good checkpoint belongs to another run.
        """
        self._engine.updates.refuse("checkpoint")
        self._saving.begin(Path(directory), every, keep, resume=self._env.resume if resume is None else resume)
