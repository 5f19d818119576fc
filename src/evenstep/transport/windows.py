"""Memory of one worker that the others can read: how tree nodes of gradients move between sites of one machine.

Every worker has a window with some slots. Only it writes them; the others read once an exchange has told them that what
they want is there. On GPUs a window is device memory opened through CUDA IPC, otherwise a range of the segment.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenstep.transport.driver import Driver
from evenstep.transport.memory import DeviceBytes, HostMemory

__all__ = ["HostWindows", "PeerWindows", "Windows"]


class Windows(Protocol):
    """The windows of some workers."""

    def write(self, slot: int, offset: int, data: Tensor) -> None:
        """Put bytes [n] into one of this worker's slots. Does not wait."""

    def flush(self) -> None:
        """Wait until everyone can see what was written."""

    def read(self, rank: int, slot: int, offset: int, num_bytes: int) -> Tensor:
        """Bytes [n] of a slot of any worker, on this worker's device; may be the slot itself. Does not wait."""

    def close(self) -> None:
        """Release all memory."""


class HostWindows:
    """Windows in the segment.

    Args:
        memory: The segment's. Scratch is taken from it, so all workers must make theirs alike.
        device: Where what is read is needed.
        rank: Which worker this is.
        num_slots: How many slots each worker has.
        slot_bytes: The size of a slot.
    """

    def __init__(
        self, memory: HostMemory, device: torch.device, rank: int, num_slots: Sequence[int], slot_bytes: int
    ) -> None:
        self._device, self._rank = device, rank
        shapes = [torch.Size([num, slot_bytes]) for num in num_slots]
        self._windows = [memory.scratch(shape.numel()).tensor(shape, torch.uint8) for shape in shapes]

    def write(self, slot: int, offset: int, data: Tensor) -> None:
        """See `Windows`."""
        self._windows[self._rank][slot, offset : offset + data.numel()].copy_(data, non_blocking=True)

    def flush(self) -> None:
        """See `Windows`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def read(self, rank: int, slot: int, offset: int, num_bytes: int) -> Tensor:
        """See `Windows`."""
        return self._windows[rank][slot, offset : offset + num_bytes].to(self._device, non_blocking=True)

    def close(self) -> None:
        """Nothing to do: scratch is laid out anew."""


class PeerWindows:
    """Windows in the memory of GPUs, which the processes of a machine open for each other.

    Args:
        device: This worker's GPU.
        rank: Which worker this is.
        num_slots: How many slots each worker has.
        slot_bytes: The size of a slot.
        swap: Given this worker's handle, returns every worker's.

    Raises:
        EvenstepError: The driver refuses.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        num_slots: Sequence[int],
        slot_bytes: int,
        swap: Callable[[str], Sequence[str]],
    ) -> None:
        self._device, self._slot_bytes, self._rank = device, slot_bytes, rank
        self._driver = Driver()
        self._opened: list[int] = []
        self._own = self._driver.allocate(num_slots[rank] * slot_bytes)
        try:
            handles = swap(self._driver.handle(self._own).hex())
            addresses = []
            for worker, handle in enumerate(handles):
                if worker != rank:
                    self._opened.append(self._driver.open(bytes.fromhex(handle)))
                addresses.append(self._own if worker == rank else self._opened[-1])
            self._windows = [
                torch.as_tensor(DeviceBytes(address, num * slot_bytes), device=device).view(num, slot_bytes)
                for address, num in zip(addresses, num_slots, strict=True)
            ]
        except BaseException:
            self.close()
            raise

    def write(self, slot: int, offset: int, data: Tensor) -> None:
        """See `Windows`."""
        self._windows[self._rank][slot, offset : offset + data.numel()].copy_(data)

    def flush(self) -> None:
        """See `Windows`."""
        torch.cuda.current_stream(self._device).synchronize()

    def read(self, rank: int, slot: int, offset: int, num_bytes: int) -> Tensor:
        """See `Windows`."""
        return self._windows[rank][slot, offset : offset + num_bytes]

    def close(self) -> None:
        """See `Windows`. What others have opened stays until they close it."""
        torch.cuda.synchronize(self._device)
        self._windows = []
        while self._opened:
            self._driver.close(self._opened.pop())
        if self._own:
            self._driver.free(self._own)
            self._own = 0
