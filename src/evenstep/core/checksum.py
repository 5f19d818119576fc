"""Whether tensors hold the same bytes, by numbers that are cheap to compute and to send."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.native import core

__all__ = ["checksum", "checksums"]

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_ROW = 128  # words that are added up at once; every tensor begins a row
_PIECE = 1 << 23  # words that are mixed at once


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's elements, at the speed of memory. Equal only among tensors of one device type.

    On a GPU it waits for the device.
    """
    return checksums([tensor])[0]


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """As `checksum`, of many tensors of one device: on a GPU in a few launches for all, and one wait."""
    flats = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    if all(flat.device.type == "cpu" for flat in flats):
        return [core.checksum(flat.data_ptr(), flat.numel()) for flat in flats]
    sums = _sums(flats).tolist()
    return [(total ^ flat.numel()) & 0xFFFFFFFFFFFFFFFF for total, flat in zip(sums, flats, strict=True)]


def _sums(flats: Sequence[Tensor]) -> Tensor:
    """What the words of each tensor, mixed with their places, add up to; integers, so any order of adding is right."""
    device = flats[0].device
    sizes = torch.tensor([-(-flat.numel() // 8) for flat in flats])
    rows = -(-sizes // _ROW)
    padded = [
        torch.nn.functional.pad(flat, (0, 8 * _ROW * int(count) - flat.numel()))
        for flat, count in zip(flats, rows, strict=True)
    ]
    words = torch.cat(padded).view(torch.int64).view(-1, _ROW)
    owner = torch.repeat_interleave(torch.arange(len(flats)), rows)
    begin = (torch.arange(len(owner)) - (rows.cumsum(0) - rows)[owner]) * _ROW  # of each row, within its tensor
    owner, begin, sizes = owner.to(device), begin.to(device), sizes.to(device)
    totals = torch.zeros(len(flats), dtype=torch.int64, device=device)
    within, step = torch.arange(_ROW, device=device), _PIECE // _ROW
    for first in range(0, len(words), step):
        piece, theirs = words[first : first + step], owner[first : first + step]
        place = begin[first : first + step, None] + within
        mixed = (piece ^ (place + 1)) * _ODD
        mixed = (mixed ^ mixed >> 29) * _ODD
        totals.index_add_(0, theirs, torch.where(place < sizes[theirs, None], mixed, 0).sum(1))
    return totals
