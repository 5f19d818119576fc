"""Fusing calls of batch norm with the ReLU, or the addition and the ReLU, that follow them.

A module is fused by giving it another class, in place, whose forward computes the same with fewer passes over the data.
Everything else about it stays: children, parameters, hooks, names, `isinstance`. The layers themselves do not change
either: the activation and the residual are arguments of the fused call, so calling a layer directly gives what it
always gave.

Two kinds of modules are considered. The forward of an `nn.Sequential` is known. Any other module's own forward is
traced by `torch.fx`, with its children as black boxes, and only if its source shows that tracing sees everything: no
loop, no context manager, no side effect, no default argument, and the same operations in training and in eval mode.
Anything that is not understood is left alone.

Before it runs, a fused forward checks that the layers are still the same, without hooks, and that the attributes that
steered the tracing have kept their values; if not, the module's own forward runs.
"""

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin

from evenstep.nn.batchnorm import SyncBatchNorm

__all__ = ["fuse", "unfuse"]

_RELU_FUNCTIONS = {F.relu, F.relu_, torch.relu, torch.relu_}
_ADD_FUNCTIONS = {operator.add, torch.add}
_STEERS = (bool, int, float, str, bytes, type(None))  # attributes of these types may decide which path a forward takes
_CONSTANT = "_tensor_constant"  # torch.fx's name for a tensor that it found while tracing


def fuse(model: nn.Module) -> None:
    """Fuse what can be fused in the model and all modules in it."""
    for module in list(model.modules()):
        if not isinstance(module, _Fused) and (plan := _plan_of(module)) is not None:
            try:
                module.__class__ = _fused_class(type(module))  # type: ignore[arg-type]  # torch's modules do hash
            except TypeError:  # a class with a memory layout of its own
                continue
            module.__dict__["_fusion"] = plan


def unfuse(model: nn.Module) -> None:
    """Give every fused module its own class again."""
    for module in model.modules():
        if isinstance(module, _Fused):
            module.__dict__.pop("_fusion", None)
            module.__class__ = type(module)._plain  # type: ignore[assignment]  # what it was


class _Fused(nn.Module):
    """Stands in front of a module's own class."""

    _plain: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan: _Plan | None = self.__dict__.get("_fusion")
        if plan is None or not plan.holds(self):
            return super().forward(*args, **kwargs)
        return plan.run(self, *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Plan again for a copy; not in its forward, because tracing disturbs modules that other threads run."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self.__dict__["_fusion"] = _plan_of(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name != "_fusion"}
        return _rebuild, (type(self)._plain,), state


@cache
def _fused_class(kind: type[nn.Module]) -> type[_Fused]:
    names = {"_plain": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Fused, kind), {**names, "_unfused_forward": kind.forward})


def _rebuild(kind: type[nn.Module]) -> nn.Module:
    made = _fused_class(kind)  # type: ignore[arg-type]  # torch's modules do hash
    return made.__new__(made)


def _plain_class(module: nn.Module) -> type[nn.Module]:
    return type(module)._plain if isinstance(module, _Fused) else type(module)


def _is_bare(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's forward, and nothing else."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]  # torch's
    )


def _is_norm(module: Any) -> bool:
    return (
        isinstance(module, SyncBatchNorm)
        and not isinstance(module, LazyModuleMixin)
        and type(module).forward is SyncBatchNorm.forward
        and module.activation is None
        and _is_bare(module)
    )


def _is_relu(module: Any) -> bool:
    return type(module) is nn.ReLU and _is_bare(module)


@dataclass(frozen=True)
class _Plan:
    """A fused forward and what must hold for it."""

    run: Callable[..., Any]
    norms: Sequence[str] = ()
    relus: Sequence[str] = ()
    steers: Any = None

    def holds(self, module: nn.Module) -> bool:
        if self.steers is None:  # a sequential checks while it runs
            return True
        return (
            _steers(module) == self.steers
            and all(_is_norm(_child(module, name)) for name in self.norms)
            and all(_is_relu(_child(module, name)) for name in self.relus)
        )


def _plan_of(module: nn.Module) -> _Plan | None:
    """How to fuse the module's own forward; None if nothing can be."""
    kind = _plain_class(module)
    if isinstance(module, torch.jit.ScriptModule | fx.GraphModule) or "forward" in module.__dict__:
        return None
    if (
        kind.__call__ is not nn.Module.__call__
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or kind.__setstate__ is not nn.Module.__setstate__
    ):
        return None
    if kind.forward is nn.Sequential.forward:
        children = list(module.children())
        fits = any(_is_norm(a) and _is_relu(b) for a, b in pairwise(children))
        return _Plan(_run_sequential) if fits else None
    if not any(_is_norm(child) for child in module.children()):
        return None
    return _trace(module)


