"""Conversion between torch's batch norm and the synchronized one.

A layer is converted by giving it another class, in place. So its parameters, buffers, hooks, flags, attributes, names
and places in other modules stay the very same; and as everything is checked before the first layer is touched, no model
is ever half converted.
"""

import functools
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from evenstep.core.errors import UnsupportedError
from evenstep.nn import fuse as fusion
from evenstep.nn.batchnorm import (
    LazySyncBatchNorm1d,
    LazySyncBatchNorm2d,
    LazySyncBatchNorm3d,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    check_eps_mode,
)
from evenstep.nn.data_parallel import add_replication_callbacks, remove_replication_callbacks
from evenstep.nn.functional import EpsMode
from evenstep.nn.process_group import GroupHandle
from evenstep.nn.subclasses import OfSubclass, can_span, synchronized_class

__all__ = ["convert_sync_batchnorm", "patch_batchnorm", "revert_sync_batchnorm"]

M = TypeVar("M", bound=nn.Module)

_KINDS: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.LazyBatchNorm1d: LazySyncBatchNorm1d,
    nn.LazyBatchNorm2d: LazySyncBatchNorm2d,
    nn.LazyBatchNorm3d: LazySyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}
_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    kind: plain for plain, kind in _KINDS.items() if plain is not nn.SyncBatchNorm
}
_ADDED = ("_group", "eps_mode", "qualified_name", "_origin", "activation")


class _Origin(NamedTuple):
    """What a layer was before its conversion."""

    kind: type[nn.Module]
    group: GroupHandle | None  # of torch's nn.SyncBatchNorm


def convert_sync_batchnorm(
    model: M, process_group: Any = None, eps_mode: EpsMode | None = None, *, fuse: bool = False
) -> M:
    """Make every batch norm of a model a synchronized one, in place.

    These are converted: `nn.BatchNorm1d`, `2d`, `3d` and `nn.SyncBatchNorm`, lazy ones too (they synchronize from
    their first input on); and of their subclasses those that normalize their batch in one piece, whatever else they do
    with it, such as an activation. Other subclasses are left alone, with a warning. Layers that are synchronized
    already keep what they have and take what is given here. Every synchronized layer learns its `qualified_name`. A
    `torch.nn.DataParallel` in the model keeps everything and gets the callbacks (see `add_replication_callbacks`).

    Args:
        model: The model, or a batch norm itself.
        process_group: The ranks to span when there is a process group around. None: the default group, or the one
            that an `nn.SyncBatchNorm` was given.
        eps_mode: "plus" adds eps to the variance as torch does, "clamp" raises the variance to at least eps. None:
            "plus", or what a synchronized layer has.
        fuse: Whether batch norms become one with the ReLU, or the addition and the ReLU, that follow them: in every
            `nn.Sequential`, and in every module whose own forward `torch.fx` can trace and that has no control flow or
            side effect that tracing would miss. Everything else is left alone, and so are layers with hooks.

    Returns:
        The same model.

    Raises:
        ValueError: There is no such `eps_mode`.
        UnsupportedError: A batch norm was compiled by TorchScript. Nothing has been converted.
    """
    if eps_mode is not None:
        check_eps_mode(eps_mode)
    named = list(model.named_modules())
    _refuse_scripted(named)
    classes = {id(module): kind for _, module in named if (kind := _class_for(module)) is not None}
    _warn_of_others([(name, module) for name, module in named if id(module) not in classes])
    for name, module in named:
        if isinstance(module, nn.DataParallel):
            add_replication_callbacks(module)
        if id(module) in classes:
            _convert(module, classes[id(module)])
        if isinstance(module, SyncBatchNorm):
            _configure(module, name, process_group, eps_mode)
    if fuse:
        fusion.fuse(model)
    return model


def _configure(module: SyncBatchNorm, name: str, process_group: Any, eps_mode: EpsMode | None) -> None:
    module.qualified_name = name
    if process_group is not None:
        module.process_group = process_group
    if eps_mode is not None:
        module.eps_mode = eps_mode


def _refuse_scripted(named: Sequence[tuple[str, nn.Module]]) -> None:
    for name, module in named:
        if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", ""):
            raise UnsupportedError(
                f"layer '{name}' was compiled by TorchScript and cannot be converted; "
                "call convert_sync_batchnorm before torch.jit.script"
            )


