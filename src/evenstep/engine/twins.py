"""Copies of tensors that compute alike, to the bit.

Kernels choose their way by strides and by the alignment of the memory, and other ways have other last bits. So a copy
that takes the place of a tensor in a computation lies in memory as the tensor does.
"""

import torch
from torch import Tensor

from evenstep.transport.memory import ALIGNMENT

__all__ = ["twin_of"]


def twin_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, gaps and alignment, in memory of its own."""
    offset = tensor.data_ptr() % ALIGNMENT if tensor.layout is torch.strided else 0
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or offset % tensor.element_size():
        return tensor.clone()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    room = torch.empty(reach + ALIGNMENT, dtype=tensor.dtype, device=tensor.device)
    begin = (offset - room.data_ptr()) % ALIGNMENT // tensor.element_size()
    memory = tensor.detach().as_strided((reach,), (1,))
    room[begin : begin + reach].copy_(memory)
    twin = room.as_strided(tensor.shape, tensor.stride(), begin)
    return twin.requires_grad_(tensor.requires_grad)
