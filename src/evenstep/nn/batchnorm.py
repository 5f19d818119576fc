"""Synchronized batch norm: the statistics span all participants of the surroundings.

The module only orchestrates. The mathematics is in `functional`; who takes part and how bytes move is the business of the
surroundings (`exchange.surroundings`): the shards of a run, the replicas of `DataParallel`, the ranks of a process group.
Where there is none, and always in eval mode, it is `nn.BatchNorm` itself and talks to nobody.

All local participants of one call become *one* autograd node, made by the first of them: autograd runs the backward of
every participant of a GPU in one thread, so a node for each that waited for the others would wait for ever. A token
passes from each such node to the next, so that backward meets them in the reverse order of forward on every worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.surroundings import Surroundings, current
from evenstep.nn import functional as f
from evenstep.nn.functional import EpsMode, Stats
from evenstep.nn.process_group import around

__all__ = ["SyncBatchNorm", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d"]


class SyncBatchNorm(_BatchNorm):
    """Batch norm over all participants; any input [N, C, ...] of 2 to 5 dimensions.

    Args:
        num_features: C.
        eps: Keeps the variance from zero.
        momentum: Weight of the newest batch in the running statistics; None averages over all batches.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics; without them eval mode uses the batch's own.
        process_group: The ranks to span when there is a process group around; None: the default group.
        eps_mode: "plus" adds eps to the variance as torch does, "clamp" raises the variance to at least eps.
        device: As for `nn.BatchNorm2d`.
        dtype: As for `nn.BatchNorm2d`.
    """

    spans_shards = True
    _dimensions: tuple[int, ...] = (2, 3, 4, 5)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        eps_mode: EpsMode = "plus",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if eps_mode not in ("plus", "clamp"):
            raise ValueError(f"eps_mode is {eps_mode!r}, expected 'plus' or 'clamp'")
        self.process_group = process_group
        self.eps_mode: EpsMode = eps_mode

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._dimensions:
            expected = " or ".join(f"{d}D" for d in self._dimensions)
            raise ValueError(f"expected {expected} input (got {input.dim()}D input)")

    def extra_repr(self) -> str:
        """As for `nn.BatchNorm2d`, with the eps mode where it is not torch's."""
        return super().extra_repr() + ("" if self.eps_mode == "plus" else f", eps_mode={self.eps_mode}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a participant's input; blocks until all participants have come, at most for the timeout.

        Raises:
            ValueError: The input's shape does not fit, or there is one value per channel in all.
            EvenstepError: A participant failed, did not come, or is at another layer.
        """
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels (got {input.shape[1]} channels)")
        if self.training or (self.running_mean is None and self.running_var is None):
            return self._with_batch_statistics(input)
        return super().forward(input)

    @torch.compiler.disable  # a rendezvous cannot be traced: the graph breaks here, cleanly
    def _with_batch_statistics(self, input: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]  # torch has no public way
        if in_backward and self in _remembered:
            return self._recompute(input)
        around_us: Surroundings | None = current() or (around(self.process_group) if self.training else None)
        if around_us is None and self.eps_mode == "plus":
            return super().forward(input)
        around_us = around_us or _Nobody()
        tag = f"{self.qualified_name} call {around_us.call_number(self)}"
        return around_us.meet(tag, _Offer.of(self, input), lambda offers: _lead(around_us, tag, offers))  # type: ignore[no-any-return]  # a Tensor

    qualified_name = "batch norm"  # the layer's name in its model, for errors; conversion and the engine set it

    def _recompute(self, input: Tensor) -> Tensor:
        """Activation checkpointing runs the forward again inside backward: meet nobody, take what was found before.

        The recomputed input has the bits of the first one, so its own statistics find the common ones.
        """
        found = _remembered[self].get(_key(f.statistics(input.detach())))
        if found is None:
            raise UnsupportedError(
                f"{self.qualified_name} is recomputed inside backward with another input than in forward; "
                "use torch.utils.checkpoint with use_reentrant=False and preserve_rng_state=True"
            )
        offer = _Offer.of(self, input)
        return _Recomputed.apply(offer.x, found, offer.weight, offer.bias)  # type: ignore[no-any-return]  # a Tensor


class SyncBatchNorm1d(SyncBatchNorm):
    """Synchronized batch norm over [N, C] or [N, C, L]."""

    _dimensions = (2, 3)


class SyncBatchNorm2d(SyncBatchNorm):
    """Synchronized batch norm over [N, C, H, W]."""

    _dimensions = (4,)


class SyncBatchNorm3d(SyncBatchNorm):
    """Synchronized batch norm over [N, C, D, H, W]."""

    _dimensions = (5,)


@dataclass
class _Offer:
    """What a local participant brings to a call."""

    module: SyncBatchNorm
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    keep: list[Any]  # the context that holds the participant's input for backward
    checkpointed: bool

    @classmethod
    def of(cls, module: SyncBatchNorm, x: Tensor) -> "_Offer":
        keep: list[Any] = []
        kept = _Keep.apply(x, keep) if torch.is_grad_enabled() else x
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]  # torch has no public way
        return cls(module, kept, module.weight, module.bias, keep, hooks is not None)


class _Keep(torch.autograd.Function):
    """Keeps a participant's input in that participant's own thread, under its own hooks (checkpointing, offloading)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        keep.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # torch's own signature is *Any
        return dx, None


@dataclass(frozen=True)
class _Call:
    """One call of one layer by all participants."""

    around: Surroundings
    tag: str
    stats: Stats
    invstd: Tensor
    eps: float
    eps_mode: EpsMode
    keeps: list[list[Any]]


def _lead(around_us: Surroundings, tag: str, offers: Sequence[_Offer]) -> Sequence[Tensor]:
    """Merge the statistics of all participants, move the running ones, and make the one node of the local ones."""
    module = offers[0].module
    dtype = f.accumulation_dtype(offers[0].x.dtype)
    with torch.no_grad():
        local = [f.statistics(offer.x) for offer in offers]
        rows = torch.stack([torch.cat([s.count.view(1), s.mean, s.m2]).double() for s in local])
        merged = _merge_all(around_us.gather(f"{tag} forward", rows))
        if float(merged.count) <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {offers[0].x.size()}"
            )
        stats = Stats(merged.count, merged.mean.to(dtype), merged.m2.to(dtype))
        invstd = f.inverse_std(merged, module.eps, module.eps_mode).to(dtype)
        if module.training and module.track_running_stats:
            f.update_running(
                module.running_mean, module.running_var, module.num_batches_tracked, merged, module.momentum
            )
    for offer, own in zip(offers, local, strict=True):
        if offer.checkpointed:
            _remember(offer.module, own, stats, invstd)
    call = _Call(around_us, tag, stats, invstd, module.eps, module.eps_mode, [offer.keep for offer in offers])
    tensors = [*(o.x for o in offers), *(o.weight for o in offers), *(o.bias for o in offers)]
    token = None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        token = around_us.token if around_us.token is not None else torch.zeros(0, requires_grad=True)
    after, *outputs = _Joint.apply(call, token, *tensors)
    if token is not None:
        around_us.token = after
    return outputs


