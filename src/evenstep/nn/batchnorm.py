"""Synchronized batch norm: the statistics span all participants of the surroundings.

The module only orchestrates. The mathematics is in `functional`; who takes part and how bytes move is the business of
the surroundings (`exchange.surroundings`): the shards of a run, the replicas of `DataParallel`, the ranks of a process
group. Where there is none, and always in eval mode, it is `nn.BatchNorm` itself and talks to nobody.

All local participants of one call become *one* autograd node, made by the first of them: autograd runs the backward of
every participant of a GPU in one thread, so a node for each that waited for the others would wait for ever. Where the
surroundings keep a token it passes from each such node to the next, so that backward meets them in the reverse order of
forward on every worker, and meets them all.

Activation checkpointing runs a forward again inside backward, where nobody can be met. What the first forward found is
therefore kept for as long as its graph lives, and served to the recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.group import tree_sum
from evenstep.exchange.surroundings import Surroundings, current
from evenstep.nn import functional as f
from evenstep.nn.functional import EpsMode, Stats
from evenstep.nn.process_group import GroupHandle, around
from evenstep.nn.unchained import Unchained
from evenstep.plan import tree

__all__ = [
    "LazySyncBatchNorm1d",
    "LazySyncBatchNorm2d",
    "LazySyncBatchNorm3d",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "check_eps_mode",
]


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
        bias: Whether an affine layer has a bias; False needs a torch whose `nn.BatchNorm2d` knows it.

    Attributes:
        qualified_name: The layer's name in its model, for errors; `convert_sync_batchnorm` sets it. Participants are
            matched by it, so layers without a name are told apart by their class and size only.
        process_group: As the argument. A pickle cannot hold a group: an unpickled layer that had one of its own must
            be given one again before it trains beside other ranks.
    """

    spans_shards = True
    qualified_name = ""
    eps_mode: EpsMode = "plus"
    _group = GroupHandle()

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
        *,
        bias: bool = True,
    ) -> None:
        check_eps_mode(eps_mode)
        options: dict[str, Any] = {} if bias else {"bias": False}
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **options
        )
        self.process_group = process_group
        self.eps_mode = eps_mode

    @property
    def process_group(self) -> Any:  # noqa: D102  # an attribute, documented with the class
        return self._group.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._group = GroupHandle(group)

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected 2D to 5D input (got {input.dim()}D input)")

    def extra_repr(self) -> str:
        """As for `nn.BatchNorm2d`, with the eps mode where it is not torch's."""
        described: str = super().extra_repr()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return described if self.eps_mode == "plus" else f"{described}, eps_mode={self.eps_mode}"

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
            output: Tensor = self._with_batch_statistics(input)
            return output
        if self.eps_mode == "plus" or self.running_var is None:
            return super().forward(input)
        variance = self.running_var.clamp(min=self.eps)
        # nn.functional.batch_norm refuses an eps of 0 in some versions.
        return torch.batch_norm(
            input, self.weight, self.bias, self.running_mean, variance, False, 0.0, 0.0, torch.backends.cudnn.enabled
        )

    # A rendezvous cannot be traced: the graph breaks here, cleanly.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def _with_batch_statistics(self, input: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1  # torch has no public way
        if in_backward and self in _remembered and (call := _recall(self, input)) is not None:
            offer = _Offer.of(self, input, in_backward)
            return _apply(_Recomputed, input, call, offer.weight, offer.bias)  # type: ignore[no-any-return]  # a Tensor
        around_us = self._surroundings(in_backward) if self.training else None
        if around_us is None and self.eps_mode == "plus":
            return super().forward(input)
        around_us = around_us or _Nobody()
        tag = f"{self._name()} call {around_us.call_number(self)}"
        offer = _Offer.of(self, input, in_backward)
        output: Tensor = around_us.meet(tag, offer, lambda offers: _lead(around_us, tag, offers))
        return output if torch.is_grad_enabled() else output.detach()

    def _surroundings(self, in_backward: bool) -> Surroundings | None:
        found = current()
        if found is not None and not in_backward:
            _meets_in_threads.add(self)
            return found
        if not in_backward:
            _meets_in_threads.discard(self)
        elif found is not None or self in _meets_in_threads:
            raise UnsupportedError(
                f"{self._name()} is computed inside backward, where its other participants cannot be met; "
                "with activation checkpointing use torch.utils.checkpoint.checkpoint(..., use_reentrant=False) and see "
                "that the recomputation gets the same input as the first one (preserve_rng_state=True)"
            )
        return around(self._group.group)

    def _name(self) -> str:
        return self.qualified_name or f"{type(self).__name__}({self.num_features})"


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """Synchronized batch norm over [N, C] or [N, C, L]."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """Synchronized batch norm over [N, C, H, W]."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """Synchronized batch norm over [N, C, D, H, W]."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim


class LazySyncBatchNorm1d(_LazyNormBase, SyncBatchNorm):
    """What a converted `nn.LazyBatchNorm1d` is until its first input; torch looks `forward` up before that."""

    cls_to_become = SyncBatchNorm1d


