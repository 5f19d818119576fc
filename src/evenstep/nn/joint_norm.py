"""One call of batch norm by all local participants: what each brings, and the one autograd node that it becomes.

The node is made by the first of them (`lead`), and exchanges with the other participants once in forward and once in
backward. `batchnorm` says why it is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.surroundings import Surroundings, current
from evenstep.nn import gpu, passes
from evenstep.nn.functional import EpsMode
from evenstep.nn.passes import Needed, Part
from evenstep.nn.recomputed import NormCall, remember

__all__ = ["NormOffer", "apply", "lead"]


@dataclass(frozen=True)
class NormOffer:
    """What a local participant brings to a call."""

    layer: _BatchNorm
    eps_mode: EpsMode
    part: Part
    hold: Tensor | None  # attaches the saved input to the joint node; None where nothing is differentiated
    keep: list[Any]  # the context that holds the input, if any
    checkpointed: bool
    running: gpu.Running

    @classmethod
    def of(
        cls, layer: _BatchNorm, eps_mode: EpsMode, part: Part, in_backward: bool, running: gpu.Running
    ) -> "NormOffer":
        """What a participant brings, kept for backward in its own thread if anything is differentiated.

        Args:
            layer: The layer.
            eps_mode: How eps keeps the variance from zero.
            part: The input, and what is done with it.
            in_backward: Whether this is a recomputation, which leaves the running statistics alone.
            running: The running statistics to update.
        """
        keep: list[Any] = []
        hold = None
        if torch.is_grad_enabled():
            hold = apply(_Keep, keep, part.activation, *part[:4])
        if hold is None or not hold.requires_grad:
            x, weight, bias, residual = (None if t is None else t.detach() for t in part[:4])
            part = Part(x, weight, bias, residual, part.activation)  # type: ignore[arg-type]  # x is a Tensor
            keep, hold = [], None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch has no public way
        return cls(layer, eps_mode, part, hold, keep, hooks is not None, gpu.Running() if in_backward else running)


class _Keep(torch.autograd.Function):
    """Saves a participant's tensors in that participant's own thread, under its own hooks (such as checkpointing's).

    Bias and residual are only for an activation, whose output backward computes again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keep: list[Any],
        activation: str | None,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.activation = activation
        if activation is None:
            ctx.save_for_backward(x, weight)
        else:
            ctx.save_for_backward(x, weight, bias, residual)
        keep.append(ctx)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        return None, None, None, None, None, None


def lead(around_us: Surroundings, tag: str, offers: Sequence[NormOffer]) -> Sequence[Tensor]:
    """Merge the statistics of all participants, update the running ones, and make the one node of the local ones."""
    parts = [offer.part._replace(x=offer.part.x.detach()) for offer in offers]
    with torch.no_grad():
        local = passes.statistics(parts)
        own = [row.clone() for row in local] if any(offer.checkpointed for offer in offers) else []
        rows = around_us.gather(f"{tag} forward", local)
        count: float = _count(parts)
        if count < 2 and not (around_us.alone or rows is local):  # otherwise it does not matter how many others have
            count = float(rows[:, 0].sum())
        _check_count(count, parts)
        running = offers[0].running
        if count == 0 and running.num_batches_tracked is not None:  # as nn.BatchNorm does with an empty batch
            running.num_batches_tracked.add_(1)
        whole = passes.conclude(rows, parts[0], offers[0].layer.eps, offers[0].eps_mode, running, kernels=count > 0)
    keeps = [offer.keep for offer in offers]
    call = NormCall(around_us, tag, whole, keeps)
    for offer, row in zip(offers, own, strict=False):
        if offer.checkpointed:
            remember(offer.layer, row, call)
    tensors = [t for kind in range(4) for t in (o.part[kind] for o in offers)]
    activations = [o.part.activation for o in offers]
    with torch.set_grad_enabled(any(keeps)):
        token = None
        if any(keeps):
            token = around_us.token if around_us.token is not None else _token(parts[0].x, requires_grad=True)
        after, *outputs = apply(_JointNorm, call, activations, token, *(o.hold for o in offers), *tensors)
        if token is not None:
            around_us.token = after
    return list(outputs)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _token(like: Tensor, *, requires_grad: bool = False) -> Tensor:
    """An empty tensor on the device of the rest: only a graph of a single device can be captured."""
    return torch.zeros(0, device=like.device, requires_grad=requires_grad)


def _count(parts: Sequence[Part]) -> int:
    return sum(part.x.numel() // max(part.x.shape[1], 1) for part in parts)


def _check_count(count: float, parts: Sequence[Part]) -> None:
    if count == 1:
        size = next((part.x.size() for part in parts if part.x.numel()), parts[0].x.size())
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


class _JointNorm(torch.autograd.Function):
    """The batch norm of all local participants: one exchange in forward (done by `lead`), one in backward.

    Its tensors, each for all participants: holders of the saved tensors, inputs, weights, biases, residuals.
    """

    @staticmethod
    def forward(
        ctx: Any, call: NormCall, activations: Sequence[str | None], token: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        _, *own = _fifths(tensors)
        parts = [Part(*mine) for mine in zip(*own, activations, strict=True)]
        return (_token(parts[0].x), *passes.outputs(parts, call.whole))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *dys: Tensor | None) -> tuple[Any, ...]:
        call: NormCall = ctx.call
        if current() is not None:
            raise UnsupportedError(
                f"backward reached '{call.tag}' inside the forward of one participant, but needs the gradients of all; "
                "call backward after the forward, on the losses of all"
            )
        kept = [keep[0].saved_tensors if keep else () for keep in call.keeps]
        parts = [
            _part(keep[0].activation, *saved) if keep else None for keep, saved in zip(call.keeps, kept, strict=True)
        ]
        with torch.no_grad():
            gradients = _gradients(call, dys, parts, ctx.needs_input_grad[3:])
        if torch.is_grad_enabled():  # create_graph=True
            sources = [tensor for tensor in (*dys, *chain(*kept)) if tensor is not None]
            gradients = list(apply(_Once, call.tag, gradients, *sources))
        return (None, None, _token(call.whole.stats.mean), *gradients)


def _part(
    activation: str | None, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, residual: Tensor | None = None
) -> Part:
    return Part(x, weight, bias, residual, activation)


def _fifths(values: Sequence[Any]) -> list[Any]:
    num = len(values) // 5
    return [values[n * num : (n + 1) * num] for n in range(5)]


def _gradients(
    call: NormCall, dys: Sequence[Tensor | None], parts: Sequence[Part | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of all inputs of the joint node; needs the sums of all participants, so it exchanges.

    If a participant has not used its output (its dy is None), its input still has a gradient through the others'. If
    nobody has, there is none at all, as in plain torch: None and not zero, which an optimizer treats differently.
    """
    _, *own = _fifths(needs)
    needed = [Needed(*mine) for mine in zip(*own, strict=True)]
    reduced = passes.reduce(parts, dys, call.whole, needed)
    rows = call.around.gather(f"{call.tag} backward", reduced.rows)
    alone = call.around.alone or rows is reduced.rows
    used = any(dy is not None for dy in dys) or (not alone and float(rows[:, 0].sum()) > 0)
    if not used:
        return [None] * len(needs)
    dxs = passes.input_gradients(parts, dys, call.whole, reduced, rows, needed)
    holds = [None if part is None else part.x.new_empty(0) for part in parts]
    return [*holds, *dxs, *reduced.weights, *reduced.biases, *reduced.residuals]


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again, tied to what they depend on so that an attempt is noticed."""

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
