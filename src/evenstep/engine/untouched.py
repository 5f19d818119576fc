"""Parameters and buffers that user code changes where only a step or `run.edit` should.

Parameters are one tensor for all workers. Most changes of one show in torch's version of it. A change of elements
through `.data` does not, so parameters are also compared by checksum: after the first steps, and then as often as it
takes next to none of the time.

Buffers are copies, and every step begins with what the last one left. What a forward outside a step does to them
does not count, but what user code does by hand was meant to. So if one was changed between steps that the forward of
the next step does not change, that was done by hand. If it does, either may be meant, and a warning says so once.
"""

import time
import warnings
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from evenstep.core.errors import NondeterminismError, UnsupportedError
from evenstep.native import core

__all__ = ["Strays", "Untouched"]

_FIRST = 4  # how often it looks in any case
_SHARE = 0.005  # how much of the time it may take after that


class Untouched:
    """Watches parameters of one worker.

    Args:
        parameters: By name; may grow.

    Attributes:
        alone: Whether only steps and edits of this run change the parameters, so that their values can be compared.
        kept: Whether the values are rechecked too, which can repair memory that changes by itself. Such memory changes
            in one place; what a script changes differs in several.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self.alone, self.kept = parameters, False, False
        self._versions: dict[str, tuple[int, int]] = {}
        self._sums: dict[str, int] = {}
        self._looks, self._looked_s, self._begin_s = 0, 0.0, time.monotonic()

    def remember(self) -> None:
        """Remember torch's version and the address of each parameter, now that only a step should change it."""
        self._versions = {name: (p._version, p.data_ptr()) for name, p in self._parameters.items()}
        self._sums = {}

    def remember_values(self) -> None:
        """Remember the values too, now and then. For a worker without which the others change nothing."""
        begin_s = time.monotonic()
        if self.alone and (self._looks < _FIRST or self._looked_s <= _SHARE * (begin_s - self._begin_s)):
            self._looks += 1
            self._sums = self._checksums()
            self._looked_s += time.monotonic() - begin_s

    def _checksums(self) -> dict[str, int]:
        return {
            name: core.checksum(p.data_ptr(), p.numel() * p.element_size())
            for name, p in self._parameters.items()
            if p.device.type == "cpu" and p.is_contiguous()
        }

    def check(self, when: str, *, values: bool = True) -> None:
        """Report it if user code changed a parameter.

        Args:
            when: Since it was remembered, in words.
            values: Whether to compare values too, if they were remembered.

        Raises:
            NondeterminismError: It did.
            UnsupportedError: It moved one elsewhere.
        """
        for name, (version, place) in self._versions.items():
            parameter = self._parameters[name]
            if parameter.data_ptr() != place:
                raise UnsupportedError(
                    f"parameter '{name}' has got other memory since run.prepare, which the other workers do not see "
                    "(its .data was assigned, or model.to, .half or the like was called); do that before run.prepare"
                )
            if parameter._version != version:
                _say(name, when)
        if values and self._sums:
            begin_s = time.monotonic()
            changed = [name for name, now in self._checksums().items() if now != self._sums[name]]
            self._looked_s += time.monotonic() - begin_s
            if len(changed) > self.kept:
                _say(changed[0], f"{when} through .data")


def _say(name: str, when: str) -> None:
    raise NondeterminismError(
        f"parameter '{name}' was changed {when}; it is one tensor for all workers, so every worker would change it "
        "again; let one of them do it for all, between steps: run.edit(lambda: model.load_state_dict(...)), or "
        "change it before run.prepare"
    )


class Strays:
    """Watches the buffers of one worker.

    Args:
        bound: Gives the tensors that hang in the models between steps, by name.
    """

    def __init__(self, bound: Callable[[], Mapping[str, Tensor]]) -> None:
        self._bound = bound
        self._left: dict[str, tuple[Tensor, int]] = {}
        self._suspects: set[str] = set()
        self._moving: set[str] = set()
        self._said = False

    def remember(self, buffers: Mapping[str, Tensor]) -> None:
        """These hold what is committed."""
        self._left = {name: (buffer, buffer._version) for name, buffer in buffers.items()}

    def look(self) -> None:
        """Note which of them user code has changed since."""
        found = self._bound()
        self._suspects |= {
            name
            for name, (buffer, version) in self._left.items()
            if found[name] is not buffer or found[name]._version != version
        }

    def check(self, moved: set[str]) -> None:
        """Report it if one was changed by hand, and warn if it may have been.

        Args:
            moved: Those that the forward of a step has changed.

        Raises:
            UnsupportedError: One was.
        """
        self._moving |= moved
        by_hand, dropped, self._suspects = self._suspects - self._moving, self._suspects & self._moving, set()
        if by_hand:
            raise UnsupportedError(
                f"buffer '{min(by_hand)}' was changed between steps, which has no effect: every worker has a copy of "
                "it, and a step begins with what the last one left. Let one worker change it for all: "
                "run.edit(lambda: model.buffer.copy_(...)), or keep it as a plain attribute"
            )
        if dropped and not self._said:
            self._said = True
            warnings.warn(
                f"buffer '{min(dropped)}' was changed between steps, by a forward in train mode or by hand, which has "
                "no effect: a step begins with what the last one left. Call model.eval() before a forward of your own; "
                "to reset or replace buffers use run.edit(lambda: model.buffer.copy_(...))",
                stacklevel=2,
            )
