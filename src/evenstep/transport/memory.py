"""Where the state of a run and its scratch lie: the host memory that the workers of a machine share, or a GPU's own.

Ranges are reserved from front to back, in the same order by everyone around a memory (a pure function of what was
prepared and trained), so nobody has to agree on where they are, and a worker that joins later finds them too.
"""

import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "DeviceBytes", "DeviceMemory", "FlatRegion", "HostMemory", "Memory", "Region", "aligned"]

ALIGNMENT = 64  # MKL and oneDNN may choose other kernels, with other bits, for other alignments
_PAGE = mmap.PAGESIZE
_WINDOW_BYTES = 1 << 30  # mapped at once: every mapping holds a descriptor, and there may be thousands of regions


class Region(Protocol):
    """A range of memory, handed out from front to back as tensors."""

    def tensor(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None, on_host: bool = False
    ) -> Tensor:
        """The next tensor of this region, aligned to 64 bytes, with its own storage.

        Args:
            shape: Its shape.
            dtype: Its type.
            stride: Its strides, without gaps; None: contiguous.
            on_host: Put it on the host, wherever the region is.
        """


class Memory(Protocol):
    """What holds the state of a site.

    Attributes:
        device: Where it is.
        shared: Whether several workers are around it.
    """

    device: torch.device
    shared: bool

    def reserve(self, num_bytes: int) -> Region:
        """Take the next range of the state. All workers around the memory must call this alike."""

    def scratch(self, num_bytes: int) -> Region:
        """Take the next range of memory that lasts as long as the workers stay the same. They must call this alike."""

    def clear_scratch(self) -> None:
        """Lay out scratch anew. All workers must call this alike."""

    def words(self, count: int) -> Tensor:
        """64-bit words, initially 0, on the host, shared by all around this memory. They must call this alike."""

    def fence(self) -> None:
        """Order writes: everyone sees what was written before this before what is written after it."""

    def at_work(self) -> AbstractContextManager[None]:
        """While this is open, launch work where steps run, after what was launched before it."""


class HostMemory:
    """The areas of a shared segment, mapped as they are needed.

    Args:
        fd: The segment's file.
        state: Where the area of the state begins.
        scratch: Where the area of scratch begins.
        across: Where the area of scratch that several machines lay out alike begins.
    """

    device = torch.device("cpu")
    shared = True

    def __init__(self, fd: int, state: int, scratch: int, across: int) -> None:
        self._fd, self._begins = fd, (scratch, across)
        self._state = _Area(fd, state)
        self.clear_scratch()

    def reserve(self, num_bytes: int) -> Region:
        """See `Memory`."""
        return self._state.reserve(num_bytes)

    def scratch(self, num_bytes: int) -> Region:
        """See `Memory`."""
        return self._scratch.reserve(num_bytes)

    def clear_scratch(self) -> None:
        """See `Memory`."""
        self._scratch, self._across = (_Area(self._fd, begin) for begin in self._begins)

    def across(self, num_bytes: int) -> Region:
        """As `scratch`, but laid out alike on all machines, and so at the same place of each."""
        return self._across.reserve(num_bytes)

    def words(self, count: int) -> Tensor:
        """See `Memory`."""
        return self.reserve(8 * count).tensor(torch.Size([count]), torch.int64)

    def fence(self) -> None:
        """Nothing to do: marks are stored by `core.store`, which is ordered after all earlier writes."""

    def locate(self, tensor: Tensor) -> int:
        """Where in the segment a tensor of a region begins: the same on every machine."""
        for area in (self._state, self._across, self._scratch):
            place = area.locate(tensor.data_ptr())
            if place is not None:
                return place
        raise AssertionError("the tensor does not lie in this memory")

    def at_work(self) -> AbstractContextManager[None]:
        """Nothing to do: the host does work at once."""
        return nullcontext()


