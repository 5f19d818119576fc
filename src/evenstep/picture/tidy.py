"""What a trace holds besides the flow of data: sizes, arguments that are not given, results that are not used.

A picture leaves them out. Anything that may have an effect of its own (modules, operations in place) stays.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["defaults", "left_out"]

_FACTS = ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")
_METHODS = ("size", "dim", "numel", "stride", "get_device", "is_contiguous", "is_floating_point")


def defaults(forward: Callable[..., Any], num_given: int) -> dict[str, Any]:
    """The arguments of a forward that have plain defaults and are not given: a trace uses the defaults."""
    parameters = list(inspect.signature(forward).parameters.values())
    return {
        parameter.name: parameter.default
        for parameter in parameters[num_given:]
        if parameter.default is None or type(parameter.default) in (bool, int, float, str)
    }


def left_out(graph: fx.Graph, not_given: dict[str, Any]) -> set[fx.Node]:
    """The nodes of a graph that are not part of the flow of data."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_fact(node) or (_is_arithmetic(node) and node.all_input_nodes and found.issuperset(node.all_input_nodes)):
            found.add(node)
        elif getattr(node.target, "__name__", "") in ("_assert", "_assert_is_none"):
            found |= {node, *(n for n in node.all_input_nodes if n.op == "call_function")}  # of an argument not given
    for node in reversed(graph.nodes):
        plain = node.op in ("call_function", "call_method") and not _in_place(node)
        asked = node.op == "placeholder" and node.name.rpartition("_")[0] in not_given
        if (plain or asked) and found.issuperset(node.users):
            found.add(node)
    return found


def _is_fact(node: fx.Node) -> bool:
    """Whether a node asks a tensor about itself."""
    if node.op == "call_method":
        return node.target in _METHODS
    return node.target is getattr and len(node.args) > 1 and node.args[1] in _FACTS


def _is_arithmetic(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", None) in ("_operator", "builtins", "math")


def _in_place(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        node.target is operator.setitem
        or node.target is torch._assert
        or (name.endswith("_") and not name.endswith("__"))
    )
