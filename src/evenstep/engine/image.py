"""A copy of the state that outlives all workers: where GPUs hold it, it lies in the machine's segment beside them.

After a step is committed the state flows there on a stream of its own while the next step is computed, and is whole
before that changes anything; every site copies its share. There are two images, taken in turns, and a word on the board
says which is whole, so there always is one. If all sites are lost, they begin from it, and what was committed since is
done again. Copying slows down what is computed meanwhile, so a large state is copied every few steps only.

Beside every piece of an image lies its *seal*: the checksum of the piece of the state, made where that is, with the
number of operations behind it. So a reader of an image knows whether it is what was copied, and of one moment.
"""

import math
import mmap
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from evenstep.core import points
from evenstep.core.checksum import checksums, launch_checksums_of_pieces
from evenstep.exchange.group import Group
from evenstep.plan.placement import cut
from evenstep.transport.memory import FlatRegion, aligned

__all__ = ["Image"]

_MOST_COST = 0.02  # of the time of a step
_SLOWDOWN = 0.1  # of the time of a copy: how much it delays what is computed at the same time
_PIECE_BYTES = 1 << 20

Copied = tuple[int, int]  # how many operations the last whole copy has behind it, and after how many the next is due


@dataclass(frozen=True)
class _Place:
    """Where a part of the state is: itself, both images of it, and the seals of both. All but the last are bytes."""

    flat: Tensor
    rooms: tuple[Tensor, Tensor]
    seals: tuple[Tensor, Tensor]

    def pieces(self, first: int = 0, end: int | None = None) -> list[slice]:
        """Some of its pieces, by their numbers."""
        numbers = range(len(self.seals[0]))[first:end]
        return [slice(n * _PIECE_BYTES, min((n + 1) * _PIECE_BYTES, self.flat.numel())) for n in numbers]

    def wrong(self, which: int, operations: int, first: int = 0, end: int | None = None) -> list[slice]:
        """Those of some pieces whose image is not what was copied after this many operations."""
        pieces, room = self.pieces(first, end), self.rooms[which]
        points.touch("image", *(room[piece] for piece in pieces))
        seals = self.seals[which][first:end] ^ operations
        found = zip(pieces, checksums([room[piece] for piece in pieces]), seals.tolist(), strict=True)
        return [piece for piece, number, seal in found if number != seal & 0xFFFFFFFFFFFFFFFF]


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
        self._places: list[_Place] = []
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
        for flat in region.flats:
            num_pieces = -(-flat.numel() // _PIECE_BYTES)
            first, second = (self._room(flat.numel(), torch.uint8) for _ in range(2))
            seals, others = (self._room(num_pieces, torch.int64) for _ in range(2))
            self._places.append(_Place(flat, (first, second), (seals, others)))

    def _room(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the segment that the GPU can write to by itself."""
        room = self._group.segment.memory.reserve(count * dtype.itemsize).tensor(torch.Size([count]), dtype)
        self._pin(room)
        return room

    def _pin(self, room: Tensor) -> None:
        if self._stream is None or not room.numel():
            return
        code = _cudart().cudaHostRegister(room.data_ptr(), aligned(room.nbytes, mmap.PAGESIZE), 0)
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
        """Begin to copy the state, which has this many operations behind it, if it is time. All sites decide alike."""
        if self._begun != self._image[0] or operations - self._begun < self._every:
            return
        if self._stream is not None and self._events is not None:
            self._choose(operations - self._begun)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._events[0].record()
                self._copy_share(operations)
                self._events[1].record()
        else:
            self._copy_share(operations)
        self._begun, self._begun_at = operations, time.monotonic()

    def _copy_share(self, operations: int) -> None:
        """Copy what this site copies of the state to the image that is not whole, and seal it."""
        which = 1 - self._image[1]
        for place in self._places:
            first, end = cut(len(place.seals[which]), self._group.num_workers)[self._group.rank]
            pieces = place.pieces(first, end)
            if pieces:
                share = slice(pieces[0].start, pieces[-1].stop)
                seals = launch_checksums_of_pieces(place.flat[share], _PIECE_BYTES) ^ operations
                place.rooms[which][share].copy_(place.flat[share], non_blocking=True)
                place.seals[which][first:end].copy_(seals, non_blocking=True)

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
        assert found is not None, "there has been an image from the beginning"
        self._image, self._begun, self._copied = found, found[0], found[0]

    @property
    def operations(self) -> int:
        """How many operations the image has behind it."""
        return self._image[0]

    def wrong(self) -> list[Tensor]:
        """The parts of the state, as bytes, whose image is not what was copied there."""
        operations, which = self._image
        places = self._places if operations else []
        return [place.flat[piece] for place in places for piece in place.wrong(which, operations)]

    def load(self) -> None:
        """Put the image, which is right, in the place of the state."""
        operations, which = self._image
        for place in self._places if operations else ():
            place.flat.copy_(place.rooms[which])

    def find(self, tensor: Tensor, operations: int) -> Tensor | None:
        """What a tensor of the state was after this many operations, if that was copied last and is right; on the host.

        For a run of one site; waits until the copy is whole.
        """
        if self._begun != operations or not operations:
            return None
        if self._events is not None:
            self._events[1].synchronize()
        which = self._image[1] if operations == self._image[0] else 1 - self._image[1]
        for place in self._places:
            begin = tensor.data_ptr() - place.flat.data_ptr()
            if 0 <= begin < place.flat.numel():
                end = begin + tensor.nbytes
                if place.wrong(which, operations, begin // _PIECE_BYTES, -(-end // _PIECE_BYTES)):
                    return None
                return place.rooms[which][begin:end].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return None

    def close(self) -> None:
        """Let go of the memory."""
        if self._stream is not None:
            self._stream.synchronize()
            for address in self._pinned:
                _cudart().cudaHostUnregister(address)
        self._pinned, self._places = [], []


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped
