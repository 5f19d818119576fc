"""From a torch module to a `Network`: by fx if that can trace it, or by torch.export, or as its tree of modules.

fx needs no input and keeps modules whole, which is what a person wants to see. torch.export follows more models, but
needs an example input. Neither changes the model: everything runs on a copy.
"""

import copy
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.picture.network import Network, Node, partition
from evenstep.picture.parts import InParts, expand
from evenstep.picture.tidy import defaults, left_out

__all__ = ["trace"]

Found = tuple[list[Node], list[tuple[str, str]]]
_WHOLE = (InParts, nn.MultiheadAttention)  # have children, but are shown as one thing


def trace(model: nn.Module, num_shards: int, num_workers: int, examples: Sequence[Tensor] = ()) -> Network:
    """Trace a model.

    Args:
        model: The model, on any device.
        num_shards: K.
        num_workers: How many workers share it.
        examples: Inputs, if shapes are wanted too.

    Raises:
        ConfigError: There are more workers than shards, or the model fails on the examples.
        UnsupportedError: A parameter has no shape yet.
    """
    lazy = [name for name, parameter in _named(model) if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise UnsupportedError(f"{lazy[0]} has no shape yet; call the lazy model once before it is drawn")
    parameters = [(n, tuple(p.shape), p.numel() * p.element_size(), p.requires_grad) for n, p in _named(model)]
    shared = partition(parameters, num_shards, num_workers)
    if examples:
        _try_out(model, examples)
    ways: list[tuple[str, Callable[[], Found]]] = [("fx", lambda: _by_fx(model, examples, num_workers))]
    if examples:
        ways.append(("export", lambda: _by_export(model, examples, num_workers)))
    notes = []
    for source, way in ways:
        try:
            with _quiet():
                nodes, edges = way()
        except Exception as error:  # noqa: BLE001  # the border to code of the user, which is run with stand-ins
            notes.append(f"{source} could not trace it ({_first_line(error)})")
        else:
            return Network(type(model).__name__, tuple(nodes), tuple(edges), shared, source, "; ".join(notes))
    nodes, edges = _by_modules(model)
    hint = "" if examples else "; with --input, torch.export is tried as well"
    notes.append(f"this is the tree of modules, not the flow of data{hint}")
    return Network(type(model).__name__, tuple(nodes), tuple(edges), shared, "modules", "; ".join(notes))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what tracers print and log when they fail: the note says it in one line."""
    level = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _try_out(model: nn.Module, examples: Sequence[Tensor]) -> None:
    """Check that the examples fit, before tracers fail on them with a less clear message."""
    try:
        with torch.no_grad():
            copy.deepcopy(model).cpu().eval()(*examples)
    except Exception as error:
        shapes = ", ".join(f"{tuple(example.shape)} {example.dtype}" for example in examples)
        raise ConfigError(f"the model fails on inputs of {shapes}: {_first_line(error)}") from error


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__


def _about(path: str, module: nn.Module, names: dict[int, str]) -> dict[str, Any]:
    """The fields of a node for a module that is not looked into."""
    return {
        "label": path,
        "kind": type(module).__name__,
        "detail": module.extra_repr(),
        "parameters": tuple(dict.fromkeys(names[id(p)] for p in module.parameters())),
        "meets": any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()),
    }


# ---- fx ----


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers of torch and of ours stay whole."""
        return type(m).__module__.startswith("evenstep.") or super().is_leaf_module(m, module_qualified_name)


def _by_fx(model: nn.Module, examples: Sequence[Tensor], num_workers: int) -> Found:
    model = copy.deepcopy(model).cpu().eval()
    not_given = defaults(model.forward, len(examples))
    graph = _Tracer().trace(model, not_given)
    if examples:
        with torch.no_grad():
            ShapeProp(fx.GraphModule(model, graph)).propagate(*examples)
    names = {id(parameter): name for name, parameter in _named(model)}
    nodes: list[Node] = []
    edges: dict[tuple[str, str], None] = {}
    in_parts: dict[str, InParts] = {}
    hidden = left_out(graph, not_given)
    for each in graph.nodes:
        if each.op == "get_attr" or each in hidden:
            continue  # a parameter or constant is named where it is used
        about: dict[str, Any]
        if each.op == "call_module":
            module = model.get_submodule(str(each.target))
            about = _about(str(each.target), module, names)
            if isinstance(module, InParts):
                in_parts[each.name] = module
        else:
            used = [_attribute(model, str(n.target)) for n in each.all_input_nodes if n.op == "get_attr"]
            about = {**_plain(each), "parameters": tuple(names[id(value)] for value in used if id(value) in names)}
        nodes.append(Node(each.name, shape=_shape(each.meta.get("tensor_meta")), **about))
        edges.update(
            {(n.name, each.name): None for n in each.all_input_nodes if n.op != "get_attr" and n not in hidden}
        )
    return expand(nodes, list(edges), in_parts, names, num_workers)


def _plain(node: fx.Node) -> dict[str, Any]:
    """The fields of a node that is not a module."""
    if node.op in ("placeholder", "output"):
        kind = "input" if node.op == "placeholder" else "output"
        return {"label": node.name, "kind": kind}
    target = node.target
    return {
        "label": target if isinstance(target, str) else getattr(target, "__name__", str(target)).partition(".")[0],
        "kind": "function",
    }


def _attribute(model: nn.Module, path: str) -> Any:
    found: Any = model
    for step in path.split("."):
        found = getattr(found, step)
    return found


def _shape(found: Any) -> tuple[int, ...] | None:
    shape = getattr(found, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


# ---- torch.export ----


def _by_export(model: nn.Module, examples: Sequence[Tensor], num_workers: int) -> Found:
    """Operators, those of one call of a module without children, or that is not looked into, taken together."""
    model = copy.deepcopy(model).cpu().eval()
    program = torch.export.export(model, tuple(examples))
    names = {id(parameter): name for name, parameter in _named(model)}
    held = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    canonical = {n: names[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    group: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}
    edges: dict[tuple[str, str], None] = {}
    in_parts: dict[str, InParts] = {}
    for each in program.graph.nodes:
        if each.op == "get_attr" or each.name in held:
            continue
        call, path = _innermost(each, model)
        module = model.get_submodule(path) if each.op == "call_function" and path else None
        whole = module is not None and (isinstance(module, _WHOLE) or not list(module.children()))
        name = group[each.name] = call if whole else each.name
        if isinstance(module, InParts):
            in_parts[name] = module
        if name not in found:
            found[name] = (
                _about(path, module, names) if whole and module is not None else {**_plain(each), "parameters": ()}
            )
        inputs = [n for n in each.all_input_nodes if n.op != "get_attr"]
        used = [canonical[held[n.name]] for n in inputs if held.get(n.name) in canonical]
        found[name]["parameters"] = tuple(dict.fromkeys((*found[name]["parameters"], *used)))
        given = _shape(each.meta.get("val")) if each.users else None  # an output that nothing uses is not the result
        found[name]["shape"] = given or found[name].get("shape")
        before = [group[n.name] for n in inputs if n.name in group]
        edges.update({(source, name): None for source in before if source != name})
    nodes = [Node(name, **about) for name, about in found.items()]
    return expand(nodes, list(edges), in_parts, names, num_workers)


def _innermost(node: fx.Node, model: nn.Module) -> tuple[str, str]:
    """The call and the module that a node belongs to; the path is empty for the model itself.

    A layer in parts and an attention of torch are not looked into.
    """
    found = ("", "")
    for call, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
        found = (call, str(path).removeprefix("L['self']").lstrip(".").split("@")[0])
        if isinstance(model.get_submodule(found[1]), _WHOLE):
            break
    return found


# ---- modules ----


def _by_modules(model: nn.Module) -> Found:
    names = {id(parameter): name for name, parameter in _named(model)}
    nodes, edges = [], []
    for path, module in model.named_modules():
        about = _about(path or type(model).__name__, module, names)
        if list(module.children()):
            own = tuple(names[id(p)] for p in module.parameters(recurse=False))
            about |= {"parameters": own, "meets": False, "detail": ""}
        nodes.append(Node(path or "(model)", **about))
        if path:
            edges.append((path.rpartition(".")[0] or "(model)", path))
    return nodes, edges
