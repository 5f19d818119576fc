"""Exchanges among the GPUs of one machine that no host waits for: what a layer that spans shards needs in every step.

Everyone has a window of device memory that the other GPUs can read. A kernel writes this worker's rows there, waits for
those of the others, and goes on: the queue of a GPU never stops, and a CUDA graph can contain it. A wait is bounded,
and ends at once when the host sees that a peer is gone (`wait`). Before anything is changed, `check` asks whether all
went well.
"""

import mmap
import re
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import MismatchError, SilenceError
from evenstep.exchange.group import Group
from evenstep.exchange.sites import open_windows
from evenstep.transport.windows import PeerWindows

__all__ = ["Meetings", "can_meet"]

_SLOT_WORDS = 1 << 17  # a round carries no more
_PROGRAMS = 8
_HEAD_WORDS = 8 * _PROGRAMS
_WINDOW_WORDS = _HEAD_WORDS + 2 * _SLOT_WORDS
_LOOKS_A_SECOND = 2 * 10**6  # about: each goes to the other device and back
_PAUSE_S = 2e-5
_BLOCK = 1024


@lru_cache(maxsize=1)
def _kernel() -> ModuleType | None:
    """The kernel, or None where there is no Triton."""
    try:
        from evenstep.transport import meeting_kernel
    except ImportError:
        return None
    return meeting_kernel


def can_meet(group: Group, device: torch.device) -> bool:
    """Whether the workers of a generation can meet this way: each on an NVIDIA GPU of one machine, supervised."""
    several = group.num_workers > 1 and group.num_machines == 1 and group.elastic
    return several and device.type == "cuda" and torch.version.hip is None and _kernel() is not None


class Meetings:
    """The meetings of one generation.

    Making one takes scratch memory, so all workers must do it alike, and exchange something before they meet.

    Args:
        group: The workers.
        device: This worker's GPU.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._stop = group.segment.memory.scratch(8 * group.num_workers).tensor(
            torch.Size([group.num_workers]), torch.int64
        )
        self._stop[group.rank] = 0
        self._pinned = not int(_cudart().cudaHostRegister(self._stop.data_ptr(), mmap.PAGESIZE, 0))
        self._windows = open_windows(group, device, [1] * group.num_workers, 8 * _WINDOW_WORDS, "meetings")
        self._addresses = [self._windows.read(rank, 0, 0, 8).data_ptr() for rank in range(group.num_workers)]
        self._windows.write(0, 0, torch.zeros(8 * _HEAD_WORDS, dtype=torch.uint8, device=device))
        self._windows.flush()
        mine = self._pinned and isinstance(self._windows, PeerWindows)
        self.open = all(group.gather_json("meetings: ready", mine))
        self._state = torch.zeros(_PROGRAMS, 2, dtype=torch.int64, device=device)
        self._tables: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def takes(self, rows: Tensor, shares: Sequence[int]) -> bool:
        """Whether these rows can be exchanged here; the same answer on all workers."""
        return self.open and rows.element_size() == 8 and max(shares) * rows.shape[1] <= _SLOT_WORDS

    def gather(self, tag: str, rows: Tensor, shares: Sequence[int]) -> Tensor:
        """See `Group.gather`; nobody waits for the device."""
        width, me = rows.shape[1], self._group.rank
        key = (tuple(shares), width)
        if key not in self._tables:
            self._tables[key] = self._table(shares, width)
        peers = self._tables[key]
        given = rows.contiguous()
        out = torch.empty(sum(shares), width, dtype=rows.dtype, device=rows.device)
        module: Any = _kernel()
        module.meet[(_PROGRAMS,)](
            given.view(torch.int64), out.view(torch.int64), self._state,
            self._addresses[me], self._stop.data_ptr() + 8 * me, peers,
            given.numel(), sum(shares[:me]) * width, len(peers),
            _word_of(f"{re.sub('^step [0-9]+: ', '', tag)} {key}"),
            int(self._group.timeout_s * _LOOKS_A_SECOND), HEAD=_HEAD_WORDS, SLOT=_SLOT_WORDS, BLOCK=_BLOCK,
            num_warps=8,
        )  # fmt: skip
        return out

    def _table(self, shares: Sequence[int], width: int) -> Tensor:
        """What the kernel needs to know of the other participants."""
        rows, before = [], 0
        for rank, share in enumerate(shares):
            if share and rank != self._group.rank:
                rows.append([self._addresses[rank], share * width, before * width])
            before += share
        return torch.tensor(rows, dtype=torch.int64).view(-1, 3).to(self._device)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device reaches an event; if a worker is lost meanwhile, stop all kernels that wait for it.

        Raises:
            PeerError: A worker was lost.
        """
        while not event.query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            try:
                self._group.check()
            except BaseException:
                self.stop()
                raise
            time.sleep(_PAUSE_S)

    def check(self) -> None:
        """Check that all meetings so far went well. Waits for the device.

        Raises:
            PeerError: A worker was lost.
            MismatchError: Another worker came to another layer.
            SilenceError: A worker did not come within the timeout.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        self.wait(event)
        wrong = int(self._state[:, 1].max())
        if not wrong:
            return
        self._group.check()
        if wrong == 2:
            raise MismatchError(
                f"worker {self._group.worker} met another worker in another layer of the model: all shards must call "
                "the same layers in the same order"
            )
        raise SilenceError(
            f"another worker did not come to a layer that spans shards within {self._group.timeout_s:g} s, where "
            f"worker {self._group.worker} waits"
        )

    def stop(self) -> None:
        """Stop the kernels of this worker that wait."""
        self._stop[self._group.rank] = 1

    def close(self) -> None:
        """Release the memory, once nothing is under way."""
        self.stop()
        torch.cuda.synchronize(self._device)
        self._windows.close()
        if self._pinned:
            _cudart().cudaHostUnregister(self._stop.data_ptr())
        self.open = self._pinned = False


def _word_of(tag: str) -> int:
    return zlib.crc32(tag.encode()) & 0x7FFFFFFF


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