def _run_sequential(self: nn.Module, input: Any) -> Any:
    children = list(self._modules.values())
    number = 0
    while number < len(children):
        child = children[number]
        follower = children[number + 1] if number + 1 < len(children) else None
        if _is_norm(child) and _is_relu(follower):
            input = child(input, activation="relu")  # type: ignore[misc]  # no module is None in a sequential
            number += 2
        else:
            input = child(input)  # type: ignore[misc]  # likewise
            number += 1
    return input


# ---- modules with a forward of their own ----


def _child(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _steers(module: nn.Module) -> Any:
    """What may decide which path a forward takes, apart from the mode: plain attributes, and which children exist."""
    own = {k: v for k, v in module.__dict__.items() if isinstance(v, _STEERS) and k not in ("training", "_fusion")}
    absent = [{k for k, v in table.items() if v is None} for table in (module._parameters, module._buffers)]
    return (
        own,
        {name: None if child is None else _plain_class(child) for name, child in module._modules.items()},
        absent,
    )


def _trace(module: nn.Module) -> _Plan | None:
    if not _is_transparent(_plain_class(module).forward, module, set()):
        return None
    graphs = [_graph(module, training) for training in (True, False)]
    if graphs[0] is None or graphs[1] is None or str(graphs[0]) != str(graphs[1]):
        return None
    graph = graphs[0]
    norms, relus = _rewrite(graph, module)
    if not norms:
        return None
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # as torch.fx does with its own graphs
    return _Plan(names["forward"], norms, relus, _steers(module))


class _ForwardTracer(fx.Tracer):
    """Sees the calls of a module's children, and not into them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _graph(module: nn.Module, training: bool) -> fx.Graph | None:
    """What the module's own forward does in this mode; None if it cannot be traced or uses a tensor of its own."""
    modes = [(m, m.training) for m in module.modules()]
    before = set(module.__dict__)
    tracer = _ForwardTracer()
    if isinstance(module, _Fused):
        tracer.traced_func_name = "_unfused_forward"
    try:
        for m, _ in modes:
            m.training = training
        graph = tracer.trace(module)
    except Exception:  # noqa: BLE001  # whatever a forward does with a proxy: it is left alone then
        return None
    finally:
        for m, mode in modes:
            m.training = mode
        for name in set(module.__dict__) - before:
            del module.__dict__[name]
        for name in [name for name in module._buffers if name.startswith(_CONSTANT)]:
            del module._buffers[name]
    return None if any(_CONSTANT in str(node.target) for node in graph.nodes) else graph


def _is_transparent(function: Any, module: nn.Module, seen: set[Any]) -> bool:
    """Whether tracing sees everything that a forward, and the methods it calls, would do for any input."""
    if function in seen:
        return True
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return False
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or not tree.args.args:
        return False
    rest = tree.args
    if rest.defaults or rest.kw_defaults or rest.kwonlyargs or rest.vararg or rest.kwarg or rest.args[0].arg != "self":
        return False
    names = {**inspect.getclosurevars(function).globals, **inspect.getclosurevars(function).nonlocals}
    return (
        all(_is_plain_statement(node) for node in tree.body)
        and _changes_only_norms(tree, module)
        and all(_is_plain_expression(node, names, module, seen) for line in tree.body for node in ast.walk(line))
    )


def _changes_only_norms(tree: ast.FunctionDef, module: nn.Module) -> bool:
    """Whether every ``a += b`` has just got its a from a norm.

    Tracing takes it for ``a = a + b``, which differs if the tensor is also used elsewhere.
    """
    source: dict[str, ast.expr | None] = {}
    for line in tree.body:
        if isinstance(line, ast.AugAssign):
            value = source.get(line.target.id) if isinstance(line.target, ast.Name) else None
            path = _path(value.func) if isinstance(value, ast.Call) else []
            if path[:1] != ["self"] or not _is_norm(_child(module, ".".join(path[1:]))):
                return False
        for node in ast.walk(line):
            if isinstance(node, ast.AugAssign) and node is not line:
                return False
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                source[node.id] = None
        if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            source[line.targets[0].id] = line.value
    return True


def _is_plain_statement(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return all(_is_plain_statement(inner) for inner in (*node.body, *node.orelse))
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.Assign):
        return all(_is_local(target) for target in node.targets)
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return isinstance(node.target, ast.Name)
    return isinstance(node, ast.Return | ast.Pass)


def _is_local(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple):
        return all(_is_local(inner) for inner in target.elts)
    return isinstance(target, ast.Name)


_OPAQUE = (ast.Lambda, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.Yield,
           ast.YieldFrom)  # fmt: skip


def _is_plain_expression(node: ast.AST, names: dict[str, Any], module: nn.Module, seen: set[Any]) -> bool:
    if isinstance(node, _OPAQUE):
        return False
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return isinstance(node.left, ast.Attribute)  # `x is None` is decided by tracing, for any x
    if isinstance(node, ast.Call):
        return _is_plain_call(node, names, module, seen)
    return True


def _is_plain_call(node: ast.Call, names: dict[str, Any], module: nn.Module, seen: set[Any]) -> bool:
    path = _path(node.func)
    if not path:
        return isinstance(node.func, ast.Attribute)  # a method of a value
    if path[0] == "self":
        target: Any = module
        for name in path[1:]:
            target = getattr(target, name, None)
        if isinstance(target, nn.Module):
            return True
        method = getattr(_plain_class(module), path[1], None) if len(path) == 2 else None
        return inspect.isfunction(method) and _is_transparent(method, module, seen)
    if path[0] not in names:
        return len(path) > 1  # a method of a local value, or a builtin function
    target = names[path[0]]
    for name in path[1:]:
        target = getattr(target, name, None)
    home = getattr(target, "__module__", None) or ""
    from_torch = home.partition(".")[0] == "torch" or target in _RELU_FUNCTIONS or path[0] == "torch"
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return from_torch and not path[-1].startswith("is_") and any(not isinstance(g, ast.Constant) for g in given)


def _path(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; empty if it is not such a chain."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _path(node.value)):
        return [*before, node.attr]
    return []


def _rewrite(graph: fx.Graph, module: nn.Module) -> tuple[list[str], list[str]]:
    """Fuse the graph's calls; return the names of the norms and of the ReLU modules that took part."""
    norms: list[str] = []
    relus: list[str] = []
    for norm in list(graph.nodes):
        if norm.op != "call_module" or not _is_norm(_child(module, norm.target)) or norm.kwargs or len(norm.args) != 1:
            continue
        found = _following(norm, module)
        if found is None:
            continue
        add, residual, relu = found
        with graph.inserting_before(relu):
            extra = {} if residual is None else {"residual": residual}
            fused = graph.call_module(norm.target, norm.args, {**extra, "activation": "relu"})
        relu.replace_all_uses_with(fused)
        for node in (relu, add, norm):
            if node is not None:
                graph.erase_node(node)
        norms.append(str(norm.target))
        if relu.op == "call_module":
            relus.append(str(relu.target))
    return norms, relus


def _following(norm: fx.Node, module: nn.Module) -> tuple[fx.Node | None, fx.Node | None, fx.Node] | None:
    """The addition, what is added, and the ReLU after a norm whose output nothing else uses; None otherwise."""
    user = _only_user(norm)
    if user is None:
        return None
    if _relu_of(user, norm, module):
        return (None, None, user) if _may_move(norm, user, None, module) else None
    residual = _added(user, norm)
    relu = _only_user(user)
    if residual is None or relu is None or not _relu_of(relu, user, module):
        return None
    return (user, residual, relu) if _may_move(norm, relu, user, module) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _relu_of(node: fx.Node, value: fx.Node, module: nn.Module) -> bool:
    if not node.args or node.args[0] is not value:
        return False
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs and _is_relu(_child(module, str(node.target)))
    if node.op == "call_method":
        return len(node.args) == 1 and not node.kwargs and node.target in ("relu", "relu_")
    plain = len(node.args) == 1 or (len(node.args) == 2 and isinstance(node.args[1], bool))
    return plain and node.op == "call_function" and node.target in _RELU_FUNCTIONS and set(node.kwargs) <= {"inplace"}


def _added(add: fx.Node, norm: fx.Node) -> fx.Node | None:
    """What is added to the norm's output, if that is all that happens."""
    if add.kwargs or len(add.args) != 2:
        return None
    left, right = add.args
    in_place = (add.op == "call_function" and add.target is operator.iadd) or (
        add.op == "call_method" and add.target == "add_"
    )
    plain = (add.op == "call_function" and add.target in _ADD_FUNCTIONS) or (
        add.op == "call_method" and add.target == "add"
    )
    other = right if left is norm else left
    if not isinstance(other, fx.Node) or other is norm:
        return None
    return other if plain or (in_place and left is norm) else None


def _may_move(norm: fx.Node, relu: fx.Node, add: fx.Node | None, module: nn.Module) -> bool:
    """Whether the norm may run as late as the ReLU: nothing in between may change its input."""
    between = []
    node = norm.next
    while node is not relu:
        if node is not add:
            between.append(node)
        node = node.next
    if not between:
        return True
    source = norm.args[0]
    if not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
        return False
    return not any(_changes_its_input(node, module) for node in between)


def _changes_its_input(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_module":
        child = _child(module, str(node.target))
        return bool(getattr(child, "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place_operator = node.op == "call_function" and getattr(operator, name, None) is node.target and name[0] == "i"
    return name.endswith("_") or in_place_operator or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