class LazySyncBatchNorm2d(_LazyNormBase, SyncBatchNorm):
    """What a converted `nn.LazyBatchNorm2d` is until its first input."""

    cls_to_become = SyncBatchNorm2d


class LazySyncBatchNorm3d(_LazyNormBase, SyncBatchNorm):
    """What a converted `nn.LazyBatchNorm3d` is until its first input."""

    cls_to_become = SyncBatchNorm3d


def check_eps_mode(eps_mode: str) -> None:
    """Refuse what is not an eps mode.

    Raises:
        ValueError: It is neither "plus" nor "clamp".
    """
    if eps_mode not in ("plus", "clamp"):
        raise ValueError(f"eps_mode is {eps_mode!r}, expected 'plus' (var + eps) or 'clamp' (max(var, eps))")


@dataclass(frozen=True)
class _Offer:
    """What a local participant brings to a call."""

    module: SyncBatchNorm
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    hold: Tensor | None  # hangs the saved input on to the joint node; None where nothing is differentiated
    keep: list[Any]  # the context that holds the input, if any
    checkpointed: bool
    in_backward: bool

    @classmethod
    def of(cls, module: SyncBatchNorm, x: Tensor, in_backward: bool) -> "_Offer":
        keep: list[Any] = []
        weight, bias, hold = module.weight, module.bias, None
        if torch.is_grad_enabled():
            hold = _apply(_Keep, keep, x, weight, bias)
        if hold is None or not hold.requires_grad:
            x, weight, bias = (None if t is None else t.detach() for t in (x, weight, bias))  # type: ignore[assignment]  # x is a Tensor
            keep, hold = [], None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch has no public way
        return cls(module, x, weight, bias, hold, keep, hooks is not None, in_backward)


class _Keep(torch.autograd.Function):
    """Saves a participant's tensors in that participant's own thread, under its own hooks (such as checkpointing's)."""

    @staticmethod
    def forward(ctx: Any, keep: list[Any], x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        keep.append(ctx)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None, None]:
        return None, None, None, None


