"""A partitioned layer in a step of a run: every worker computes some parts, for the shards of all workers.

Inputs go to everyone, each worker computes its parts of every shard, outputs come back; backward is the same in
reverse. A part of a shard is computed alone, at its own shape, wherever that happens. The gradients of a part's
parameters are added up over shards where the part is, in the order of the tree over shards; those of an input over
parts, in the order of the tree over parts. So no bit depends on who computes what.

As in synchronized batch norm all local shards become one autograd node, chained by the surroundings' token. Every
worker's node depends on the parameters of all parts, its own or not, so that backward reaches it on all or on none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.surroundings import Workers, current
from evenstep.nn import parcel
from evenstep.nn.features.cuts import Cut
from evenstep.nn.treesum import TreeSum
from evenstep.plan import tree
from evenstep.plan.placement import cut

__all__ = ["Layer", "compute"]


class Layer(Protocol):
    """A layer in parts."""

    qualified_name: str
    cut: Cut
    parts: nn.ModuleList


def compute(layer: Layer, around: Workers, input: Tensor) -> Tensor:
    """The output for one local shard, without the bias of a sum; blocks until all shards have come."""
    tag = f"{layer.qualified_name} call {around.call_number(layer)}"
    output: Tensor = around.meet(tag, input, lambda inputs: _lead(layer, around, tag, inputs))
    return output if torch.is_grad_enabled() else output.detach()


class _ShardPart(NamedTuple):
    """One part of one shard: its input, and where its backward begins (None: it has none)."""

    input: Tensor
    edge: Any


@dataclass(eq=False)
class _LayerCall:
    """One call of a layer by all shards.

    Attributes:
        mine: The parts of this worker.
        shards: All shards with samples, in order.
        wanted: Those of them whose input has a gradient.
        leaves: The parameters of each of this worker's parts.
        pieces: By (part, shard).
    """

    layer: Layer
    around: Workers
    tag: str
    mine: range
    shards: list[int]
    wanted: list[int] = field(default_factory=list)
    leaves: dict[int, list[Tensor]] = field(default_factory=dict)
    pieces: dict[tuple[int, int], _ShardPart] = field(default_factory=dict)

    def swap(self, what: str, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those of all workers, in order."""
        if len(self.around.shards) == 1:
            return list(tensors)
        device = next((t.device for t in tensors if t is not None), next(self.layer.parts.parameters()).device)
        blobs = self.around.swap(f"{self.tag} {what}", parcel.pack(tensors))
        return [tensor for blob in blobs for tensor in parcel.unpack(blob, device)]


def _lead(layer: Layer, around: Workers, tag: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute this worker's parts of all shards, and make the one node of the local ones."""
    own = around.shards[around.me]
    shards = [k for theirs in around.shards for k in theirs]
    spans = cut(len(layer.parts), len(around.shards))
    call = _LayerCall(layer, around, tag, range(*spans[around.me]), shards)
    offered = [x.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled()) for x in inputs]
    found = {k: x for k, x in zip(shards, call.swap("inputs", offered), strict=True) if x is not None}
    call.wanted = [k for k, x in found.items() if x.requires_grad]
    parameters = list(layer.parts.parameters())
    grad = torch.is_grad_enabled() and (bool(call.wanted) or any(p.requires_grad for p in parameters))
    computed = [y for y in call.swap("outputs", _compute_pieces(call, found, grad)) if y is not None]
    outputs = [layer.cut.join(computed[shards.index(k) :: len(shards)]) for k in own]
    if not grad:
        return outputs
    token = around.token if around.token is not None else torch.zeros(0, requires_grad=True)
    around.token, *joint = _JointLayer.apply(call, outputs, token, *inputs, *parameters)  # type: ignore[no-untyped-call]  # torch's
    return list(joint)


