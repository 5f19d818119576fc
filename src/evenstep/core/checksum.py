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

from evenstep.native import core

__all__ = ["checksum", "checksums", "launch_checksums"]

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
    sums = _sums([_bytes(tensor) for tensor in dense]) if _kernel() is None else _sums_by_kernel(dense, sizes)
    return sums ^ torch.tensor(sizes).to(sums.device, non_blocking=True)


def _sums_by_kernel(dense: Sequence[Tensor], num_bytes: Sequence[int]) -> Tensor:
    """As `_sums`, in one launch."""
    device, module = dense[0].device, _kernel()
    assert module is not None, "called only where Triton is available"
    places = [tensor.data_ptr() for tensor in dense]
    padded = {
        n: _padded(_bytes(dense[n]), 8)
        for n, (place, size) in enumerate(zip(places, num_bytes, strict=True))
        if place % 8 or size % 8
    }
    for n, words in padded.items():
        places[n] = words.data_ptr()
    sizes = (torch.tensor(num_bytes) + 7) // 8
    owner, begin = _rows(sizes, _PROGRAM)
    tensors = torch.stack([torch.tensor(places), sizes], 1).to(device, non_blocking=True)
    programs = torch.stack([owner, begin], 1).to(device, non_blocking=True)
    totals = torch.zeros(len(dense), dtype=torch.int64, device=device)
    if len(owner):
        launch: Any = module.add_up
        launch[(len(owner),)](tensors, programs, totals, PROGRAM=_PROGRAM, BLOCK=1024)
    return totals


def _sums(flats: Sequence[Tensor]) -> Tensor:
    """The sum of each tensor's words, mixed with their places; integers, so any order of adding is right."""
    device = flats[0].device
    sizes = torch.tensor([-(-flat.numel() // 8) for flat in flats])
    words = torch.cat([_padded(flat, 8 * _ROW) for flat in flats]).view(torch.int64).view(-1, _ROW)
    owner, begin = (each.to(device) for each in _rows(sizes, _ROW))
    sizes = sizes.to(device)
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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _padded(flat: Tensor, to: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % to))


def _rows(sizes: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """For every row of `row` words: which tensor it belongs to, and which of its words comes first."""
    rows = -(-sizes // row)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), rows)
    return owner, (torch.arange(len(owner)) - (rows.cumsum(0) - rows)[owner]) * row