@dataclass(eq=False)
class _Call:
    """One call of one layer by all participants."""

    around: Surroundings
    tag: str
    stats: Stats
    invstd: Tensor
    eps: float
    eps_mode: EpsMode
    keeps: list[list[Any]]
    ambiguous: bool = False

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, inverse standard deviation and count where a participant needs them."""
        return self.stats.mean.to(device), self.invstd.to(device), self.stats.count.to(device)


def _lead(around_us: Surroundings, tag: str, offers: Sequence[_Offer]) -> Sequence[Tensor]:
    """Merge the statistics of all participants, move the running ones, and make the one node of the local ones."""
    module, device = offers[0].module, offers[0].x.device
    with torch.no_grad():
        local = [f.statistics_row(offer.x.detach()) for offer in offers]
        rows = torch.stack([row.to(device) for row in local])
        stats = f.merge_rows(around_us.gather(f"{tag} forward", rows))
        _check_count(stats, offers)
        if module.training and module.track_running_stats and not offers[0].in_backward:
            _update_running(module, stats)
        invstd = f.inverse_std(stats, module.eps, module.eps_mode)
    keeps = [offer.keep for offer in offers]
    call = _Call(around_us, tag, stats, invstd, module.eps, module.eps_mode, keeps)
    for offer, own in zip(offers, local, strict=True):
        if offer.checkpointed:
            _remember(offer.module, own, call)
    tensors = [
        *(o.x for o in offers),
        *(o.hold for o in offers),
        *(o.weight for o in offers),
        *(o.bias for o in offers),
    ]
    with torch.set_grad_enabled(any(keeps)):
        token = None
        if any(keeps):
            token = around_us.token if around_us.token is not None else torch.zeros(0, requires_grad=True)
        after, *outputs = _apply(_Joint, call, token, *tensors)
        if token is not None:
            around_us.token = after
    return list(outputs)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _check_count(stats: Stats, offers: Sequence[_Offer]) -> None:
    if float(stats.count) == 1:
        size = next((o.x.size() for o in offers if o.x.numel()), offers[0].x.size())
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def _update_running(module: SyncBatchNorm, stats: Stats) -> None:
    if float(stats.count) == 0:  # as nn.BatchNorm does with an empty batch
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        return
    f.update_running(module.running_mean, module.running_var, module.num_batches_tracked, stats, module.momentum)


def _sum_all(rows: Tensor) -> Tensor:
    """Sum [K, n] rows, one per shard, in the fixed tree over shards."""
    host = rows.cpu()
    return tree_sum(host.unbind(0), tree.leaf_program(len(host)), torch.empty_like(host[0])).to(rows.device)


class _Joint(torch.autograd.Function):
    """The batch norm of all local participants: one exchange in forward (done by `_lead`), one in backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        xs, _, weights, biases = _quarters(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = []
        for x, weight, bias in zip(xs, weights, biases, strict=True):
            mean, invstd, _ = call.on(x.device)
            outputs.append(f.normalize(x, mean, invstd, weight, bias))
        return (torch.zeros(0), *outputs)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *dys: Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        if current() is not None:
            raise UnsupportedError(
                f"backward reached '{call.tag}' inside the forward of one participant, but needs the gradients of all; "
                "call backward after the forward, on the losses of all"
            )
        saved = [keep[0].saved_tensors if keep else (None, None) for keep in call.keeps]
        with torch.no_grad():
            gradients = _gradients(call, dys, saved, ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # create_graph=True
            sources = [tensor for tensor in (*dys, *chain(*saved)) if tensor is not None]
            gradients = list(_apply(_Once, call.tag, gradients, *sources))
        return (None, torch.zeros(0), *gradients)


def _quarters(values: Sequence[Any]) -> list[Any]:
    num = len(values) // 4
    return [values[n * num : (n + 1) * num] for n in range(4)]


def _gradients(
    call: _Call, dys: Sequence[Tensor | None], saved: Sequence[tuple[Any, Any]], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of all inputs of the joint node; needs the sums of all participants, so it exchanges.

    A participant may not have used its output (its dy is None), and its input still has a gradient through the others'.
    Where nobody has there is none at all, as in plain torch: None and not zero, which an optimizer treats differently.
    """
    device = call.stats.mean.device
    nothing = torch.zeros_like(call.stats.mean)
    sums = [(nothing, nothing)] * len(dys)
    for i, (dy, (x, _)) in enumerate(zip(dys, saved, strict=True)):
        if x is not None and dy is not None:
            sums[i] = f.backward_reduce(dy, x, call.on(x.device)[0])
    used = [torch.full((1,), dy is not None, dtype=torch.float64, device=device) for dy in dys]
    rows = torch.stack([torch.cat([one, *(t.to(device) for t in pair)]) for one, pair in zip(used, sums, strict=True)])
    everyone = _sum_all(call.around.gather(f"{call.tag} backward", rows))
    if float(everyone[0]) == 0:
        return [None] * len(needed)
    sum_dy, sum_dy_xmu = everyone[1:].chunk(2)
    sum_dy_xmu = f.mask_clamped(sum_dy_xmu, call.stats, call.eps, call.eps_mode)
    need_x, _, need_weight, need_bias = _quarters(needed)
    num = len(dys)
    gradients: list[Tensor | None] = [None] * (4 * num)
    for i, (dy, (x, weight), own) in enumerate(zip(dys, saved, sums, strict=True)):
        if x is None:
            continue
        mean, invstd, count = call.on(x.device)
        if need_x[i]:
            own_dy = torch.zeros_like(x) if dy is None else dy
            sums_of_all = (sum_dy.to(x.device), sum_dy_xmu.to(x.device))
            gradients[i] = f.backward_input(own_dy, x, mean, invstd, weight, *sums_of_all, count)
        gradients[num + i] = x.new_empty(0)
        if need_weight[i] and dy is not None:
            gradients[2 * num + i] = own[1] * invstd
        if need_bias[i] and dy is not None:
            gradients[3 * num + i] = own[0]
    return gradients


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again, tied to what they depend on so that trying it is noticed."""

    @staticmethod
    def forward(ctx: Any, tag: str, gradients: list[Tensor | None], *sources: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tag = tag
        return tuple(gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedError(
            f"'{ctx.tag}' was differentiated twice, but synchronized batch norm has first derivatives only; put the "
            "layer into eval mode for the second derivative, or use revert_sync_batchnorm(model) and one process"
        )


class _Recomputed(torch.autograd.Function):
    """The output again, for the tensors that later operations save; nobody differentiates it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, invstd, _ = call.on(x.device)
        return f.normalize(x, mean, invstd, weight, bias)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedError(
            "synchronized batch norm cannot be recomputed with use_reentrant=True; use "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


class _Nobody(Unchained):
    """Surroundings without anybody: what `_lead` needs for a layer that is alone with an eps mode of its own."""

    def meet(self, tag: str, value: Any, lead: Any) -> Any:
        return lead([value])[0]

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        return rows

    def call_number(self, layer: object) -> int:
        return 0


_meets_in_threads: WeakSet[SyncBatchNorm] = WeakSet()  # those whose last forward met others in threads
_remembered: WeakKeyDictionary[SyncBatchNorm, WeakValueDictionary[bytes, _Call]] = WeakKeyDictionary()


def _key(own: Tensor) -> bytes:
    """The recomputed input has the bits of the first one, so its own statistics find what the call found."""
    return own.cpu().numpy().tobytes()


def _remember(module: SyncBatchNorm, own: Tensor, call: _Call) -> None:
    """Keep what a checkpointed call found for its recomputation; the call lives as long as its joint node."""
    known = _remembered.setdefault(module, WeakValueDictionary())
    key = _key(own)
    other = known.get(key)
    if other is not None and not all(map(torch.equal, other.stats, call.stats)):
        call.ambiguous = True
    known[key] = call


def _recall(module: SyncBatchNorm, input: Tensor) -> _Call | None:
    call = _remembered[module].get(_key(f.statistics_row(input.detach())))
    if call is not None and call.ambiguous:
        raise UnsupportedError(
            f"'{call.tag}' is recomputed in backward, but an earlier call had an input with the same statistics among "
            "others: call backward before the next forward, or do not checkpoint this layer"
        )
    return call
