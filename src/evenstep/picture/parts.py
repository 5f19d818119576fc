"""Layers in parts, as a picture shows them: what hands the input to the parts, the parts, and what joins them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from evenstep.picture.network import Node
from evenstep.plan.placement import cut

__all__ = ["InParts", "expand"]

Span = tuple[int, int]


class _Cut(Protocol):
    takes: tuple[Span, ...] | None
    output_dim: int
    gives: tuple[Span, ...] | None


@runtime_checkable
class InParts(Protocol):
    """A layer that is partitioned by features: see `evenstep.nn.Partitioned`."""

    kind: str
    cut: _Cut
    parts: nn.ModuleList
    bias: nn.Parameter | None


def expand(
    nodes: Sequence[Node],
    edges: Sequence[tuple[str, str]],
    layers: Mapping[str, InParts],
    names: Mapping[int, str],
    num_workers: int,
) -> tuple[list[Node], list[tuple[str, str]]]:
    """Replace nodes of layers in parts by what they consist of; all other nodes and edges stay.

    Args:
        nodes: The nodes of the network.
        edges: The edges of the network.
        layers: The layers in parts, by the id of the node that calls them.
        names: The name of every parameter, by its id.
        num_workers: The number of workers that share out the parts.
    """
    found: list[Node] = []
    ways: list[tuple[str, str]] = [(a, _first(b, layers)) for a, b in edges]
    for node in nodes:
        layer = layers.get(node.id)
        if layer is None:
            found.append(node)
            continue
        many = len(layer.parts)
        workers = [w for w, (first, end) in enumerate(cut(many, num_workers)) for _ in range(first, end)]
        hand = "slice" if layer.cut.takes is not None else "copy"
        join = "concatenate" if layer.cut.gives is not None else "add up"
        detail = f"{layer.kind} in {many} parts by features"
        found.append(Node(_first(node.id, layers), hand, "connector", f"{hand} the input of {detail}", meets=True))
        for p, (part, worker) in enumerate(zip(layer.parts, workers, strict=True)):
            about = _about(part, names)
            found.append(
                Node(f"{node.id}.{p}", f"{node.label}.parts.{p}", shape=_shape(node, layer, p), worker=worker, **about)
            )
            ways += [(_first(node.id, layers), f"{node.id}.{p}"), (f"{node.id}.{p}", node.id)]
        bias = () if layer.bias is None else (names[id(layer.bias)],)
        found.append(Node(node.id, join, "connector", f"{join} the outputs of {detail}", node.shape, bias, meets=True))
    return found, ways


def _first(node: str, layers: Mapping[str, InParts]) -> str:
    """Where the input of a node goes."""
    return f"{node}.input" if node in layers else node


def _about(part: nn.Module, names: Mapping[int, str]) -> dict[str, Any]:
    kinds = [type(child).__name__ for child in part.children()] or [type(part).__name__]
    return {
        "kind": ", ".join(kinds),
        "detail": part.extra_repr(),
        "parameters": tuple(dict.fromkeys(names[id(p)] for p in part.parameters())),
    }


def _shape(node: Node, layer: InParts, part: int) -> tuple[int, ...] | None:
    if node.shape is None or layer.cut.gives is None:
        return node.shape
    first, end = layer.cut.gives[part]
    shape = list(node.shape)
    shape[layer.cut.output_dim] = end - first
    return tuple(shape)
