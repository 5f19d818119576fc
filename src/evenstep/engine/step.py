"""The step as a transaction: it reads version v of the state and commits version v + 1, or leaves v untouched.

How one step goes, on every worker alike:

1. compute: the shards of this worker run forward and backward; gradients flow to their owners meanwhile.
2. result round: everyone's backward is over (so nobody reads version v any more), losses and metrics are shared.
3. update: each owner saves version v of what it owns, then lets the optimizer change it.
4. commit round: everyone has updated; version v + 1 is what there is now.

An error anywhere before the end of 4 rolls back to v.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.config import RunConfig
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.engine.determinism import Determinism
from evenstep.engine.lanes import Lanes
from evenstep.engine.models import Models
from evenstep.engine.pair import Pair
from evenstep.engine.randomness import Stream, derive, preserved
from evenstep.engine.slots import Lane, spanning_layers
from evenstep.exchange.group import Group
from evenstep.exchange.surroundings import inside
from evenstep.native import core
from evenstep.plan import tree
from evenstep.plan.placement import cut

__all__ = ["Engine", "Outcome", "ShardResult"]

StepFunction = Callable[[Any], Any]


@dataclass(frozen=True)
class ShardResult:
    """What one shard's step function gave: loss and metrics, each summed over the shard's samples."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Outcome:
    """What a committed step tells the user: means over all samples of the batch."""

    loss: Tensor
    metrics: dict[str, float]
    grad_norm: float | None


