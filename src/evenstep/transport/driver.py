"""The few functions of the CUDA driver that torch lacks: memory for other processes, and what a graph does."""

import ctypes
from collections.abc import Iterator
from typing import Any

from evenstep.core.errors import EvenstepError

__all__ = ["Driver"]

_MEMCPY, _HOST = 1, 3  # types of a graph's nodes
_IN_HOST, _IN_DEVICE = 1, 2  # types of memory
_TYPE_OF_MEMORY = 2  # an attribute of a pointer


class _End(ctypes.Structure):
    """Where a copy begins or ends; half of CUDA_MEMCPY3D."""

    _fields_ = [  # as ctypes wants it
        ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("z", ctypes.c_size_t), ("lod", ctypes.c_size_t),
        ("kind", ctypes.c_int), ("host", ctypes.c_uint64), ("device", ctypes.c_uint64), ("array", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [  # as ctypes wants it
        ("source", _End), ("target", _End), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    ]  # fmt: skip


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]  # as ctypes wants it


class Driver:
    """The few functions of the CUDA driver that torch lacks."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise EvenstepError(f"the CUDA driver refuses: {name} says {(text.value or b'?').decode()}")

    def allocate(self, num_bytes: int) -> int:
        """Allocate device memory that can be shared; return its address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        """Free it."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """What another process needs to open it."""
        found = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(found), ctypes.c_uint64(address))
        return ctypes.string_at(ctypes.byref(found), 64)

    def open(self, handle: bytes) -> int:
        """Open memory of another process; return its address here."""
        address, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, 64)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(1))
        return address.value

    def close(self, address: int) -> None:
        """Close it again."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def touches_host(self, graph: int) -> Iterator[int | None]:
        """The addresses on the host that a graph copies from or to; None for a function that it calls there."""
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_uint64(graph), None, ctypes.byref(count))
        nodes = (ctypes.c_uint64 * count.value)()
        self._call("cuGraphGetNodes", ctypes.c_uint64(graph), nodes, ctypes.byref(count))
        for node in nodes:
            kind = ctypes.c_int()
            self._call("cuGraphNodeGetType", ctypes.c_uint64(node), ctypes.byref(kind))
            if kind.value == _HOST:
                yield None
            elif kind.value == _MEMCPY:
                copy = _Copy()
                self._call("cuGraphMemcpyNodeGetParams", ctypes.c_uint64(node), ctypes.byref(copy))
                for end in (copy.source, copy.target):
                    address = end.host if end.kind == _IN_HOST else end.device
                    if end.kind != _IN_DEVICE and not self._is_on_device(address):
                        yield address

    def _is_on_device(self, address: int) -> bool:
        kind = ctypes.c_uint()
        code = self._library.cuPointerGetAttribute(ctypes.byref(kind), _TYPE_OF_MEMORY, ctypes.c_uint64(address))
        return not code and kind.value == _IN_DEVICE
