"""Options of an optimizer, such as learning rates, that come with an update."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from evenstep.core.errors import RefusedError

__all__ = ["check_options", "set_options"]

_PLAIN = (bool, int, float, str, type(None))


def check_options(optimizer: Optimizer | None, options: Any) -> None:
    """See that new options fit to an optimizer.

    Raises:
        RefusedError: They do not.
    """
    groups = optimizer.param_groups if optimizer is not None else []
    if not isinstance(options, list) or len(options) != len(groups):
        raise RefusedError(f"the server's optimizer has {len(groups)} groups of parameters, expected options for each")
    for given, group in zip(options, groups, strict=True):
        if not isinstance(given, dict) or not all(
            isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(v, _PLAIN) for v in value))
            for value in given.values()
        ):
            raise RefusedError(f"{str(given)[:60]!r} are no options of an optimizer: expected plain values")
        unknown = [key for key in given if key not in group or key == "params"]
        if unknown:
            raise RefusedError(f"the server's {type(optimizer).__name__} has no option {str(unknown[0])[:40]!r}")


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer other options; they were checked."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        for key, value in given.items():
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