def _compute_pieces(call: _LayerCall, inputs: dict[int, Tensor], grad: bool) -> list[Tensor]:
    """The outputs of this worker's parts, for each of them those of all shards."""
    outputs = []
    for p in call.mine:
        part = call.layer.parts[p]
        call.leaves[p] = list(part.parameters())  # of the leading shard's lane: in backward others hang there
        for k in call.shards:
            x = _fresh(call.layer.cut.slice(inputs[k].detach(), p)).requires_grad_(k in call.wanted)
            with torch.set_grad_enabled(grad):
                y = part(x)
            call.pieces[p, k] = _ShardPart(x, get_gradient_edge(y) if y.requires_grad else None)
            outputs.append(y.detach())
    return outputs


class _JointLayer(torch.autograd.Function):
    """The layer for all local shards. Its outputs were computed before; it is there for their backward."""

    @staticmethod
    def forward(
        ctx: Any, call: _LayerCall, outputs: list[Tensor], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (torch.zeros(0), *outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor | None, *dys: Tensor | None) -> tuple[Any, ...]:
        call: _LayerCall = ctx.call
        if current() is not None:
            raise UnsupportedError(
                f"backward reached '{call.tag}' inside the forward of one shard, but needs the gradients of all; "
                "call backward after the forward, on the losses of all"
            )
        arrived = dict(zip(call.shards, call.swap("gradients", dys), strict=True))
        dxs, dws = _differentiate(call, arrived)
        return None, None, torch.zeros(0), *_of_inputs(call, dxs), *dws


def _differentiate(call: _LayerCall, dys: dict[int, Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of this worker's parts' inputs, of each part all wanted ones; and of all parts' parameters."""
    dxs: list[Tensor | None] = []
    dws: list[Tensor | None] = []
    for p, part in enumerate(call.layer.parts):
        if p not in call.mine:
            dws += [None for _ in part.parameters()]
            continue
        leaves = call.leaves[p]
        sums = [TreeSum(tree.leaf_program(call.around.num_shards)) for _ in leaves]
        for k in range(call.around.num_shards):
            piece, dy = call.pieces.pop((p, k), None), dys.get(k)
            found: list[Tensor | None] = [None] * (1 + len(leaves))
            if piece is not None and piece.edge is not None and dy is not None:
                found = _backward(piece, leaves, _fresh(call.layer.cut.slice_back(dy, p)))
            if k in call.wanted:
                dxs.append(found[0])
            for total, dw in zip(sums, found[1:], strict=True):
                total.push(dw)
        dws += [total.result for total in sums]
    return dxs, dws


def _backward(piece: _ShardPart, leaves: Sequence[Tensor], dy: Tensor) -> list[Tensor | None]:
    """The gradients of a piece's input and parameters, None where there is none."""
    needed = [t for t in (piece.input, *leaves) if t.requires_grad]
    found = torch.autograd.grad([piece.edge], needed, [dy], allow_unused=True)
    # torch may pass on the very gradient that it was given, and parameters' gradients are added up in place
    own = [g.clone() if g is not None and g.data_ptr() == dy.data_ptr() else g for g in found]
    by_tensor = dict(zip(map(id, needed), own, strict=True))
    return [by_tensor.get(id(t)) for t in (piece.input, *leaves)]


def _of_inputs(call: _LayerCall, mine: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients of this worker's shards' inputs, from what all workers found for their parts."""
    gradients: list[Tensor | None] = []
    found = call.swap("input gradients", mine) if call.wanted else []
    for k in call.around.shards[call.around.me]:
        of_parts = found[call.wanted.index(k) :: len(call.wanted)] if k in call.wanted else []
        present = [dx for dx in of_parts if dx is not None]
        gradients.append(call.layer.cut.join_back(present) if present else None)
    return gradients


def _fresh(tensor: Tensor) -> Tensor:
    """The tensor as if it had come from another worker: the bits of some kernels depend on strides and alignment."""
    if tensor.is_contiguous() and tensor.data_ptr() % 64 == 0:
        return tensor.detach()
    return tensor.detach().clone(memory_format=torch.contiguous_format)
