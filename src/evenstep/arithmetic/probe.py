"""Which bits this machine computes: a short digest for each of the `cases`, and how to compare them."""

import hashlib
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from evenstep.arithmetic.cases import cases
from evenstep.core.octets import octets

__all__ = ["Golden", "differing", "golden", "probe"]


@dataclass(frozen=True)
class Golden:
    """The digests that portable arithmetic is known to give everywhere.

    Attributes:
        torch: The version of torch they belong to.
        operations: Digests by name.
    """

    torch: str
    operations: dict[str, str]

    @property
    def applies(self) -> bool:
        """Whether it belongs to the installed torch."""
        return torch.__version__.partition("+")[0] == self.torch


@cache
def golden() -> Golden:
    """The golden table of this version of evenstep."""
    return Golden(**json.loads(resources.files(__package__).joinpath("golden.json").read_text()))


def probe(names: Collection[str] | None = None) -> dict[str, str]:
    """Compute all cases, or only those named, in one thread; return a digest for each.

    A case that this torch cannot compute has its error in place of a digest.
    """
    with _as_in_a_run():
        return {name: _digest(function) for name, function in cases() if names is None or name in names}


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The cases that both have and that differ, in order."""
    return [name for name, digest in mine.items() if theirs.get(name, digest) != digest]


def _digest(function: Any) -> str:
    try:
        found = function()
    except RuntimeError as error:
        return f"error: {str(error).partition(chr(10))[0][:120]}"
    total = hashlib.sha256()
    for tensor in [found] if isinstance(found, Tensor) else found:
        total.update(octets(tensor).numpy().tobytes())
    return total.hexdigest()[:12]


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """One thread, deterministic kernels, gradients on, no warnings; everything is restored afterwards."""
    threads, enabled = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a module property
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
