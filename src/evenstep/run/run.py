"""The facade: `Run` and its batches, step, evaluate, save and load."""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, TypeVar, overload

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.arithmetic import settings
from evenstep.core import env as environment
from evenstep.core import points
from evenstep.core.config import RunConfig
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError, Dismissed, PeerError, Stopped, UnsupportedError
from evenstep.core.events import send
from evenstep.core.output import unheard
from evenstep.data.batch import Batch
from evenstep.data.loader import num_samples
from evenstep.data.order import Deal, Order
from evenstep.data.sampling import Sampling
from evenstep.data.streams import Streamed
from evenstep.data.whole import Whole
from evenstep.engine.carries import Carry
from evenstep.engine.clipping import Clipping
from evenstep.engine.determinism import device_of, profile
from evenstep.engine.holdings import Holdings
from evenstep.engine.models import check_model
from evenstep.engine.randomness import derive, seed_all
from evenstep.engine.scaling import Scaling
from evenstep.engine.several import Trained
from evenstep.engine.step import Engine, Task
from evenstep.exchange.group import SUMMABLE
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Operation
from evenstep.exchange.surroundings import current
from evenstep.nn.convert import convert_sync_batchnorm
from evenstep.nn.gather import gather
from evenstep.plan.groups import Standing
from evenstep.plan.placement import cut
from evenstep.run import unclosed
from evenstep.run.evaluation import collect_outputs, evaluating, fill, mean_metrics
from evenstep.run.feed import Batches, Feed, Loading
from evenstep.run.join import alone, join
from evenstep.run.kinds import choose
from evenstep.run.meter import Meter
from evenstep.run.progress import Display, Pipe
from evenstep.run.saving import Saving
from evenstep.run.sharing import collect, once
from evenstep.run.summed import Summed
from evenstep.run.through import Through
from evenstep.run.voice import Voice

__all__ = ["Run"]

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741  # the type of the user's optimizer


