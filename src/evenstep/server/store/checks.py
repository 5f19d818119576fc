"""Whether an update may be applied to some parameters, before anything is changed."""

import torch
from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server.store.hyperparameters import check_hyperparameters
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.state import ParameterState
from evenstep.server.wire.tensors import Spec

__all__ = ["check_contribution"]


def check_contribution(
    state: ParameterState, kind: str, part: Contribution, *, finite: bool, fits: bool = False
) -> None:
    """Check that an update fits the parameters.

    Args:
        state: The parameters.
        kind: "gradient"; "delta"; or "peer", a delta from another server.
        part: The update.
        finite: Whether every number must be finite.
        fits: Whether names, dtypes and shapes are already known to be right.

    Raises:
        RefusedError: It does not.
    """
    if state.layout is None:
        raise RefusedError("nothing was put yet, so there is nothing to update", 409)
    if kind == "gradient" and state.optimizer is None:
        raise RefusedError('this server has no optimizer; send deltas (kind="delta")', 409)
    if part.options is not None and not state.has_options(part.options):
        check_hyperparameters(state.optimizer, part.options)
    groups = [(part.tensors, False), (part.buffers, True), *((held, False) for _, held in part.nodes)]
    for tensors, buffers in groups:
        for name, tensor in tensors.items():
            if not fits:
                _check_fit(state, name, tensor, buffers)
            if finite and not bool(torch.isfinite(tensor).all()):
                raise RefusedError(f"the update of '{name}' holds a number that is not finite", 422)


def _check_fit(state: ParameterState, name: str, tensor: Tensor, buffer: bool) -> None:
    assert state.layout is not None, "called only after parameters were put"
    state.layout.check(name, Spec.of(tensor))
    if (name in state.buffers) != buffer:
        raise RefusedError(f"'{name}' is {'no' if buffer else 'a'} buffer")
    if not buffer and not state.parameters[name].requires_grad:
        raise RefusedError(f"'{name}' is not trained, so it takes no update")