class Engine:
    """Computes steps for one worker, in lock-step with the others."""

    def __init__(self, config: RunConfig, group: Group) -> None:
        self.config, self.group = config, group
        self.spans = cut(config.shards, group.num_workers)
        self.shares = [end - first for first, end in self.spans]
        self.models = Models(config, group)
        self.state = self.models.state
        self.pairs: list[Pair] = []
        self.version = 0
        self.determinism = Determinism(config)
        core.keep_memory()  # activations come and go in every step: returning their pages costs a fifth of its time
        self._attempt = 0
        self._stream = Stream()
        self._lanes = Lanes(config.timeout_s)
        self._lane_of: list[Lane] = []  # [0] is the model itself, the others have leaves of their own
        self._hooks: list[Any] = []

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take a model, and the optimizer that trains it, into the run. All workers must call this alike."""
        self.models.add(model)
        self._forget_lanes()
        self.models.remember_versions()
        if optimizer is not None:
            prefix = "optimizer" if not self.pairs else f"optimizer{len(self.pairs) + 1}"
            names = {id(p): name for name, p in self.models.slots.parameters.items()}
            self.pairs.append(Pair(self.group, self.state, self.spans, optimizer, names, prefix))

    def step(
        self,
        parts: dict[int, Any],
        sizes: Sequence[int],
        function: StepFunction,
        pair: Pair,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> Outcome:
        """Do one step. All workers must call this alike; blocks until all have committed.

        Args:
            parts: The samples of this worker's shards, for those that have any.
            sizes: The number of samples of every shard.
            function: Called with a part; returns its mean loss, or (loss, {metric: value}).
            pair: Whose parameters are trained.
            clip_norm: Scale all gradients down to this norm, as `torch.nn.utils.clip_grad_norm_` does.
            clip_value: Clip every element of the gradients to this magnitude.
        """
        self.determinism.check()
        self.models.check_versions()
        self._attempt += 1
        where = f"step {self.version}: "
        active = [w for w, (first, end) in enumerate(self.spans) if any(sizes[first:end])]
        pair.gradients.begin(self._attempt, active, list(parts))
        try:
            with preserved():
                results = self._compute(where, parts, sizes, function, pair) if parts else {}
            pair.gradients.end_backward()
            outcome = self._share_results(where, results, sizes)
            sums = pair.gradients.finish()
            norm = self._clip(where, sums, pair, clip_norm, clip_value)
            news = pair.update(sums)
            if self.group.worker == 0:
                self.models.publish_buffers()
            news_of_all = self.group.gather_json(where + "commit", news)
        except BaseException:
            self.state.rollback()
            pair.rollback()
            self.models.remember_versions()
            raise
        finally:
            pair.gradients.clear()
            self.models.slots.bind_base()
        self.state.commit()
        pair.commit()
        self.models.pull()
        pair.adopt(news_of_all)
        self.models.remember_versions()
        self.version += 1
        return Outcome(outcome.loss, outcome.metrics, norm)

    # ---- compute ----

    def _compute(
        self, where: str, parts: dict[int, Any], sizes: Sequence[int], function: StepFunction, pair: Pair
    ) -> dict[int, ShardResult]:
        layers = spanning_layers(self.models.slots.modules)
        weights = {k: sizes[k] / sum(sizes) for k in parts}
        buffers = {name: self.state.entries[name].live for name in self.models.slots.buffers}
        if layers:
            values = self._side_by_side(where, parts, sizes, function, pair, weights, buffers)
        else:
            values = self._one_after_the_other(parts, function, pair, weights, buffers)
        return {k: _measure(value, sizes[k]) for k, value in values.items()}

    def _one_after_the_other(
        self,
        parts: dict[int, Any],
        function: StepFunction,
        pair: Pair,
        weights: dict[int, float],
        buffers: dict[str, Tensor],
    ) -> dict[int, Any]:
        """No layer spans shards: one shard's activations are alive at a time."""
        lane = self._lane(0)
        values = {}
        for shard, part in parts.items():
            lane.begin(buffers)
            lane.resume()
            self._stream.reseed(self._seed(shard))
            self._stream.resume()
            try:
                with inside(_Alone()):
                    values[shard] = _split(function(part))
                    self._backward([values[shard][0] * weights[shard]], [lane], pair, [shard])
            except Exception as error:
                error.add_note(f"in shard {shard} of worker {self.group.worker}, step {self.version}")
                raise
            lane.pause()
            if shard == 0:
                self.models.keep_buffers(lane.buffers_after())
            values[shard] = (values[shard][0].detach(), values[shard][1])
        return values

    def _side_by_side(
        self,
        where: str,
        parts: dict[int, Any],
        sizes: Sequence[int],
        function: StepFunction,
        pair: Pair,
        weights: dict[int, float],
        buffers: dict[str, Tensor],
    ) -> dict[int, Any]:
        """Some layer spans shards: all shards of this worker go forward in turns, then backward at once."""
        shards = list(parts)
        lanes = [self._lane(1 + n) for n in range(len(shards))]
        for lane in lanes:
            lane.begin(buffers)
        shares = [sum(1 for size in sizes[first:end] if size) for first, end in self.spans]
        present = [k for k, size in enumerate(sizes) if size]

        def gather(tag: str, rows: Tensor) -> Tensor:
            found = self.group.gather(tag, rows.cpu(), shares)
            if len(present) == len(sizes):
                return found.to(rows.device)
            every = found.new_zeros((len(sizes), found.shape[1]))
            every[present] = found
            return every.to(rows.device)

        functions = [lambda part=part: _split(function(part)) for part in parts.values()]
        seeds = [self._seed(shard) for shard in shards]
        try:
            values = self._lanes.run(shards, lanes, seeds, where, gather, functions)
            losses = [value[0] * weights[shard] for shard, value in zip(shards, values, strict=True)]
            token, self._lanes.token = self._lanes.token, None
            if (
                token is not None
            ):  # where no shard of this worker uses a layer's output, other workers still wait for it
                losses.append(token.sum())
            self._backward(losses, lanes, pair, shards)
        except Exception as error:
            error.add_note(f"in worker {self.group.worker}, step {self.version}")
            raise
        if shards[0] == 0:
            self.models.keep_buffers(lanes[0].buffers_after())
        return {shard: (v[0].detach(), v[1]) for shard, v in zip(shards, values, strict=True)}

    def _backward(self, losses: list[Tensor], lanes: Sequence[Lane], pair: Pair, shards: Sequence[int]) -> None:
        """One backward for some shards; hooks on the lanes' leaves carry the gradients away as they come."""
        leaves = [leaf for lane in lanes for name in pair.names if (leaf := lane.leaves[name]).requires_grad]
        own = [p for p in pair.parameters if p.requires_grad and lanes[0].leaves is not self.models.slots.parameters]
        if not leaves:
            return
        index = {name: i for i, name in enumerate(pair.names)}
        self._arrivals = {id(lane): (pair, index, shard) for lane, shard in zip(lanes, shards, strict=True)}
        try:
            torch.autograd.backward(losses, inputs=leaves + own)
        finally:
            self._arrivals = {}
        for name, p in zip(pair.names, pair.parameters, strict=True):
            if own and p.grad is not None:
                p.grad = None
                raise UnsupportedError(
                    f"the step function used parameter '{name}' through a reference kept outside of the model; "
                    "in a model with synchronized batch norm take it from the module, as in model.layer.weight"
                )

    def _lane(self, number: int) -> Lane:
        while len(self._lane_of) <= number:
            lane = Lane(self.models.slots, own=bool(self._lane_of))
            for name, leaf in lane.leaves.items():
                if leaf.requires_grad or leaf.is_floating_point():
                    self._hook(lane, name, leaf)
            self._lane_of.append(lane)
        return self._lane_of[number]

    def _forget_lanes(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._lane_of = [], []

    def _hook(self, lane: Lane, name: str, leaf: nn.Parameter) -> None:
        def arrived(_: Tensor) -> None:
            found = self._arrivals.get(id(lane))
            if found is not None and leaf.grad is not None:
                pair, index, shard = found
                gradient, leaf.grad = leaf.grad, None
                pair.gradients.arrive(index[name], shard, gradient)

        requires_grad = leaf.requires_grad
        leaf.requires_grad_(True)  # a hook can be hung on nothing else; it may be unfrozen later
        self._hooks.append(leaf.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]  # torch's
        leaf.requires_grad_(requires_grad)

    _arrivals: dict[int, tuple[Pair, dict[str, int], int]] = {}  # noqa: RUF012  # replaced as a whole, never changed

    def _seed(self, shard: int) -> int:
        return derive("step", self.config.seed, self.version, shard)

    # ---- share, clip ----

    def _share_results(self, where: str, results: dict[int, ShardResult], sizes: Sequence[int]) -> Outcome:
        mine = {k: [r.loss, r.metrics] for k, r in results.items()}
        by_shard: dict[int, Any] = {}
        for theirs in self.group.gather_json(where + "result", mine):
            by_shard.update({int(k): value for k, value in theirs.items()})
        names = {k: sorted(metrics) for k, (_, metrics) in by_shard.items()}
        first = min(by_shard)
        for k, found in names.items():
            if found != names[first]:
                raise ConfigError(
                    f"the step function gave metrics {found} in shard {k} but {names[first]} in shard {first}; "
                    "it must give the same ones for every part"
                )
        total = sum(sizes)

        def mean(pick: Callable[[Any], float]) -> float:
            values = [pick(by_shard[k]) if k in by_shard else 0.0 for k in range(len(sizes))]
            return tree.reduce(values, lambda a, b: a + b) / total

        loss = torch.tensor(mean(lambda v: v[0]), dtype=torch.float64)
        return Outcome(loss, {name: mean(lambda v, name=name: v[1][name]) for name in names[first]}, None)  # type: ignore[misc]  # the default binds the name

    def _clip(
        self,
        where: str,
        sums: dict[int, Tensor | None],
        pair: Pair,
        clip_norm: float | None,
        clip_value: float | None,
    ) -> float | None:
        gradients = {i: g for i, g in sums.items() if g is not None}
        if clip_value is not None:
            for gradient in gradients.values():
                gradient.clamp_(-clip_value, clip_value)
        if clip_norm is None:
            return None
        mine = {i: float(torch.linalg.vector_norm(g)) for i, g in gradients.items()}
        norms: dict[int, float] = {}
        for theirs in self.group.gather_json(where + "gradient norms", mine):
            norms.update({int(i): norm for i, norm in theirs.items()})
        dtype = pair.parameters[0].dtype
        total = torch.linalg.vector_norm(torch.tensor([norms[i] for i in sorted(norms)], dtype=dtype))
        scale = torch.clamp(clip_norm / (total + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(scale.to(gradient.device))
        return float(total)

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], version: int) -> None:
        """Put a checkpoint's state in place of the current one. All workers must call this alike, between steps."""
        with torch.no_grad():
            if self.group.worker == 0:
                for name, entry in self.state.entries.items():
                    if name in tensors:
                        entry.live.copy_(tensors[name])
            for pair in self.pairs:
                pair.restore(tensors, values)
        self.group.barrier("checkpoint restored")
        for entry in self.state.entries.values():
            entry.pull()
        self.models.remember_versions()
        self.version = version

    def close(self) -> None:
        """Give the models back to the user as ordinary ones, and the process its settings."""
        self._lanes.close()
        self._forget_lanes()
        self.models.release(self.pairs)
        self.determinism.restore()


class _Alone:
    """The surroundings of a step in which no layer was expected to span shards."""

    token: Tensor | None = None

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            "a layer that spans shards was met in a step that began without one in training mode; "
            "call model.train() before run.step, not inside the step function"
        )

    meet = gather = call_number = _refuse


def _split(value: Any) -> tuple[Tensor, dict[str, Any]]:
    loss, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, dict):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise ConfigError(
            f"the step function returned a {type(value).__name__}{shape}; expected the mean loss of its part "
            "as a tensor with one element, or (loss, {'metric': value})"
        )
    return loss.reshape(()), metrics


def _measure(value: tuple[Tensor, dict[str, Any]], size: int) -> ShardResult:
    loss, metrics = value
    return ShardResult(float(loss) * size, {name: total_of(name, metric, size) for name, metric in metrics.items()})


def total_of(name: str, metric: Any, size: int) -> float:
    """A metric of a part, given per sample or as a mean, summed over the part's samples."""
    if not isinstance(metric, Tensor):
        return float(metric) * size
    metric = metric.detach()
    if metric.ndim == 0:
        return float(metric.double()) * size
    if metric.shape[0] != size:
        raise ConfigError(
            f"metric '{name}' has {metric.shape[0]} values for a part of {size} samples; "
            "expected one value for each sample, or their mean"
        )
    return float(metric.reshape(size, -1).double().mean(1).sum())
