"""Moving state from one machine to others: one worker's values to all, and everything to a newcomer."""

import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from evenstep.core.events import Event
from evenstep.exchange.bridged import EVERYONE, Puts
from evenstep.exchange.group import Group
from evenstep.native import core
from evenstep.plan.sites import Sites
from evenstep.transport.memory import HostMemory

__all__ = ["BetweenMachines"]

_PIECE_BYTES = 1 << 22
_SAY_S = 1.0  # how often to report progress


class BetweenMachines:
    """Copies ranges of one machine's memory to the same place of the others'; see `Spreading`. A machine is a site.

    Making one takes a word of the memory, so all workers must do it alike.

    Args:
        group: The workers.
        puts: The way to the memory of other machines.
        memory: Where the state is.
    """

    def __init__(self, group: Group, puts: Puts, memory: HostMemory) -> None:
        self._group, self._puts, self._memory = group, puts, memory
        self._word = memory.words(1)

    def spread(
        self, tag: str, tensors: Sequence[Tensor], source: int, sites: Sites, only: Collection[int] | None = None
    ) -> None:
        """See `Spreading`. The first worker of a receiving machine reports progress."""
        self._group.barrier(f"{tag}: saved")  # nothing may arrive before the other machines can undo it
        if self._group.rank == source:
            home = self._group.machines[source]
            targets = [EVERYONE] if only is None else sorted(machine for machine in only if machine != home)
            for number, (offset, num_bytes) in enumerate(self._ranges(tensors), start=1):
                for machine in targets:
                    self._puts.put_range(machine, offset, num_bytes, self._word, self._value(number))
        elif sites.takes(source, only):
            self._await(tag, tensors, self._group.tell)
        self._group.barrier(f"{tag}: taken")

    def _await(self, tag: str, tensors: Sequence[Tensor], tell: Callable[[Event], None]) -> None:
        word, ranges = self._word.data_ptr(), self._ranges(tensors)
        all_bytes, said = sum(size for _, size in ranges), time.monotonic()

        def is_here() -> bool:
            nonlocal said
            pieces = core.load(word) - self._value(0)
            if time.monotonic() - said > _SAY_S and 0 <= pieces < len(ranges):
                said = time.monotonic()
                here = sum(size for _, size in ranges[:pieces])
                tell({"says": f"{tag}: {here / 1e6:.0f} of {all_bytes / 1e6:.0f} MB are here"})
            return pieces >= len(ranges)

        self._puts.wait(is_here, tag)

    def _value(self, number: int) -> int:
        """What the word is set to with a piece: larger than ever before."""
        return (self._group.exchanges + 1) << 32 | number

    def _ranges(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Offsets and sizes of what to copy: neighbours joined, large ranges in pieces."""
        places = sorted(
            (self._memory.locate(tensor), tensor.numel() * tensor.element_size())
            for tensor in tensors
            if tensor.numel()
        )
        merged: list[list[int]] = []
        for begin, num_bytes in places:
            if merged and begin - merged[-1][1] < 64:
                merged[-1][1] = begin + num_bytes
            else:
                merged.append([begin, begin + num_bytes])
        return [
            (begin, min(_PIECE_BYTES, last - begin))
            for first, last in merged
            for begin in range(first, last, _PIECE_BYTES)
        ]
