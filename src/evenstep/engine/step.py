"""The step as a transaction: it reads version v of the state and commits version v + 1, or leaves v untouched.

How one step goes, on every worker alike:

1. compute (`compute.py`): this worker's shards run forward and backward; gradients flow to their owners meanwhile.
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
from evenstep.core.errors import ConfigError, MismatchError
from evenstep.engine.compute import Compute, ShardResult, StepFunction, Work
from evenstep.engine.determinism import Determinism
from evenstep.engine.models import Models
from evenstep.engine.pair import Pair
from evenstep.exchange.group import Group
from evenstep.native import core
from evenstep.plan import tree
from evenstep.plan.placement import cut

__all__ = ["Engine", "Outcome"]


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
        core.keep_memory()  # activations come and go in every step: giving their pages back and forth costs time
        self.compute = Compute(group, self.models, self.spans, config.seed, config.timeout_s)
        self._attempt = 0

    def prepare(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take a model, and the optimizer that trains it, into the run. All workers must call this alike."""
        self.models.add(model)
        self.compute.forget_lanes()
        self.models.remember_versions()
        if optimizer is not None:
            prefix = "optimizer" if not self.pairs else f"optimizer{len(self.pairs) + 1}"
            names = {id(p): name for name, p in self.models.slots.parameters.items()}
            self.pairs.append(Pair(self.group, self.state, self.spans, optimizer, names, prefix))

    def work(
        self, parts: dict[int, Any], sizes: Sequence[int], samples: str, function: StepFunction, pair: Pair
    ) -> Work:
        """The next step for these samples."""
        return Work(self.version, parts, sizes, samples, function, pair)

    def step(self, work: Work, clip_norm: float | None = None, clip_value: float | None = None) -> Outcome:
        """Do one step. All workers must call this alike; blocks until all have committed.

        Args:
            work: This worker's part of it.
            clip_norm: Scale all gradients down to this norm, as `torch.nn.utils.clip_grad_norm_` does.
            clip_value: Clip every element of the gradients to this magnitude.
        """
        self.determinism.check()
        self.models.check_versions()
        self._attempt += 1
        pair, where = work.pair, work.where
        active = [w for w, (first, end) in enumerate(self.spans) if any(work.sizes[first:end])]
        pair.gradients.begin(self._attempt, active, list(work.parts))
        try:
            results = self.compute.run(work) if work.parts else {}
            pair.gradients.end_backward()
            outcome = self._share_results(work, results, [clip_norm, clip_value])
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

    def _share_results(self, work: Work, results: dict[int, ShardResult], clips: list[float | None]) -> Outcome:
        """Losses and metrics over all shards; and all workers must be doing the same step."""
        sizes = work.sizes
        mine = {k: [r.loss, r.metrics] for k, r in results.items()}
        facts = {
            "batch": list(sizes),
            "samples": work.samples,
            "optimizer": self.pairs.index(work.pair),
            "options": work.pair.hyperparameters(),
            "clipping": clips,
        }
        of_all = self.group.gather_json(work.where + "result", [facts, mine])
        by_shard: dict[int, Any] = {}
        for worker, (theirs, found) in enumerate(of_all):
            for key, value in theirs.items():
                if value != (expected := of_all[0][0][key]):
                    raise MismatchError(
                        f"in step {work.version} worker {worker} has {key} {value} but worker 0 has {expected}: "
                        "all workers must do the same step"
                    )
            by_shard.update({int(k): value for k, value in found.items()})
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
        self.compute.close()
        self.models.release(self.pairs)
        self.determinism.restore()
