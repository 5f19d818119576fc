"""Checksums: whether tensors hold the same bytes, by numbers that are cheap to compute and to send.

A checksum has the same value wherever the tensor lies: on the CPU the C core computes it (`native/checksum.c`), on a
GPU a kernel, or torch's operations where there is no Triton.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from evenstep.core.octets import octets
from evenstep.native import core

__all__ = ["checksum", "checksums", "launch_checksums", "launch_checksums_of_pieces"]

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_ALSO_ODD = 0xBF58476D1CE4E5B9 - (1 << 64)
_ROW = 128  # words added up at once; every tensor begins a row
_PIECE = 1 << 23  # words mixed at once
_PROGRAM = 1 << 13  # words per program of the kernel


@lru_cache(maxsize=1)
def _kernel() -> ModuleType | None:
    """The kernel, or None where there is no Triton."""
    try:
        from evenstep.core import checksum_kernel
    except ImportError:
        return None
    return checksum_kernel


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's elements, at the speed of memory.

    On a GPU it waits for the device.
    """
    return checksums([tensor])[0]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """As `checksum`, for many tensors of one device: on a GPU a few launches for all of them, and one wait."""
    return [number & 0xFFFFFFFFFFFFFFFF for number in launch_checksums(tensors).tolist()]


@torch.no_grad()
def launch_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """As `checksums`, but as signed words [len(tensors)] on the tensors' device, without waiting for it."""
    dense = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    sizes = [tensor.nbytes for tensor in dense]
    if all(tensor.is_cpu for tensor in dense):
        numbers = [core.checksum(tensor.data_ptr(), size) for tensor, size in zip(dense, sizes, strict=True)]
        return torch.tensor([number - (number >> 63 << 64) for number in numbers], dtype=torch.int64)
    device = dense[0].device
    if _kernel() is None:
        return _sums([octets(tensor) for tensor in dense]) ^ torch.tensor(sizes).to(device)
    places = [tensor.data_ptr() for tensor in dense]
    padded = {n: _padded(octets(dense[n]), 8) for n, size in enumerate(sizes) if places[n] % 8 or size % 8}
    for n, words in padded.items():
        places[n] = words.data_ptr()
    return _sums_by_kernel(places, sizes, device)


def launch_checksums_of_pieces(flat: Tensor, num_bytes: int) -> Tensor:
    """As `launch_checksums`, of a tensor of bytes in pieces of `num_bytes`; the last piece is what is left."""
    first, size = flat.data_ptr(), flat.numel()
    if flat.is_cpu or _kernel() is None or first % 8 or num_bytes % 8 or size % 8:
        return launch_checksums([flat[begin : begin + num_bytes] for begin in range(0, size, num_bytes)])
    places = range(first, first + size, num_bytes)
    return _sums_by_kernel(places, [min(num_bytes, first + size - place) for place in places], flat.device)


def _sums_by_kernel(places: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """The checksums of pieces of a device's memory, in one launch.

    Nothing large is copied from the host: a copy from ordinary memory would wait for the device.

    Args:
        places: Their addresses, multiples of 8.
        sizes: The bytes of each; what comes after them in the last word is zero.
        device: The device.
    """
    module = _kernel()
    assert module is not None, "called only where Triton is available"
    words = [-(-size // 8) for size in sizes]
    table = torch.tensor([places, words, sizes], dtype=torch.int64)
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    num_programs = sum(-(-count // _PROGRAM) for count in words)
    owner, begin = _rows(table[1], _PROGRAM, num_programs)
    totals = torch.zeros(len(words), dtype=torch.int64, device=device)
    if num_programs:
        launch: Any = module.add_up
        tensors, programs = table[:2].t().contiguous(), torch.stack([owner, begin], 1)
        launch[(num_programs,)](tensors, programs, totals, PROGRAM=_PROGRAM, BLOCK=1024)
    return totals ^ table[2]


def _sums(flats: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor's words, mixed with their places; integers, so any order of adding is right."""
    device = flats[0].device
    sizes = torch.tensor([-(-flat.numel() // 8) for flat in flats])
    words = torch.cat([_padded(flat, 8 * _ROW) for flat in flats]).view(torch.int64).view(-1, _ROW)
    sizes = sizes.to(device)
    owner, begin = _rows(sizes, _ROW, len(words))
    totals = torch.zeros(len(flats), dtype=torch.int64, device=device)
    within, step = torch.arange(_ROW, device=device), _PIECE // _ROW
    for first in range(0, len(words), step):
        piece, theirs = words[first : first + step], owner[first : first + step]
        place = begin[first : first + step, None] + within
        mixed = _folded(piece ^ (place + 1) * _ODD, 32) * _ODD
        mixed = _folded(_folded(mixed, 29) * _ALSO_ODD, 32)
        totals.index_add_(0, theirs, torch.where(place < sizes[theirs, None], mixed, 0).sum(1))
    return totals


def _folded(words: Tensor, by: int) -> Tensor:
    """Each word xor its high bits, by an unsigned shift, which torch does not have."""
    return words ^ (words >> by & (1 << 64 - by) - 1)


def _padded(flat: Tensor, to: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % to))


def _rows(sizes: Tensor, row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """For every row of `row` words, of `num_rows` in all: whose it is, and which of its words comes first."""
    rows = -(-sizes // row)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), rows, output_size=num_rows)
    return owner, (torch.arange(num_rows, device=sizes.device) - (rows.cumsum(0) - rows)[owner]) * row
