"""An optimizer as plain values, so that a client that puts parameters can say how the server is to update them.

Only classes of `torch.optim` can be named: a recipe is data from a client, whose code never runs here.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import RefusedError, UnsupportedError

__all__ = ["Recipe", "build", "describe", "make", "samples"]

Recipe = dict[str, Any]
"""{"class": "SGD", "groups": [{"names": [...], option: value, ...}]}"""

_UNUSABLE = (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)  # abstract; calls the model; needs sparse gradients
_PLAIN = (int, float, str, bool, type(None))


def describe(optimizer: Optimizer, names: Mapping[int, str]) -> Recipe:
    """The recipe of an optimizer that has made no step yet.

    Args:
        optimizer: One of `torch.optim`.
        names: The name of every parameter, by its id.

    Raises:
        UnsupportedError: It is of another kind, has options that are not plain values, or already has state.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        raise UnsupportedError(
            f"the servers build their optimizer from its name and options, but {kind.__name__} of {kind.__module__} is "
            "not one of torch.optim; use one that is, or train without servers"
        )
    groups = []
    for group in optimizer.param_groups:
        options = {
            key: value for key, value in group.items() if key in optimizer.defaults
        }  # schedulers add keys of their own
        for key, value in options.items():
            if not _is_plain(value):
                raise UnsupportedError(
                    f"{kind.__name__} has {key}={value!r:.60}, which is not a plain value; servers take only numbers"
                )
        groups.append({"names": [names[id(p)] for p in group["params"]], **options})
    recipe = {"class": kind.__name__, "groups": groups}
    if optimizer.state:
        _check_fresh(optimizer, recipe, names)
    return recipe


def _is_plain(value: Any) -> bool:
    return all(isinstance(item, _PLAIN) for item in (value if isinstance(value, list | tuple) else [value]))


def _check_fresh(optimizer: Optimizer, recipe: Recipe, names: Mapping[int, str]) -> None:
    parameters = {names[id(p)]: nn.Parameter(p.detach().clone()) for g in optimizer.param_groups for p in g["params"]}
    fresh = build(recipe, parameters)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        here, there = optimizer.state.get(p, {}), fresh.state.get(parameters[names[id(p)]], {})
        same = here.keys() == there.keys() and all(
            torch.equal(value, there[key]) if isinstance(value, Tensor) else value == there[key]
            for key, value in here.items()
        )
        if not same:
            raise UnsupportedError(
                f"{type(optimizer).__name__} brings state along for '{names[id(p)]}', but the servers begin with a "
                "fresh optimizer; train without servers to go on from a state"
            )


def build(recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
    """The optimizer that a recipe describes, over the parameters of it that are here.

    Raises:
        RefusedError: It describes none.
    """
    kind = getattr(torch.optim, recipe["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind in _UNUSABLE:
        raise RefusedError(f"'{recipe['class'][:60]}' is not an optimizer of torch.optim that a server can use")
    groups = []
    for group in recipe["groups"]:
        here = [parameters[name] for name in group["names"] if name in parameters]
        groups.append({**{key: value for key, value in group.items() if key != "names"}, "params": here})
    made = make(kind, groups)
    unknown = {key for group in groups for key in group} - made.defaults.keys() - {"params"}
    if unknown:
        raise RefusedError(f"torch.optim.{kind.__name__} has no option {min(unknown)[:60]!r}")
    return made


def make(kind: type[Optimizer], groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """One of torch's optimizers, with all that torch checks.

    Args:
        kind: Its class.
        groups: The parameters of each group, as "params", and its options.

    Raises:
        RefusedError: Torch refuses to make it.
    """
    known = inspect.signature(kind).parameters.keys() - {"params"}
    made: list[dict[str, Any]] = [
        {key: tuple(v) if isinstance(v, list) and key != "params" else v for key, v in group.items()}
        for group in groups
    ]
    arguments = [{key: value for key, value in group.items() if key in known} for group in made]
    try:
        for group, given in zip(made[1:], arguments[1:], strict=True):  # torch checks options only as arguments
            kind(samples(group["params"]), **given)
        return kind(made, **(arguments[0] if arguments else {}))
    except Exception as error:  # torch may raise anything at options of any kind
        raise RefusedError(f"torch.optim.{kind.__name__} cannot be made: {error}") from error


def samples(parameters: Iterable[Tensor]) -> list[nn.Parameter]:
    """One element for every kind of parameter, at least one."""
    kinds = {(p.dtype, p.dim()) for p in parameters} or {(torch.float32, 1)}
    return [nn.Parameter(torch.ones([1] * dim, dtype=dtype)) for dtype, dim in sorted(kinds, key=str)]
