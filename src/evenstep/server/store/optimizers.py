"""What servers do with optimizers: step with little overhead, cut one for slices of the parameters, read its state."""

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as internals

from evenstep.core.errors import UnsupportedError
from evenstep.server.wire.slices import Stretch

__all__ = ["MakeOptimizer", "Stepper", "can_split", "is_torchs", "sliced", "state_of"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

_ELEMENTWISE = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    }
)  # fmt: skip


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether it is one of `torch.optim`, and not derived from one."""
    return type(optimizer).__module__.startswith("torch.optim.")


class Stepper:
    """Steps an optimizer over CPU parameters.

    Args:
        optimizer: Any optimizer. For one of torch's that leaves `foreach` open it is turned off, as torch itself
            would decide for the CPU at every step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        known = is_torchs(optimizer)
        self._plain = getattr(type(optimizer).step, "__wrapped__", None) if known else None
        for group in optimizer.param_groups if known else ():
            if group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = False

    def step(self) -> None:
        """Step on the gradients that are there."""
        optimizer = self._optimizer
        if self._plain is None or self._is_watched():
            optimizer.step()
        else:
            self._plain(optimizer)

    def _is_watched(self) -> bool:
        """Whether every step is observed by hooks; a schedule wraps the method of the one optimizer."""
        optimizer = self._optimizer
        return bool(
            "step" in vars(optimizer)
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or internals._global_optimizer_pre_hooks
            or internals._global_optimizer_post_hooks
        )


def can_split(optimizer: Optimizer | MakeOptimizer | None) -> bool:
    """Whether a parameter may be split over servers: the optimizer treats each element on its own.

    One that looks at a whole parameter, such as Adafactor or Muon, or an unknown one, gets whole parameters.

    Raises:
        UnsupportedError: It looks at all parameters at once.
    """
    if optimizer is None:
        return True
    if not isinstance(optimizer, Optimizer):
        try:
            optimizer = optimizer([nn.Parameter(torch.zeros(1))])
        except Exception:  # noqa: BLE001  # whatever the user's function wants, it is not one parameter: cut nothing
            return False
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{kind.__name__} sees all parameters at once, so they cannot lie on several servers; use servers=1"
        )
    if not kind.__module__.startswith("torch.optim"):
        warnings.warn(
            f"{kind.__name__} is not from torch.optim: several servers give the result of one only if it treats each "
            "parameter on its own",
            stacklevel=4,
        )
    return kind in _ELEMENTWISE


def sliced(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    pieces: Sequence[Stretch],
    parameters: Mapping[str, nn.Parameter],
) -> Optimizer:
    """One server's part of an optimizer, with its groups, options and state.

    Args:
        optimizer: The optimizer over whole parameters.
        names: Their names.
        pieces: The pieces of the server.
        parameters: Their parameters, by the names of the pieces.
    """
    held: dict[str, list[Stretch]] = defaultdict(list)
    for piece in pieces:
        held[piece.parameter].append(piece)
    found = object.__new__(type(optimizer))
    found.__dict__.update(optimizer.__dict__)
    found.param_groups, found.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        mine: list[nn.Parameter] = []
        for parameter in group["params"]:
            for piece in held.get(names[parameter], ()):
                own = parameters[piece.name]
                mine.append(own)
                if optimizer.state.get(parameter):
                    state = optimizer.state[parameter]
                    found.state[own] = {key: _part(value, piece, parameter) for key, value in state.items()}
        options: dict[str, Any] = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        found.param_groups.append({"params": mine, **options})
    return found


def _part(value: Any, piece: Stretch, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (piece.of(value) if value.shape == parameter.shape else value).detach().clone()


def state_of(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer: tensors, and plain values, as `optimizer.PARAMETER.KEY`."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in parameters.items() if optimizer is not None else ():
        for key, value in optimizer.state.get(parameter, {}).items():  # type: ignore[union-attr]  # looked above
            (tensors if isinstance(value, Tensor) else values)[f"optimizer.{name}.{key}"] = value
    return tensors, values
