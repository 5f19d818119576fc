"""The bytes of a tensor, in the order of its elements."""

import torch
from torch import Tensor

__all__ = ["octets"]


def octets(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat tensor: a view of its memory if that is contiguous, else of a copy.

    A tensor of one element counts as contiguous whatever its strides are (a column of a part with one row), but torch
    gives no view of its bytes unless the last one is 1.
    """
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