def _class_for(module: nn.Module) -> type[SyncBatchNorm] | None:
    """The class that a layer is to have; None: it stays what it is."""
    kind = type(module)
    if kind in _KINDS:
        return _KINDS[kind]
    is_own = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm | torch.jit.ScriptModule)
    return synchronized_class(kind) if is_own and can_span(module) else None  # type: ignore[arg-type]  # modules do hash


def _warn_of_others(named: Sequence[tuple[str, nn.Module]]) -> None:
    """Say which layers are batch norms of some kind and stay as they are."""
    found: dict[str, list[str]] = {}
    for name, module in named:
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            found.setdefault(type(module).__name__, []).append(name)
    for kind, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"layer '{names[0]}'{more} of class {kind} is a batch norm of its own kind: its statistics stay those of "
            "each shard, because it cannot be known what it would mean to span them all; use one of torch's, or "
            "pass prepare(..., sync_batchnorm=False) if that is intended",
            stacklevel=4,
        )


def _convert(module: nn.Module, to: type[nn.Module]) -> None:
    kind = type(module)
    group = GroupHandle(module.__dict__.pop("process_group")) if "process_group" in module.__dict__ else None
    module.__class__ = to
    module._origin = _Origin(kind, group)  # type: ignore[assignment]  # an attribute of ours, no submodule
    module._group = group or GroupHandle()  # type: ignore[assignment]  # likewise
    module.eps_mode = "plus"  # type: ignore[assignment]  # likewise


def revert_sync_batchnorm(model: M) -> M:
    """Undo `convert_sync_batchnorm`, in place: every layer has its old class again, and nothing that was added.

    Fused calls are separate again.

    Layers that were built as `SyncBatchNorm1d`, `2d` or `3d` become `nn.BatchNorm1d`, `2d` or `3d`.

    Returns:
        The same model.

    Raises:
        UnsupportedError: A layer was built as `SyncBatchNorm`, for which torch has no plain class, or with an
            activation, which torch's classes do not have. Nothing has been reverted.
    """
    for name, module in model.named_modules():
        if type(module) is SyncBatchNorm and "_origin" not in module.__dict__:
            raise UnsupportedError(
                f"layer '{name}' was built as SyncBatchNorm, which torch has no plain class for; "
                "build it as SyncBatchNorm1d, 2d or 3d"
            )
        if isinstance(module, SyncBatchNorm) and module.activation is not None:
            raise UnsupportedError(
                f"layer '{name}' has activation={module.activation!r}, which no batch norm of torch's has; set its "
                "activation to None and put an nn.ReLU() after it"
            )
    fusion.unfuse(model)
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            remove_replication_callbacks(module)
        if isinstance(module, OfSubclass) or type(module) in _KINDS.values():
            _revert(module)
    return model


def _revert(module: nn.Module) -> None:
    origin = module.__dict__.get("_origin") or _Origin(_PLAIN[type(module)], None)
    kind = origin.kind
    if issubclass(kind, LazyModuleMixin) and not isinstance(module, LazyModuleMixin):  # it has had its first input
        kind = kind.__dict__["cls_to_become"]  # every lazy batch norm has one
    for name in _ADDED:
        module.__dict__.pop(name, None)
    module.__class__ = kind
    if origin.group is not None:
        module.process_group = origin.group.group


@contextmanager
def patch_batchnorm(process_group: Any = None, eps_mode: EpsMode = "plus") -> Iterator[None]:
    """Every batch norm that is built inside the block is synchronized, by whatever name its class was imported.

    These are torch's own classes; subclasses of them are converted by `convert_sync_batchnorm` only. Undone at the end
    of the block, even after an error. It affects all threads of the process.

    Args:
        process_group: As for `convert_sync_batchnorm`.
        eps_mode: As for `convert_sync_batchnorm`.

    Raises:
        ValueError: There is no such `eps_mode`.
    """
    check_eps_mode(eps_mode)

    def watch(kind: type[nn.Module]) -> None:
        before = kind.__dict__.get("__init__")
        build = inspect.unwrap(kind.__init__)  # not an outer block's: the inner one decides

        @functools.wraps(build)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            if type(self) is kind:
                convert_sync_batchnorm(self, process_group, eps_mode)

        def undo() -> None:
            if before is None:
                del kind.__init__
            else:
                kind.__init__ = before  # type: ignore[method-assign]  # that is what patching is

        kind.__init__ = init  # type: ignore[method-assign]  # that is what patching is
        stack.callback(undo)

    with ExitStack() as stack:
        for kind in _KINDS:
            watch(kind)
        yield