def _merge_all(rows: Tensor) -> Stats:
    """Merge [K, 1 + 2C] rows, one per shard, level by level: the fixed tree."""
    stats = Stats(rows[:, :1], *rows[:, 1:].chunk(2, dim=1))
    while len(stats.mean) > 1:
        even = len(stats.mean) // 2 * 2
        pairs = f.merge(Stats(*(s[0:even:2] for s in stats)), Stats(*(s[1:even:2] for s in stats)))
        stats = Stats(*(torch.cat([p, s[even:]]) for p, s in zip(pairs, stats, strict=True)))
    return Stats(stats.count.view(()), stats.mean[0], stats.m2[0])


def _sum_all(rows: Tensor) -> Tensor:
    """Sum [K, n] rows, one per shard, level by level: the fixed tree."""
    while len(rows) > 1:
        even = len(rows) // 2 * 2
        rows = torch.cat([rows[0:even:2] + rows[1:even:2], rows[even:]])
    return rows[0]


class _Joint(torch.autograd.Function):
    """The batch norm of all local participants: one exchange in forward (done by `_lead`), one in backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        num = len(tensors) // 3
        xs, weights, biases = tensors[:num], tensors[num : 2 * num], tensors[2 * num :]
        ctx.call, ctx.weights = call, weights
        ctx.has_bias = biases[0] is not None
        mean = call.stats.mean
        outputs = [f.normalize(x, mean, call.invstd, w, b) for x, w, b in zip(xs, weights, biases, strict=True)]  # type: ignore[arg-type]  # every x is a Tensor
        return (torch.zeros(0), *outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: Any, _: Tensor, *dys: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        mean, invstd, count = call.stats.mean, call.invstd, call.stats.count
        xs = [keep[0].saved_tensors[0] for keep in call.keeps]
        sums = [f.backward_reduce(dy, x, mean, invstd) for dy, x in zip(dys, xs, strict=True)]
        rows = torch.stack([torch.cat(pair).double() for pair in sums])
        sum_dy, sum_dy_xmu = _sum_all(call.around.gather(f"{call.tag} backward", rows)).to(mean.dtype).chunk(2)
        sum_dy_xmu = f.mask_clamped(sum_dy_xmu, call.stats, call.eps, call.eps_mode)
        dxs = [
            f.backward_input(dy, x, mean, invstd, w, sum_dy, sum_dy_xmu, count)
            for dy, x, w in zip(dys, xs, ctx.weights, strict=True)
        ]
        d_weights = [None if w is None else (s[1] * invstd).to(w.dtype) for s, w in zip(sums, ctx.weights, strict=True)]
        d_biases = [None if w is None else s[0].to(w.dtype) for s, w in zip(sums, ctx.weights, strict=True)]
        return (None, torch.zeros(0), *dxs, *d_weights, *(d_biases if ctx.has_bias else [None] * len(dxs)))


class _Recomputed(torch.autograd.Function):
    """The output again, for the tensors that later operations save; nobody differentiates it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: tuple[Stats, Tensor], weight: Tensor | None, bias: Tensor | None) -> Tensor:
        stats, invstd = found
        return f.normalize(x, stats.mean, invstd, weight, bias)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedError(
            "synchronized batch norm cannot be recomputed with use_reentrant=True; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


class _Nobody:
    """Surroundings without anybody: what `_lead` needs for a layer that is alone with an eps mode of its own."""

    def __init__(self) -> None:
        self.token: Tensor | None = None

    def meet(self, tag: str, value: Any, lead: Any) -> Any:
        return lead([value])[0]

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        return rows

    def call_number(self, layer: object) -> int:
        return 0


_MAX_REMEMBERED = 256
_remembered: WeakKeyDictionary[SyncBatchNorm, dict[bytes, tuple[Stats, Tensor]]] = WeakKeyDictionary()


def _key(stats: Stats) -> bytes:
    return torch.cat([stats.count.view(1), stats.mean, stats.m2]).cpu().numpy().tobytes()


def _remember(module: SyncBatchNorm, own: Stats, stats: Stats, invstd: Tensor) -> None:
    """Keep what a checkpointed call found, for its recomputation. Bounded: the oldest go first."""
    known = _remembered.setdefault(module, {})
    known[_key(own)] = (stats, invstd)
    while len(known) > _MAX_REMEMBERED:
        known.pop(next(iter(known)))
