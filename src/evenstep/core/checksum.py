"""Whether two tensors hold the same bytes, by a number that is cheap to compute and to send."""

import torch
from torch import Tensor

from evenstep.native import core

__all__ = ["checksum"]

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's elements, at the speed of memory. Equal only among tensors of one device type.

    On a GPU it waits for the device.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return core.checksum(flat.data_ptr(), flat.numel())
    words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
    mixed = (
        words ^ torch.arange(1, len(words) + 1, device=flat.device)
    ) * _ODD  # integers: any order of adding is right
    return int(((mixed ^ mixed >> 29) * _ODD).sum()) ^ flat.numel()
