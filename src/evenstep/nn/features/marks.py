"""Which layers of a model the user has marked, and the one function that partitions them."""

from collections import Counter
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Literal, TypeAlias, get_args

from torch import nn

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.nn.features import mesh as over_mesh
from evenstep.nn.features.cuts import Kind, Memo, Place, check, dims_of, features_of, make_cut, pair_of
from evenstep.nn.features.layer import Partitioned

__all__ = ["Mark", "partition"]

Mark: TypeAlias = Literal["batch", "feature", "input-feature"]


def partition(
    model: nn.Module,
    marks: Mark | Mapping[str, Mark],
    *,
    parts: int | None = None,
    mesh: over_mesh.DeviceMesh | None = None,
) -> nn.Module:
    """Cut marked layers by their features. Call it before the optimizer is made: it replaces parameters.

    Layers are `nn.Linear`, `nn.Embedding`, `nn.Conv1d`, `2d`, `3d`, or an `nn.Sequential` of two of them with
    activations or pooling in between, which is cut between the two, so that nothing is joined there.

    Args:
        model: The model; marked layers are replaced in place.
        marks: For the names of layers, or patterns such as "blocks.*.mlp" in which * stands for one step of a name:
            "feature" cuts the features of the output, "input-feature" those of the input (of an embedding: its rows),
            "batch" leaves a layer to the shards, as all unmarked ones are; where several fit, the last counts. A mark
            alone is for the model itself.
        parts: How many parts each marked layer has, in a run and everywhere: they are part of the arithmetic, as shards
            are, and do not depend on the number of workers, which share them out.
        mesh: The ranks that share the layers by torch's tensor parallelism instead; one-dimensional. Then there are as
            many parts as ranks, each rank holds its own, and parameters are DTensors.

    Returns:
        The model, or what replaces it if it is itself a marked layer.

    Raises:
        ConfigError: A mark fits no layer, there are more parts than features, or neither or both of parts and mesh are
            given. Nothing has been changed.
        UnsupportedError: A marked layer cannot be cut this way. Nothing has been changed.
    """
    count = parts if mesh is None else over_mesh.size_of(mesh)
    if count is None or (parts is not None and mesh is not None):
        raise ConfigError("partition needs parts=P, or mesh= for the ranks of a process group, and not both")
    found = _resolve(model, {"": marks} if isinstance(marks, str) else marks)
    for name, kind in found.items():
        layer, called = model.get_submodule(name), name or type(model).__name__
        _check(called, layer, kind, count)
        if mesh is not None:
            over_mesh.check_mesh(called, layer, kind, count)
    _check_shared(model, found)
    tied = _check_ties(model, found)
    if mesh is not None:
        return over_mesh.distribute(model, found, mesh, tied)
    return _replace(model, found, count)


def _replace(model: nn.Module, found: Mapping[str, Kind], count: int) -> nn.Module:
    """Put layers in parts in place of those found; return the model, or what replaces it."""
    memo: Memo = {}
    made: dict[int, Partitioned] = {}
    for name, kind in found.items():
        layer = model.get_submodule(name)
        cut, pieces = make_cut(layer, kind, count, memo)
        made[id(layer)] = Partitioned(layer, cut, pieces, name or type(model).__name__)
    for module in list(model.modules()):
        for key, child in module._modules.items():
            if id(child) in made:
                setattr(module, key, made[id(child)])
    return made.get(id(model), model)


def _resolve(model: nn.Module, marks: Mapping[str, Mark]) -> dict[str, Kind]:
    """The names of the layers to cut. A layer with several names is listed once, by the first."""
    names: dict[int, str] = {}
    found: dict[str, Mark] = {}
    named = list(model.named_modules(remove_duplicate=False))
    for pattern, mark in marks.items():
        if mark not in get_args(Mark):
            raise ConfigError(f"{pattern!r} is marked {mark!r}, expected one of {', '.join(map(repr, get_args(Mark)))}")
        fits = [(name, module) for name, module in named if _fits(name, pattern)]
        if any(sign in pattern for sign in "*?["):  # among others, activations are met
            fits = [(name, module) for name, module in fits if any(True for _ in module.parameters())]
        if not fits:
            raise ConfigError(f"the mark {pattern!r} fits no layer of {type(model).__name__}; look at named_modules()")
        for name, module in fits:
            found[names.setdefault(id(module), name)] = mark
    kinds: dict[str, Kind] = {name: mark for name, mark in found.items() if mark != "batch"}
    _check_nesting(kinds)
    return kinds


def _check_nesting(names: Collection[str]) -> None:
    """Refuse a marked layer inside another."""
    for name, other in product(names, names):
        if other != name and (name == "" or other.startswith(name + ".")):
            raise ConfigError(f"both '{name}' and '{other}' inside it are marked; mark one of them")


def _fits(name: str, pattern: str) -> bool:
    steps, wanted = name.split("."), pattern.split(".")
    if not name or not pattern:  # the model itself
        return name == pattern
    return len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


def _check(name: str, layer: nn.Module, kind: Kind, count: int) -> None:
    check(name, layer, kind)
    features = features_of(layer, kind)
    if not isinstance(count, int) or not 1 <= count <= features:
        raise ConfigError(f"'{name}' cannot be cut into {count!r} parts; it has features for 1 to {features}")


def _check_shared(model: nn.Module, found: Mapping[str, Kind]) -> None:
    """Check that no layer of a chain is used elsewhere: the chain is replaced, and others would call the old layer.

    Raises:
        UnsupportedError: One is.
    """
    hung = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name in found:
        pair = pair_of(model.get_submodule(name))
        for inner, layer in () if pair is None else (pair[:2], pair[2:]):
            if hung[id(layer)] > 1:
                raise UnsupportedError(
                    f"'{name}.{inner}' hangs elsewhere too; mark the two layers instead of their chain"
                )


def _cuts(model: nn.Module, found: Mapping[str, Kind]) -> dict[tuple[int, str], int]:
    """Along which dimension parameters are cut, by the id of their module and their name in it."""
    cuts: dict[tuple[int, str], int] = {}
    for name, kind in found.items():
        layer = model.get_submodule(name)
        for full, dim in dims_of(layer, kind).items():
            path, _, key = full.rpartition(".")
            cuts[id(layer.get_submodule(path)), key] = dim
    return cuts


def _check_ties(model: nn.Module, found: Mapping[str, Kind]) -> list[list[Place]]:
    """The places of each parameter that is in several and is cut alike in all of them.

    Raises:
        UnsupportedError: One is cut in one place, but not, or differently, in another.
    """
    cuts = _cuts(model, found)
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((name, module, key))
    tied = []
    for hung in places.values():
        dims = [cuts.get((id(module), key)) for _, module, key in hung]
        if len(set(dims)) > 1:
            there = ", ".join(f"'{name}.{key}'" for name, _, key in hung)
            raise UnsupportedError(
                f"{there} are one tensor, which would be cut along {', '.join(map(str, dims))}; mark all of its layers "
                "so that it is cut alike, or none"
            )
        if len(hung) > 1 and dims[0] is not None:
            tied.append([(module, key) for _, module, key in hung])
    return tied
