"""Cheap forks: this process's memory in huge pages, of which there is little to copy for a child, and to tear down.

A fork of a process that has imported everything takes 20 to 50 ms of a processor if its memory is in small pages, and a
third of that if it is in huge ones. A suite forks thousands of times.
"""

import ctypes
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MADV_COLLAPSE = 25  # Linux 6.1: now, and whatever the system's setting for such pages
_SIZE = 2 << 20
_PAGE = os.sysconf("SC_PAGESIZE")


def settle() -> None:
    """All that is there now stays for good: collections, here and in forks, neither go through it nor copy it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()
    fill()
    collapse()


def fill() -> None:
    """Use up what is free between things that stay: what a fork allocates then lies together, in few pages."""
    for size in reversed(range(16, 513, 16)):  # Python's own
        _use_up(ctypes.pythonapi.PyObject_Malloc, size)
    for size in range(24, 2033, 16):
        _use_up(ctypes.CDLL(None).malloc, size)


def _use_up(allocate: Any, size: int) -> None:
    """Allocate, and never free, until most of what is given out lies side by side, or it is enough."""
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    count = (16 << 10) // size
    for _ in range(8):
        places = [allocate(size) for _ in range(count)]
        apart = sum(not 0 < then - now <= 4 * size for now, then in itertools.pairwise(places))
        if apart <= 8 + count // 16:
            return


def private_bytes() -> int:
    """How much memory this process has for itself, which every fork has to be given a table of."""
    with open("/proc/self/statm") as file:
        _, resident, shared = map(int, file.read().split()[:3])
    return (resident - shared) * _PAGE


def collapse() -> None:
    """Move what lies in ordinary private memory into huge pages, as far as the kernel can and likes to."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in places():
        madvise(start, _SIZE, _MADV_COLLAPSE)  # one that it refuses stays as it is


def places() -> Iterator[int]:
    """Where a huge page could lie."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in span.split("-"))
            yield from range(-(-first // _SIZE) * _SIZE, last - _SIZE + 1, _SIZE)
