"""Pinned host memory that is never freed: CUDA graphs may read it whenever they are replayed."""

import torch
from torch import Tensor

__all__ = ["holds", "make_room", "take"]

_WORDS = 1 << 17
_chunks: list[Tensor] = []  # a captured graph may be replayed at any time, so none is ever freed
_used = 0


def make_room() -> None:
    """Make sure that there is some left to take. Call it outside captures, where memory can be allocated."""
    global _used
    if not _chunks or 2 * _used > _WORDS:
        _chunks.append(torch.empty(_WORDS, dtype=torch.int64, pin_memory=True))
        _used = 0


def take(table: Tensor) -> Tensor:
    """A permanent copy of some 64-bit words.

    Raises:
        RuntimeError: There is no room left in this capture.
    """
    global _used
    end = _used + table.numel()
    if not _chunks or end > _WORDS:
        raise RuntimeError("a CUDA graph needs more pinned memory than there is")
    kept, _used = _chunks[-1][_used:end].view(table.shape), end
    return kept.copy_(table)


def holds(address: int) -> bool:
    """Whether an address lies in such memory."""
    return any(chunk.data_ptr() <= address < chunk.data_ptr() + chunk.nbytes for chunk in _chunks)
