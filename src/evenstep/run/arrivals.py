"""Which bundles of the parameters have arrived: access to a parameter waits for its own bundle, and for no other.

The parameters of a group exist once, in its segment. A word for every bundle says which version it has. Its owner
writes the bundle, then the word; so a bundle with an old word must be fetched again, whichever workers died meanwhile.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.core.errors import UnreachableError
from evenstep.engine.state import StateEntry
from evenstep.exchange.group import Group
from evenstep.native import core

__all__ = ["Arrivals", "Awaited"]

_SLICE_S = 0.0005  # how often to look for what another worker writes


class Arrivals:
    """The bundles of one model, as one worker sees them.

    Making it takes room in the segment, so all workers must do it alike.

    Args:
        group: The workers.
        bundles: The entries of each bundle that change; nobody waits for a bundle without any.
        sources: Where each bundle comes from, in words.
        check: Raises if waiting has become pointless.

    Attributes:
        version: Which version is needed.
        watch: Called with ("needs" or "has", bundle), for tests that look at the order of things.
    """

    def __init__(
        self,
        group: Group,
        bundles: Sequence[Sequence[StateEntry]],
        sources: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        self._group, self._bundles, self._sources, self._check = group, bundles, sources, check
        words = group.segment.memory.words(len(bundles))
        self._words = [words.data_ptr() + 8 * bundle for bundle in range(len(bundles))]
        self._memory = words  # keeps the addresses valid
        self._have = [-1] * len(bundles)  # the versions of this worker's own copies
        self._written = threading.Condition()
        self.version = 0
        self.watch: Callable[[str, int], None] = lambda *_: None

    def version_of(self, bundle: int) -> int:
        """The version of a bundle in the segment."""
        return core.load(self._words[bundle])

    def write(self, bundle: int, values: dict[str, Tensor], version: int) -> None:
        """Put the values of a bundle that this worker owns in place, once nobody reads the old ones any more."""
        with torch.no_grad():
            for entry in self._bundles[bundle]:
                if entry.name in values:
                    entry.live.copy_(values[entry.name])
        with self._written:
            core.store(self._words[bundle], version)
            self._written.notify_all()

    def need(self, bundle: int) -> None:
        """Wait until a bundle is there in the needed version.

        Raises:
            PeerError: Another worker failed.
            UnreachableError: It does not come.
        """
        if self._have[bundle] == self.version or not self._bundles[bundle]:
            return
        self.watch("needs", bundle)
        deadline, begin_ns = time.monotonic() + self._group.timeout_s, time.monotonic_ns()
        with self._written:
            while core.load(self._words[bundle]) < self.version:
                self._group.check()
                self._check()
                if time.monotonic() > deadline:
                    name, timeout_s = self._bundles[bundle][0].name, self._group.timeout_s
                    raise UnreachableError(f"'{name}' did not come from its server within {timeout_s:g} s")
                self._written.wait(_SLICE_S)
        self._group.tracer.waited(begin_ns, -1, self._sources[bundle])
        with torch.no_grad():
            for entry in self._bundles[bundle]:
                entry.pull()
        self._have[bundle] = self.version
        self.watch("has", bundle)

    def has(self, bundle: int) -> bool:
        """Whether this worker has waited for a bundle in the needed version."""
        return self._have[bundle] == self.version

    def all(self) -> None:
        """Wait for all bundles."""
        for bundle in range(len(self._bundles)):
            self.need(bundle)

    def forget(self) -> None:
        """Assume that this worker's own copies may have any version."""
        self._have = [-1] * len(self._have)


class Awaited(dict[str, Any]):
    """The parameters of a module; looking one up waits for it. Otherwise an ordinary dict."""

    need: Callable[[int], None] | None = None
    bundle_of: dict[str, int]

    @classmethod
    def hang(cls, model: nn.Module) -> None:
        """Put one into every module, in place of its dict."""
        for module in model.modules():
            if type(module._parameters) is dict:
                module.__dict__["_parameters"] = cls(module._parameters)

    @classmethod
    def wait_for(cls, model: nn.Module, bundle_of: Mapping[int, int], need: Callable[[int], None]) -> list[Any]:
        """Make all modules of a model wait from now on.

        Args:
            model: A model into whose modules `hang` has put these dicts.
            bundle_of: The bundle of every parameter, by its id.
            need: Waits for a bundle.

        Returns:
            Hooks of modules that keep their parameters elsewhere too, to be removed in the end.
        """
        hooks = []
        for module in model.modules():
            place = module._parameters
            if isinstance(place, cls):
                place.bundle_of = {key: bundle_of[id(p)] for key, p in place.items() if p is not None}
                place.need = need
            if isinstance(module, nn.RNNBase):  # it keeps its weights in a list too
                hooks.append(module.register_forward_pre_hook(_take_all))
        return hooks

    @classmethod
    def take_down(cls, model: nn.Module) -> None:
        """Give every module an ordinary dict again."""
        for module in model.modules():
            if isinstance(module._parameters, cls):
                module._parameters.need = None
                module.__dict__["_parameters"] = dict(module._parameters)

    def _wait(self, *keys: str) -> None:
        if self.need is not None:
            for key in keys:
                if key in self.bundle_of:
                    self.need(self.bundle_of[key])

    def __getitem__(self, key: str) -> Any:
        self._wait(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any dict."""
        self._wait(key)
        return super().get(key, default)

    def values(self) -> Any:
        """As of any dict."""
        self._wait(*self)
        return super().values()

    def items(self) -> Any:
        """As of any dict."""
        self._wait(*self)
        return super().items()

    def copy(self) -> dict[str, Any]:
        """As of any dict."""
        return dict(self.items())

    def __reduce__(self) -> Any:  # a copy of a module waits for nobody
        return dict, (self.copy(),)


def _take_all(module: nn.Module, _: Any) -> None:
    """Wait for all parameters of a module."""
    module._parameters.values()