class Run:
    """A training run whose result does not depend on the number of workers.

    Making it joins the other workers, seeds torch, NumPy and `random`, and pins what the bits rest on. Use it as a
    context manager: leaving it waits for all workers, prints the fingerprint and gives models and optimizers back as
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
            changes what the bits rest on; "warn" only says so.
        graphs: On a GPU, "auto" replays steps from CUDA graphs where they can be captured, with the same bits; True
            makes it an error where they cannot; False never does.
        arithmetic: "native": as this processor is fastest. "portable": the same bits on every processor with AVX2; see
            docs/processors.md. Default: what `evenstep run --arithmetic` says, or "native".
        sync: "exchange": workers add up gradients among themselves. "server": they meet only at a parameter server,
            which holds the parameters and their optimizer.
        server: Its address.
        staleness: What the server was started with. With 0 the result is that of "exchange", to the bit.
        update_every: Batches between two updates, or "epoch". With more than one batch each worker trains by itself in
            between, with the optimizer that it prepares, and sends what that changed; the server needs none then.
        token: For the server.
        aggregate: Whether the workers of this machine add up their gradients and send one update, so that they are one
            worker to the server. None: if `staleness` is 0 and every batch is an update: then it changes no bit.

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
        arithmetic: Literal["native", "portable"] | None = None,
        sync: Literal["exchange", "server"] = "exchange",
        server: str | None = None,
        staleness: int | None = 0,
        update_every: int | Literal["epoch"] = 1,
        token: str | None = None,
        aggregate: bool | None = None,
    ) -> None:
        self._env = environment.read()
        self.config = RunConfig.resolve(
            self._env,
            shards=shards,
            seed=seed,
            threads=threads,
            device=device_of(str(device), self._env.worker),
            timeout_s=timeout_s if self._env.timeout_s is None else self._env.timeout_s,
            quiet=quiet,
            on_nondeterminism=on_nondeterminism,
            graphs=graphs,
            arithmetic=arithmetic,
        )
        through = Through(sync, server, staleness, update_every, token, aggregate)
        through.check()
        standing = Standing.of(self._env.standing) if self._env.standing else None
        if standing is not None and through.server is not None:
            raise ConfigError(
                f"the command line starts servers, but the script says Run(server={server!r}): say one of them"
            )
        _see_to_arithmetic(self.config, standing is not None or through.server is not None, self._env, sys._getframe(1))
        self.group, self.num_groups = (standing.group, standing.groups) if standing is not None else (0, 1)
        self._apart = apart = through.server is not None and not through.together
        self._ledger = (alone if apart else join)(self._env, self.config.timeout_s)
        self._group = self._ledger.group
        self.worker = self._env.worker if apart else self._group.worker
        self._voice = Voice(self._env, self._ledger, speaks=self.group == 0 and not (apart and self.worker > 0))
        self._meetings = 0  # how often all groups have met
        self._meter = Meter(lambda: self._group.rank == 0 and self._ledger.took_part)
        self.grad_norm: float | None = None
        try:
            holdings = Holdings(self.config, self._ledger)
            updates, self._others = choose(holdings, through, standing, self._env)
            self._engine = Engine(holdings, updates)
        except BaseException:
            self._close_group()
            raise
        self._saving = Saving(self._engine, self._others, self._perform, self._env.job)
        self._feed = Feed(
            self.config, self._env, self._ledger, self._engine, self._saving, self._meter, self._perform
        )  # fmt: skip
        self._closed = False
        if self._env.events_fd is not None:
            send(self._env.events_fd, {"made": True})
        self._group.tell({"shards": self.config.shards, "timeout_s": self.config.timeout_s})
        try:
            points.reach("join")
            self._ledger.perform(Operation("join", 0), self._meet, self._agree)
        except BaseException:
            self._tell_others()
            self._release()
            raise
        if progress and not self.config.quiet and not (apart and self.worker > 0):
            self._meter.display = Display() if self._env.events_fd is None else Pipe(self._env.events_fd)
        if not self.config.quiet and self.worker == 0:
            unclosed.opened(self, self._voice.say)
        seed_all(seed)

    def _meet(self) -> Entry:
        mine = profile(self.config)
        of_all = self._group.gather_json("join", mine)
        for worker, theirs in zip(self._group.members, of_all, strict=True):
            _compare_profiles(worker, theirs, of_all[0])
        return Entry("join", of_all[0])

    def _agree(self, entry: Entry, took_part: bool) -> None:
        if not took_part:
            _compare_profiles(self.worker, profile(self.config), entry.value)

    # ---- entering and leaving ----

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._tell_others()
            self._release()

    def close(self) -> None:
        """Finish: wait for all workers, print the fingerprint (worker 0, unless quiet), let go of everything."""
        if self._closed:
            return

        def attempt() -> Entry:
            self._group.barrier("end of the run")
            return Entry("end of the run", self.fingerprint() if self._group.rank == 0 else None)

        def adopt(entry: Entry, took_part: bool) -> None:
            if not took_part:  # whoever came here through the journal alone takes over what came of it
                self._engine.holdings.pull()
            self._meter.close()
            fingerprint = entry.value or self.fingerprint()
            if self._env.trace is not None and self._group.rank == 0:
                self._note({"fingerprint": fingerprint})
            if self.config.quiet:
                return
            if self._env.events_fd is not None:
                send(self._env.events_fd, {"fingerprint": fingerprint, "operation": self._ledger.done})
            elif self._group.rank == 0:
                with unheard(sys.stdout):
                    print(f"fingerprint {fingerprint}", flush=True)

        try:
            self._conclude()
            self._perform("end of the run", attempt, adopt)
            self._saving.close()
            self._group.tell({"closed": True})
        finally:
            self._release()

    def _conclude(self) -> None:
        try:
            self._engine.updates.finish()
            self._saving.conclude()
        except BaseException:
            self._tell_others()
            raise

    def _perform(self, kind: str, attempt: Callable[[], Entry], adopt: Callable[[Entry, bool], T]) -> T:
        """Do an operation on all workers; what spoils it here reaches them all."""
        self._check_open()
        try:
            return self._ledger.perform(Operation(kind, self.version), attempt, adopt)
        except BaseException:
            self._tell_others()
            raise

    def _check_open(self) -> None:
        """See that this run goes on, in this process.

        Raises:
            ConfigError: It is over, or this is a copy of the process that runs it.
        """
        self._group.check_process()
        if self._closed:
            raise ConfigError(
                "this run is closed, and its models and optimizers are ordinary ones again; do what needs it inside of "
                "`with evenstep.Run(...) as run`, or make another run"
            )

    def _tell_others(self) -> None:
        """Say why this worker stops, unless it stops because of another or was told to."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, PeerError | Stopped | Dismissed):
            where = f"worker {self.worker} failed at step {self.version}:\n"
            self._group.fail(where + "".join(traceback.format_exception(error)))

    def _release(self) -> None:
        if self._closed:
            return
        self._closed = True
        unclosed.closed(self)
        self._meter.close()
        self._saving.close()
        self._engine.close()
        self._close_group()

    def _close_group(self) -> None:
        """Let go of the segment, unless another run of this process may go on in it."""
        alone_here = self._env.num_workers == 1 and self._env.segment_fd is None
        if alone_here or self._apart:
            self._group.close()

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
        """How many workers there are now."""
        return self._group.num_workers

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
            whole: The optimizer looks at all parameters at once, as Lamb's global norm does, so one worker steps all of
                them. Otherwise every worker steps some.

        Returns:
            The model, or (model, optimizer): the objects that were passed, except that a model that is itself a batch
            norm is replaced by its converted one.

        Raises:
            UnsupportedError: Something in the model or the optimizer cannot be trained exactly.
            MismatchError: Another worker prepares something else.
        """
        self._check_open()
        try:
            check_model(model)
            if sync_batchnorm:
                model = convert_sync_batchnorm(model)
            self._engine.intake.prepare(model, optimizer, whole=whole)
        except BaseException:
            self._tell_others()
            raise
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

        Going through them goes on with the next epoch, every time. After `load`, what the checkpoint had seen is left
        out, to the batch. `len` of them says how many there are.

        Args:
            dataset: Any map-style data set. Randomness in its `__getitem__` is seeded by (seed, epoch, index). Or an
                `evenstep.data.stream`, for data that can only be read in order.
            batch_size: Samples of a global batch. None: the sampler gives whole batches, or the stream whole parts.
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
            train: False for batches that no step trains on, such as those for `collect`: they are no epochs of the run.

        Raises:
            ConfigError: The arguments contradict each other, or the data set is no map-style one.
            CheckpointError: What was loaded had global batches of another size, with `batch_per_worker`.
        """
        loading = Loading(collate_fn, loaders, prefetch)
        if isinstance(dataset, Streamed):
            others = sampler is not None or drop_last or batch_per_worker or deal != "position" or not train
            if shuffle is not None or others:
                raise ConfigError(
                    "a stream has an order of its own, and a last batch of any size: shuffle, sampler, drop_last, "
                    "batch_per_worker, deal and train=False are for data with an index"
                )
            return self._feed.streams(dataset, batch_size, epochs, loading)
        size, seed = num_samples(dataset), self.config.seed
        shuffled = sampler is None if shuffle is None else shuffle
        order = Order(
            size, batch_size, self.shards, seed, shuffled, drop_last, deal, self.group, self.num_groups,
            None if sampler is None else Sampling(sampler, size, seed),
        )  # fmt: skip
        if not train:
            if batch_per_worker:
                raise ConfigError("batch_per_worker=True with train=False; expected one of them: give the global batch")
            return self._feed.untrained(dataset, order, loading)
        num_workers = self._feed.num_workers_at_start() if batch_per_worker else None
        if num_workers is not None:
            order = order.times(num_workers)
        return self._feed.batches(dataset, order, epochs, loading, num_workers)

    def metrics(self) -> dict[str, float]:
        """Mean loss and metrics of the steps of this epoch so far, or of the last one, over the samples of all groups.

        The same on every worker of every group. All workers must call this alike, between steps; with several groups
        it waits for all of them.
        """
        tag = f"metrics {self._meetings}"

        def attempt() -> Entry:
            merged = self._others.merge(tag, self._meter.means(), self._meter.num_samples)
            self._group.barrier("metrics")
            return Entry("metrics", merged)

        found: dict[str, float] = self._perform("metrics", attempt, lambda entry, _: entry.value)
        self._meetings += 1
        return found

    def step(
        self,
        batch: Any,
        function: Callable[[Any], Any],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Do one step on a batch. All workers must call this alike; blocks until all have committed it, or none.

        Args:
            batch: One of `batches`, or a whole global batch, the same on every worker, which is cut by position: any
                structure of tensors, arrays and lists of samples (see `data.whole`).
            function: Called once for every part of this worker; returns the mean loss over the part's samples, or
                (loss, {"metric": per-sample values or their mean}).
            optimizer: Which of several prepared optimizers steps; with one it need not be said. Or several that step
                on one backward, in this order, such as [muon, adamw]; then norms are over the parameters of all.
            clip_norm: Scale all gradients down to this global norm, as `torch.nn.utils.clip_grad_norm_` does.
            clip_value: Clip every element of the gradients to this magnitude.
            reduction: "sum" if the function returns the sum over the part's samples instead of the mean; the loss is
                then the sum over all samples, and so are gradients.
            scaler: For float16: the loss that backward begins from is multiplied by its scale, gradients are divided by
                it, and where they are not finite the step changes no parameter, on any worker. Its scale moves as by
                `scaler.update()`; the script calls none of its methods. After such a step `grad_norm` is infinite.

        Returns:
            The mean loss over all samples, the same on every worker, as a tensor with one element; or (loss, metrics)
            if the function returns metrics.

        Raises:
            PeerError: Another worker failed; its error is in the message.
            MismatchError: Workers or shards reached different exchanges.
            UnsupportedError: The step met something that cannot be trained exactly.
        """
        self._check_open()
        try:
            if self._env.resume:
                self._saving.say_if_none()
            trained = self._trained(optimizer)
            samples = batch if isinstance(batch, Batch) else self.cut(batch)
            if reduction not in ("mean", "sum"):
                raise ConfigError(f"reduction={reduction!r}, expected 'mean' or 'sum'")
            function = function if reduction == "mean" else Summed(function, len(samples))
            self._trace(first=True)
            clipping = Clipping(clip_norm, clip_value)
            outcome = self._engine.step(Task(samples, function, trained, clipping, Scaling(scaler)))
            self._trace(first=False)
            self._saving.heed()
        except BaseException:
            self._tell_others()
            raise
        self.grad_norm = outcome.grad_norm if clip_norm is not None else self.grad_norm
        self._meter.add(sum(samples.sizes), float(outcome.loss), outcome.metrics)
        return (outcome.loss, outcome.metrics) if outcome.metrics else outcome.loss

    def _trained(self, optimizer: Optimizer | Sequence[Optimizer] | None) -> Trained:
        prepared = self._engine.optimizers
        if not prepared:
            raise ConfigError("no optimizer was prepared; call model, optimizer = run.prepare(model, optimizer) first")
        if optimizer is None and len(prepared) > 1:
            raise ConfigError(
                f"{len(prepared)} optimizers were prepared; say which one steps: run.step(..., optimizer=...)"
            )
        wanted = [each.optimizer for each in prepared] if optimizer is None else optimizer
        found = []
        for each in wanted if isinstance(wanted, Sequence) else [wanted]:
            known = [one for one in prepared if one.optimizer is each]
            if not known or known[0] in found:
                raise ConfigError(
                    "an optimizer is there twice; pass each once"
                    if known
                    else "this optimizer was not prepared; pass the one that run.prepare returned"
                )
            found.append(known[0])
        if not found:
            raise ConfigError("run.step got no optimizer in its list; pass at least one, or leave it out")
        return self._engine.holdings.together(found)

    def cut(self, batch: Any) -> Batch:
        """A whole global batch, the same on every worker, as `step` cuts it by position: its `sizes` are the parts'."""
        whole = Whole(batch)
        spans = cut(whole.num_rows, self.shards)
        sizes = [end - first for first, end in spans]
        name = f"batch {self.version}"
        return Batch(name, sizes, lambda k: whole.part(*spans[k]), {}, self.config.device, whole=batch)

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
        order = self._in_order(dataset, batch_size, self.group, self.num_groups)
        loading = Loading(collate_fn, loaders, prefetch)
        tag = f"evaluate {self._meetings}"

        def attempt() -> Entry:
            self._others.level(tag)
            with evaluating(self._engine.models.slots.modules):
                batches = self._feed.once(dataset, order, loading)
                means = mean_metrics(self._engine, batches, metrics)
            return Entry("evaluate", self._others.merge(tag, means, order.num_dealt))

        found: dict[str, float] = self._perform("evaluate", attempt, lambda entry, _: entry.value)
        self._meetings += 1
        return found

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
        order, loading = self._in_order(dataset, batch_size), Loading(collate_fn, loaders, prefetch)
        tag = f"predict {self._meetings}"

        def attempt() -> Entry:
            self._others.level(tag)
            with evaluating(self._engine.models.slots.modules):
                batches = self._feed.once(dataset, order, loading)
                shape, tensors = collect_outputs(self._engine, batches, function)
                return Entry("predict", shape, safetensors.torch.save(tensors))

        self._meetings += 1
        return self._perform("predict", attempt, lambda entry, _: fill(entry.value, safetensors.torch.load(entry.blob)))

    def _in_order(self, dataset: Any, batch_size: int, group: int = 0, groups: int = 1) -> Order:
        size, seed = num_samples(dataset), self.config.seed
        return Order(size, batch_size, self.shards, seed, shuffle=False, drop_last=False, group=group, groups=groups)

    def collect(self, batch: Any, function: Callable[[Any], Any]) -> list[Any]:
        """What a function gives for every part of a batch, in the order of the parts; the same on every worker.

        For evaluations that are no means and no rows, batch by batch. The prepared models are in eval mode meanwhile,
        and no gradients are kept. All workers must call this alike.

        Args:
            batch: One of `batches(..., train=False)`, or a whole global batch as for `step`.
            function: Called with every part that has samples; returns numbers, texts, tensors and arrays, in lists,
                tuples and dicts.
        """
        return collect(self._engine, self._perform, batch if isinstance(batch, Batch) else self.cut(batch), function)

    def once(self, function: Callable[[], Any]) -> Any:
        """Let one worker do something for all, exactly once: write a file, look at a directory, ask the clock.

        All workers must call this alike, between steps, and wait for it (`timeout_s` at most). A worker that replaces
        another, and a run that is resumed, get what it gave then without doing it again. It begins again only if the
        worker that does it dies in the middle of it.

        Args:
            function: Returns numbers, texts, tensors and arrays, in lists, tuples and dicts; or nothing.

        Returns:
            What it returned, on every worker.
        """
        return once(self._engine, self._perform, function)

    @property
    def catching_up(self) -> bool:
        """Whether the next call is one that others have done already: parameters are then newer than the script's."""
        return self._ledger.catching_up

    def count_from(self, step: int) -> None:
        """Go on as a run that has done so many steps: random numbers of a step are seeded by its number.

        For scripts that bring checkpoints of their own. All workers must call this alike, before the first step.

        Raises:
            ConfigError: A step was done, or this is no number of steps.
        """
        if self.version or step < 0:
            raise ConfigError(
                f"count_from({step}) after {self.version} steps; expected a number >= 0, before the first"
            )
        self._engine.holdings.version = step

    def edit(self, function: Callable[[], None]) -> None:
        """Change parameters or buffers of prepared models between steps: clip, reset, average, load.

        They are one tensor for all workers, so only worker 0 calls the function, without gradients and with random
        numbers seeded by (seed, step); afterwards everyone has the result. All workers must call this alike.
        """
        self._check_open()
        self._engine.updates.refuse("edit")
        try:
            self._engine.edit(function, derive("edit", self.config.seed, self.version))
        except BaseException:
            self._tell_others()
            raise

    def carry(self, initial: Callable[[int], Any]) -> Carry:
        """What a step function hands on to the next step, for each part by itself, such as the state of an LSTM.

        All workers must call this alike, before the steps that use it. Inside of a step function `carry.get()` gives
        what the last step has set for the same part, and `carry.set(value)` hands something on; between steps,
        `carry.reset()` begins anew. It is committed with the step, and saved in checkpoints. The parts of all batches
        must be equally large.

        Args:
            initial: Called with the number of samples of a part; returns what the first step begins with: tensors in
                tuples, lists and dicts.
        """
        self._check_open()
        self._engine.updates.refuse("carry")
        return self._engine.holdings.carries.add(initial)

    def gather(self, tensor: Tensor) -> Tensor:
        """Inside of a step function: the rows of all shards, in their order, for losses over the whole batch.

        Blocks until all shards have come; the step function must call it alike for every part. The gradient of what it
        returns goes back to the shards that gave the rows, and is the same to the bit on every number of workers. Which
        of the rows are this part's says `rows`, if there is one for each sample.

        Args:
            tensor: ``[samples of the part, ...]``; all but the first dimension, and the type, alike in every part.

        Returns:
            ``[samples of the batch, ...]``.
        """
        return gather(tensor)

    @property
    def rows(self) -> range:
        """Inside of a step function: which rows of the batch, as `gather` puts it together, its part has.

        Raises:
            ConfigError: It is asked for elsewhere.
        """
        found: range | None = getattr(current(), "rows", None)
        if found is None:
            raise ConfigError("run.rows was asked for outside of a step function; expected inside: it is of its part")
        return found

    def exchange(self, tag: str, rows: Tensor | Callable[[int], Tensor]) -> Tensor:
        """The one primitive: each shard offers a vector under a tag, all receive the tree sum.

        Args:
            tag: What is exchanged; alike on all workers.
            rows: A function that gives the vector [n] of a shard; or [shards of this worker, n], one row for each, in
                order. Only the function can be asked again when another worker has died and its shards come here.

        Returns:
            The sum over all shards in tree order, [n], the same bits on every worker.
        """
        self._engine.updates.refuse("exchange")
        generation, kind = self._group.generation, f"exchange {tag}"
        total = torch.empty(0)

        def attempt() -> Entry:
            nonlocal total
            if callable(rows):
                mine = torch.stack([rows(shard) for shard in self._engine.sharing.mine])
            elif self._group.generation == generation:
                mine = rows
            else:
                raise UnsupportedError(
                    f"the workers changed before exchange('{tag}') was over, and the rows of the shards that moved are "
                    "not here; pass a function of the shard instead of a tensor"
                )
            self._check_rows(mine)
            shares = [end - first for first, end in self._engine.sharing.spans]
            total = self._group.sum(tag, mine.cpu(), shares, everyone=True).to(mine.device)
            described = [str(total.dtype).removeprefix("torch."), str(total.device)]
            return Entry(kind, described, total.cpu().view(torch.uint8).numpy().tobytes())

        def adopt(entry: Entry, took_part: bool) -> Tensor:
            if took_part:
                return total
            dtype, device = entry.value
            return torch.frombuffer(bytearray(entry.blob), dtype=getattr(torch, dtype)).to(device)

        return self._perform(kind, attempt, adopt)

    def _check_rows(self, rows: Tensor) -> None:
        num_shards = len(self._engine.sharing.mine)
        if rows.ndim != 2 or len(rows) != num_shards:
            raise ConfigError(
                f"exchange got {tuple(rows.shape)}, expected ({num_shards}, n): one row for each shard "
                f"of worker {self.worker}"
            )
        if rows.dtype not in SUMMABLE or not rows.numel():
            raise ConfigError(f"exchange got {rows.dtype} {tuple(rows.shape)}; expected at least one of {SUMMABLE}")

    def print(self, *values: object, sep: str = " ") -> None:
        """As Python's `print`, once for the whole run: the first worker's, and no line twice if it is replaced.

        All workers must call this alike; it waits for nobody.
        """
        self._voice.print(sep.join(map(str, values)))

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of parameters, buffers and optimizer state.

        Any worker may call this between steps; it talks to nobody. With servers it waits for what is on its way, and
        covers the optimizer's state only when the run is over: until then it is the servers'.
        """
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
        writes = self.group == 0 and not (self._apart and self.worker > 0)
        self._saving.save(Path(path), f"save {self._meetings}", writes=writes)
        self._meetings += 1

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint, on any number of workers. All workers must call this alike, after `prepare`.

        Raises:
            CheckpointError: It is missing, torn, altered, or of another model, seed or number of shards; nothing
                changed.
        """
        self._engine.updates.refuse("load")
        self._saving.load(Path(path))

    def checkpoint(self, directory: str | Path, *, every: int | str, keep: int = 3, resume: bool | None = None) -> None:
        """Write checkpoints from now on, in the background. All workers must call this alike, after `prepare`.

        A checkpoint holds everything: the script goes on from it as if it had never stopped, on any number of workers.
        For that it is run from its beginning, and gets the results of what was done before from the checkpoint.

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

    # ---- for `evenstep verify` ----

    def _trace(self, *, first: bool) -> None:
        if self._env.trace is None or self._group.rank != 0 or (first and self.version) or not self._ledger.took_part:
            return
        self._note({"step": self.version, "digests": self._engine.state.digests()})

    def _note(self, record: dict[str, Any]) -> None:
        assert self._env.trace is not None, "somebody wants to know"
        with self._env.trace.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _compare_profiles(worker: int, mine: dict[str, Any], first: dict[str, Any]) -> None:
    for key, value in mine.items():
        if value != first[key]:
            raise ConfigError(
                f"worker {worker} has {key}={value!r} but worker 0 has {first[key]!r}; "
                "all workers must run the same script on the same kind of machine"
            )


def _see_to_arithmetic(config: RunConfig, served: bool, env: Environment, caller: FrameType) -> None:
    if config.arithmetic == "native":
        return
    if served:
        raise ConfigError(
            "arithmetic='portable' with a parameter server, whose optimizer computes as its own processor is fastest; "
            "use sync='exchange', or arithmetic='native'"
        )
    settings.insist(caller, env)
