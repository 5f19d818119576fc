"""Subclasses of batch norm, synchronized: the layer keeps its own forward, and only the batch norm in it is ours.

timm's `BatchNormAct2d` is one: a batch norm, then dropout and an activation. What a custom forward does cannot be told
from its class, so it is tried on a copy: if it normalizes its whole batch in one call of
`torch.nn.functional.batch_norm`, that call can be made to span all participants, whatever comes before or after it. If
it does anything else (its own statistics, a batch in pieces) there is no telling what spanning would mean.
"""

import copy
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from evenstep.core.errors import UnsupportedError
from evenstep.engine.randomness import preserved
from evenstep.nn import gpu
from evenstep.nn.batchnorm import SyncBatchNorm
from evenstep.nn.passes import Part

__all__ = ["OfSubclass", "can_span", "synchronized_class"]

_BATCH = 4
_SHAPES: dict[int, list[tuple[int, ...]]] = {1: [(), (3,)], 2: [(3, 3)], 3: [(2, 2, 2)]}  # what comes after [N, C]
_OURS = ("_group", "eps_mode", "qualified_name", "_origin", "activation", "process_group", "spans_shards", "normalize")


class OfSubclass(SyncBatchNorm):
    """A synchronized layer with the name, the methods and the pickle of the subclass it was."""

    plain: type[_BatchNorm]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (type(self).plain,), self.__dict__


class _WithItsForward(OfSubclass):
    """An `OfSubclass` with its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self._train if self.training else super(SyncBatchNorm, self).forward)(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as in `SyncBatchNorm`
    def _train(self, *args: Any, **kwargs: Any) -> Any:
        with _Replaced(self, len(args[0]) if args and isinstance(args[0], Tensor) else None):
            return super(SyncBatchNorm, self).forward(*args, **kwargs)


class _NormWatch(TorchFunctionMode):
    """Sees every batch norm that uses the running statistics of a layer, or its weight if it has none."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and self._is_ours(**(call := _arguments(*args, **kwargs))):
            return self.meet(**call)
        return func(*args, **kwargs)

    def _is_ours(self, running_mean: Tensor | None, weight: Tensor | None, training: bool, **_: Any) -> bool:
        layer = self.layer
        mine = running_mean is layer.running_mean if running_mean is not None else weight is layer.weight
        return training and mine

    def meet(self, **call: Any) -> Any:
        """Do the batch norm."""
        raise NotImplementedError


class _Replaced(_NormWatch):
    """Makes the batch norm of a layer span all participants."""

    def __init__(self, layer: OfSubclass, num_rows: int | None) -> None:
        super().__init__(layer)
        self._num_rows = num_rows

    def meet(self, **call: Any) -> Any:
        x, layer = call["input"], self.layer
        if self._num_rows not in (None, len(x)):
            raise UnsupportedError(
                f"layer '{layer.qualified_name}' ({layer.plain.__name__}) normalizes {len(x)} of its {self._num_rows} "
                "rows by themselves, so their statistics cannot span all shards; prepare(..., sync_batchnorm=False) "
                "leaves every layer per shard"
            )
        running = gpu.Running(call["running_mean"], call["running_var"], None, call["momentum"])
        part = Part(x, call["weight"], call["bias"], None, None)
        return layer.normalize(part, running, lambda: F.batch_norm(**call))


class _NormRecorder(_NormWatch):
    """Records the batch norms of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.calls: list[tuple[int, float]] = []

    def meet(self, **call: Any) -> Any:
        self.calls.append((len(call["input"]), call["eps"]))
        return F.batch_norm(**call)


def _arguments(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Any]:
    return dict(locals())


def can_span(module: nn.Module) -> bool:
    """Whether a layer, of a subclass of torch's batch norms, can be made to span all participants."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin) or any(name in module.__dict__ or hasattr(kind, name) for name in _OURS):
        return False
    return kind.forward is _BatchNorm.forward or _normalizes_once(module)


def _normalizes_once(module: nn.Module) -> bool:
    """Whether a trial on a copy, with separate random generators, makes one batch norm of the whole batch."""
    assert isinstance(module, _BatchNorm), "called for batch norms only"
    like = module.running_mean if module.running_mean is not None else module.weight
    dims = [
        n for n, kind in ((1, nn.BatchNorm1d), (2, nn.BatchNorm2d), (3, nn.BatchNorm3d)) if isinstance(module, kind)
    ]
    for shape in chain.from_iterable(_SHAPES[n] for n in dims or _SHAPES):
        twin = copy.deepcopy(module).train()
        with preserved(), torch.no_grad(), _NormRecorder(twin) as noted:
            x = torch.randn(_BATCH, module.num_features, *shape)
            try:
                twin.forward(x if like is None else x.to(like))
            except Exception:  # noqa: BLE001  # a user's code: whatever it raises, it does not take this
                continue
        return bool(noted.calls == [(_BATCH, module.eps)])
    return False


@cache
def synchronized_class(kind: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """The synchronized class for a subclass of batch norm."""
    base = OfSubclass if kind.forward is _BatchNorm.forward else _WithItsForward
    names = {"plain": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(f"Sync{kind.__name__}", (base, kind), {**names, "_check_input_dim": kind._check_input_dim})


def _rebuild(kind: type[_BatchNorm]) -> nn.Module:
    made = synchronized_class(kind)  # type: ignore[arg-type]  # torch's modules do hash
    return made.__new__(made)
