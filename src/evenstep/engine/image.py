"""A copy of the state that outlives all workers: where GPUs hold it, it lies in the machine's segment beside them.

After a step is committed the state flows there on a stream of its own while the next step is computed, and is whole
before that changes anything; every site copies its share. There are two images, taken in turns, and a word on the board
says which is whole: so there always is one. If all sites are lost, they begin from it, and what was committed since is
done again. Copying slows down what is computed meanwhile, so a large state is copied every few steps only.
"""

import math
import mmap
import time
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from evenstep.exchange.group import Group
from evenstep.plan.placement import cut
from evenstep.transport.memory import FlatRegion, aligned

__all__ = ["Image"]

_MOST_COST = 0.02  # of the time of a step
_SLOWDOWN = 0.1  # of the time of a copy: by so much it delays what is computed at the same time

Copied = tuple[int, int]  # how many operations the last whole copy has behind it, and after how many the next is due


class Image:
    """The images of the state of a run, as one site sees them.

    Args:
        group: The workers: each is a site.
        device: Where the state is.
        every: After how many steps an image is taken; "auto": as often as it costs little.
    """

    def __init__(self, group: Group, device: torch.device, every: Literal["auto"] | int) -> None:
        self._group, self._device = group, device
        self._every = 1 if every == "auto" else every
        self._chosen = every != "auto"
        self._places: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []  # the state, and both images of it
        self._pinned: list[int] = []
        self._begun = self._copied = 0  # operations behind the copy that was begun last, and behind the last whole one
        self._begun_at = 0.0
        self._image = (0, 0)  # the whole one; alike on all workers
        self._stream = self._events = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves them untyped
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        if group.board.image is None:
            group.board.image = (0, 0)  # of the state before the first operation, which needs no memory

    def cover(self, region: FlatRegion) -> None:
        """Take a part of the state into images from now on. All workers must call this alike."""
        images: tuple[list[Tensor], list[Tensor]] = ([], [])
        for flat in region.flats:
            for image in images:
                room = self._group.segment.memory.reserve(flat.numel()).tensor(flat.shape, torch.uint8)
                self._pin(room)
                image.append(room)
        self._places.append((region.flats, *images))

    def _pin(self, room: Tensor) -> None:
        """Let the GPU copy to it by itself."""
        if self._stream is None or not room.numel():
            return
        code = _cudart().cudaHostRegister(room.data_ptr(), aligned(room.numel(), mmap.PAGESIZE), 0)
        if int(code):
            warnings.warn(
                f"the image of the state cannot be pinned ({code}), so that copying it delays steps; allow more locked "
                "memory (`ulimit -l unlimited`), or use Run(image=0) and take checkpoints",
                stacklevel=2,
            )
        else:
            self._pinned.append(room.data_ptr())

    def settle(self) -> None:
        """The state is about to be changed: what is launched from now on waits until the copy is whole."""
        if self._events is not None and self._begun != self._copied:
            torch.cuda.current_stream(self._device).wait_event(self._events[1])

    def copied(self) -> Copied:
        """What this site has copied, to be told to all."""
        if self._begun != self._copied and (self._events is None or self._events[1].query()):  # type: ignore[no-untyped-call]  # torch's
            self._copied = self._begun
        return self._copied, self._every

    def agree(self, of_all: Sequence[Copied]) -> None:
        """What all sites have copied is an image. All workers must call this alike."""
        whole, self._every = min(copied for copied, _ in of_all), max(every for _, every in of_all)
        if whole > self._image[0]:
            self._image = (whole, 1 - self._image[1])
            if self._group.rank == 0:
                self._group.board.image = self._image

    def take(self, operations: int) -> None:
        """Begin to copy the state, which has so many operations behind it, if it is time. All sites decide alike."""
        if self._begun != self._image[0] or operations - self._begun < self._every:
            return
        if self._stream is not None and self._events is not None:
            self._choose(operations - self._begun)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._events[0].record()
                self._copy_share()
                self._events[1].record()
        else:
            self._copy_share()
        self._begun, self._begun_at = operations, time.monotonic()

    def _copy_share(self) -> None:
        """Copy what this site copies of the state to the image that is not whole."""
        for flats, *images in self._places:
            for flat, room in zip(flats, images[1 - self._image[1]], strict=True):
                first, end = cut(flat.numel(), self._group.num_workers)[self._group.rank]
                room[first:end].copy_(flat[first:end], non_blocking=True)

    def _choose(self, operations: int) -> None:
        """Choose after how many operations the next one is taken, by what the last one took."""
        assert self._events is not None, "copies are measured on a GPU only"
        if self._chosen or not self._begun_at:
            return
        copy_s, step_s = (
            self._events[0].elapsed_time(self._events[1]) / 1e3,
            (time.monotonic() - self._begun_at) / operations,
        )
        cost_s = _SLOWDOWN * copy_s + max(0.0, copy_s - step_s)
        self._every = max(1, math.ceil(cost_s / (_MOST_COST * step_s)))

    def begin(self) -> None:
        """A generation has begun: only what is on the board counts. All workers must call this alike."""
        if self._stream is not None:
            self._stream.synchronize()  # else what was begun would come into the next copy
        found = self._group.board.image
        assert found is not None, "there has been one from the beginning"
        self._image, self._begun, self._copied = found, found[0], found[0]

    @property
    def operations(self) -> int:
        """How many operations the image has behind it."""
        return self._image[0]

    def load(self) -> None:
        """Put the image in the place of the state."""
        operations, which = self._image
        for flats, *images in self._places if operations else ():
            for flat, room in zip(flats, images[which], strict=True):
                flat.copy_(room)

    def close(self) -> None:
        """Let go of the memory."""
        if self._stream is not None:
            self._stream.synchronize()
            for address in self._pinned:
                _cudart().cudaHostUnregister(address)
        self._pinned, self._places = [], []


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