class DeviceMemory:
    """Memory of a GPU that only this process uses: writes happen in the order of its stream.

    Args:
        device: Which GPU.
    """

    shared = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The default stream is shared by everything, and cannot be captured.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """See `Memory`; work launched elsewhere afterwards comes after what was launched inside."""
        if self._stream is None:
            yield
            return
        around = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(around)
        with torch.cuda.stream(self._stream):
            yield
        around.wait_stream(self._stream)

    def reserve(self, num_bytes: int) -> "FlatRegion":
        """See `Memory`."""
        return FlatRegion(self.device, num_bytes)

    scratch = reserve

    def clear_scratch(self) -> None:
        """Nothing to do: tensors are freed when nobody holds them."""

    def words(self, count: int) -> Tensor:
        """See `Memory`."""
        return torch.zeros(count, dtype=torch.int64)

    def fence(self) -> None:
        """Nothing to do: only this process sees the words, and its stream is ordered."""


class _Mapped:
    """A range of the segment, mapped into this process. Its tensors keep it mapped."""

    def __init__(self, window: mmap.mmap, offset: int, num_bytes: int) -> None:
        self._memory = window
        self._used = offset
        self._end = offset + num_bytes

    def tensor(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None, on_host: bool = True
    ) -> Tensor:
        """See `Region`."""
        count = shape.numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used)
        assert self._used + count * flat.element_size() <= self._end, "a tensor fits into what is left of its region"
        self._used += aligned(count * flat.element_size())
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


class _Area:
    """A part of the segment from which regions are reserved, from front to back."""

    def __init__(self, fd: int, begin: int) -> None:
        self._fd, self._end = fd, begin
        self._window: mmap.mmap | None = None
        self._window_begin = 0
        self._mapped: list[tuple[int, int, int]] = []  # address, bytes, place in the segment

    def reserve(self, num_bytes: int) -> _Mapped:
        begin, self._end = self._end, self._end + aligned(max(num_bytes, 1), _PAGE)
        if self._window is None or self._end > self._window_begin + len(self._window):
            self._window = mmap.mmap(self._fd, max(self._end - begin, _WINDOW_BYTES), offset=begin)
            self._window_begin = begin
            address = torch.frombuffer(self._window, dtype=torch.uint8, count=1).data_ptr()
            self._mapped.append((address, len(self._window), begin))
        return _Mapped(self._window, begin - self._window_begin, self._end - begin)

    def locate(self, address: int) -> int | None:
        for begin, num_bytes, place in self._mapped:
            if begin <= address < begin + num_bytes:
                return place + address - begin
        return None


class FlatRegion:
    """A region of private memory: one piece on the device, and one on the host for what has to be there.

    Args:
        device: Where it is.
        num_bytes: The size of either piece.

    Attributes:
        flats: The used part of each piece, as bytes.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._num_bytes = device, num_bytes
        self._pieces: dict[torch.device, tuple[Tensor, int]] = {}

    @property
    def flats(self) -> list[Tensor]:  # noqa: D102  # an attribute, documented with the class
        return [piece[:used] for piece, used in self._pieces.values()]

    def tensor(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None, on_host: bool = False
    ) -> Tensor:
        """See `Region`."""
        device = torch.device("cpu") if on_host else self._device
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device=device)
        if device not in self._pieces:
            self._pieces[device] = torch.empty(self._num_bytes, dtype=torch.uint8, device=device), 0
        piece, used = self._pieces[device]
        end = used + shape.numel() * dtype.itemsize
        assert end <= self._num_bytes, "a tensor fits into what is left of its region"
        self._pieces[device] = piece, aligned(end)
        flat = own_storage(piece[used:end]).view(dtype)
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def own_storage(piece: Tensor) -> Tensor:
    """The same memory with its own storage, and so its own count of changes.

    Args:
        piece: Bytes [n].
    """
    if piece.device.type == "cpu":
        return torch.frombuffer(piece.numpy(), dtype=torch.uint8)
    return torch.as_tensor(DeviceBytes(piece.data_ptr(), piece.numel(), piece), device=piece.device)


class DeviceBytes:
    """Device memory at an address, in a form that torch takes over without a copy.

    Args:
        address: Where it begins.
        num_bytes: Its size.
        owner: An object to keep alive as long as the memory is used.
    """

    def __init__(self, address: int, num_bytes: int, owner: object = None) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def aligned(num_bytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-num_bytes // to) * to
