"""Optimizers for slices: which ones treat every element on its own, and one optimizer made into that of some pieces."""

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import UnsupportedError
from evenstep.server.slices import Piece
from evenstep.server.state import MakeOptimizer

__all__ = ["can_split", "sliced"]

_ELEMENTWISE = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    }
)  # fmt: skip


def can_split(optimizer: Optimizer | MakeOptimizer | None) -> bool:
    """Whether a parameter may be cut over servers: the optimizer changes each element by that element alone.

    One that looks at a whole parameter, such as Adafactor or Muon, or that is not known, gets parameters whole.

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
    pieces: Sequence[Piece],
    parameters: Mapping[str, nn.Parameter],
) -> Optimizer:
    """One server's part of an optimizer, with its groups, options and state.

    Args:
        optimizer: Over whole parameters.
        names: What they are called.
        pieces: Those of the server.
        parameters: Their parameters, by the names of the pieces.
    """
    held: dict[str, list[Piece]] = defaultdict(list)
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


def _part(value: Any, piece: Piece, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (piece.of(value) if value.shape == parameter.shape else value).detach().clone()
