"""What a run and its servers call the same tensors: a run's names begin with the model's, a server's do not."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor

from evenstep.core.errors import MismatchError

__all__ = ["PREFIX", "bare", "bare_names", "compare", "full"]

PREFIX = "model."  # what a run calls its first model

T = TypeVar("T")


def bare(values: Mapping[str, T]) -> dict[str, T]:
    """Values of a run by the server's names."""
    return {name.removeprefix(PREFIX): value for name, value in values.items()}


def bare_names(names: Iterable[str]) -> list[str]:
    """Names of a run as the server has them."""
    return [name.removeprefix(PREFIX) for name in names]


def full(values: Mapping[str, T]) -> dict[str, T]:
    """The inverse of `bare`."""
    return {PREFIX + name: value for name, value in values.items()}


def compare(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> None:
    """Check that a server has the model of this run; names are the server's.

    Raises:
        MismatchError: It has another.
    """
    forms = [{name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} for tensors in (here, there)]
    for name in sorted(here.keys() | there.keys()):
        ours, theirs = (form.get(name) for form in forms)
        if ours != theirs:
            raise MismatchError(f"'{name}' is {theirs} on the server but {ours} here")
