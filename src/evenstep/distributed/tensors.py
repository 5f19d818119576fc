"""Tensors as memory: what a collective needs before it can take addresses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.core.errors import UnsupportedError

__all__ = ["check_dense", "check_same_size", "contiguous", "copy_back", "num_bytes", "parts", "split"]


def check_dense(tensor: Tensor) -> None:
    """Refuse a tensor whose memory cannot be read as it is.

    Raises:
        UnsupportedError: It is not a dense CPU tensor.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"the evenstep backend takes dense CPU tensors, not {tensor.layout} on {tensor.device}; make a group with "
            'another backend for others: new_group(backend="nccl")'
        )


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else a copy that is."""
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def copy_back(tensor: Tensor, target: Tensor) -> None:
    """Copy what was written to a contiguous copy back to the tensor."""
    if target is not tensor:
        tensor.detach().copy_(target)


def num_bytes(tensor: Tensor) -> int:
    """The size of its elements."""
    return tensor.numel() * tensor.element_size()


def parts(whole: Tensor, part: Tensor, num_parts: int) -> Sequence[Tensor]:
    """The parts of a tensor that was made by stacking or concatenating tensors of one size."""
    if whole.numel() != part.numel() * num_parts:
        raise UnsupportedError(
            f"a tensor of {list(whole.shape)} has no {num_parts} parts of {list(part.shape)}; make one of the two fit"
        )
    return whole.detach().view(num_parts, -1).unbind(0) if whole.is_contiguous() else whole.chunk(num_parts)


def check_same_size(name: str, tensor: Tensor, pieces: Sequence[Tensor]) -> None:
    """Refuse pieces that are not of the size and dtype of a tensor.

    Raises:
        UnsupportedError: One is not.
    """
    for piece in pieces:
        if piece.numel() != tensor.numel() or piece.dtype != tensor.dtype:
            raise UnsupportedError(
                f"{name} got a tensor of {list(piece.shape)} {piece.dtype} beside one of {list(tensor.shape)} "
                f"{tensor.dtype}; all must have one size and dtype"
            )


def split(tensor: Tensor, sizes: list[int], num_parts: int) -> Sequence[Tensor]:
    """Cut a tensor along its first dimension: into parts of these sizes, or into equal ones if there are none."""
    check_dense(tensor)
    if not sizes:
        if len(tensor) % num_parts:
            raise UnsupportedError(f"a tensor of {list(tensor.shape)} has no {num_parts} equal parts; give split sizes")
        sizes = [len(tensor) // num_parts] * num_parts
    return torch.split(tensor.detach(), sizes)
