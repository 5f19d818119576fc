"""A tensor of every shard, put together for all of them: for losses over the whole batch.

As in synchronized batch norm all local shards become one autograd node, chained by the surroundings' token, which
exchanges once with the other workers in forward and once in backward. Every shard has the rows of all shards, so each
shard's rows have a gradient from every shard: these are added in the order of the tree over shards. Each worker adds up
its own as far as the tree allows, so what is sent does not grow with the number of shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.exchange.surroundings import Workers, current
from evenstep.nn import parcel
from evenstep.nn.treesum import TreeSum
from evenstep.plan import tree

__all__ = ["gather", "rows_of_part"]


def gather(tensor: Tensor) -> Tensor:
    """The rows of all shards, in their order, for a shard that offers its own; blocks until all shards have come.

    Args:
        tensor: ``[rows of this shard, ...]``; all but the first dimension, and the type, the same in all shards.

    Returns:
        ``[rows of all shards, ...]``. Its gradient goes back to the shards that gave the rows.

    Raises:
        ConfigError: The tensor has no rows, or its dimensions or type differ from another shard's; or this is not
            inside a step function.
        UnsupportedError: The workers of the run meet only at a server.
        MismatchError: Another shard is elsewhere.
    """
    around = current()
    if around is None:
        raise ConfigError(
            "run.gather was called outside a step function; call it inside one, whose parts it puts together"
        )
    tag = f"gather call {around.call_number(_KEY)}"
    if not isinstance(tensor, Tensor) or not tensor.ndim:
        raise ConfigError(f"run.gather got {tensor!r:.60}; expected a tensor with a row for each sample")
    if not isinstance(around, Workers) or not around.is_whole:
        raise UnsupportedError(
            "run.gather in a run whose workers meet only at a server: they cannot see each other's samples; train "
            "without a server, or with Server(..., aggregate=True)"
        )
    output: Tensor = around.meet(tag, tensor, lambda tensors: _lead(around, tag, tensors))
    return output if torch.is_grad_enabled() else output.detach()


def rows_of_part() -> range:
    """The rows that the shard in whose step function this is called gives to `gather`.

    Raises:
        ConfigError: This is not inside a step function.
    """
    found: range | None = getattr(current(), "rows", None)
    if found is None:
        raise ConfigError(
            "run.rows was read outside a step function; read it inside one: they are the rows of its part"
        )
    return found


_KEY = object()  # the "layer" under which calls of gather are counted


@dataclass(eq=False)
class _GatherCall:
    """One call by all shards.

    Attributes:
        rows: How many rows each shard gave, for all shards with samples, in order.
    """

    around: Workers
    tag: str
    rows: list[int]

    def swap(self, what: str, tensors: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
        """Those of all workers, in order."""
        if len(self.around.shards) == 1:
            return list(tensors)
        blobs = self.around.swap(f"{self.tag} {what}", parcel.pack(tensors))
        return [tensor for blob in blobs for tensor in parcel.unpack(blob, device)]

    @property
    def nodes(self) -> list[list[tuple[int, int]]]:
        """The tree nodes of each worker, which cover all shards; one without samples goes with the one before it."""
        around = self.around
        starts = [0, *(shards[0] for shards in around.shards[1:]), around.num_shards]
        return [list(tree.cover(span, around.num_shards)) for span in pairwise(starts)]


def _lead(around: Workers, tag: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Put all rows together, and make the one node of the local shards."""
    shards = [k for theirs in around.shards for k in theirs]
    call = _GatherCall(around, tag, [])
    offered = [x.detach().requires_grad_(x.requires_grad and torch.is_grad_enabled()) for x in tensors]
    found = [x for x in call.swap("forward", offered, tensors[0].device) if x is not None]
    for k, x in zip(shards, found, strict=True):
        if x.shape[1:] != found[0].shape[1:] or x.dtype != found[0].dtype:
            raise ConfigError(
                f"run.gather got {x.dtype} {tuple(x.shape)} in shard {k} but {found[0].dtype} {tuple(found[0].shape)} "
                f"in shard {shards[0]}; expected the same type, and the same dimensions but for the rows"
            )
    call.rows = [len(x) for x in found]
    whole = torch.cat([x.detach() for x in found])
    if not any(x.requires_grad for x in found):
        return [whole.clone() for _ in tensors]  # a step function may change its own in place
    token = around.token if around.token is not None else torch.zeros(0, requires_grad=True)
    around.token, *joint = _JointGather.apply(call, whole, token, *tensors)  # type: ignore[no-untyped-call]  # torch's
    return list(joint)


class _JointGather(torch.autograd.Function):
    """The rows of all shards for all local shards."""

    @staticmethod
    def forward(ctx: Any, call: _GatherCall, whole: Tensor, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return (torch.zeros(0), *(whole.clone() for _ in tensors))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        call: _GatherCall = ctx.call
        if current() is not None:
            raise UnsupportedError(
                f"backward reached '{call.tag}' inside the forward of one shard, but needs the gradients of all; "
                "call backward after the forward, on the losses of all"
            )
        total = _sum(call, gradients)
        if total is None:
            return None, None, torch.zeros(0), *(None for _ in gradients)
        shards = [k for theirs in call.around.shards for k in theirs]
        pieces = dict(zip(shards, torch.split(total, call.rows), strict=True))
        return None, None, torch.zeros(0), *(pieces[k].clone() for k in call.around.shards[call.around.me])


def _sum(call: _GatherCall, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the gradients of all shards, in tree order; None if there is none."""
    by_shard = dict(zip(call.around.shards[call.around.me], gradients, strict=True))
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    mine: list[Tensor | None] = []
    for first, end in call.nodes[call.around.me]:
        part = TreeSum(tree.leaf_program(end - first))
        for k in range(first, end):
            gradient = by_shard.get(k)
            part.push(None if gradient is None else gradient.clone())
        mine.append(part.result)
    nodes = tuple(node for theirs in call.nodes for node in theirs)
    total = TreeSum(tree.merge_program(nodes, call.around.num_shards))
    for node in call.swap("backward", mine, device):
        total.push(node)
    return total.result
