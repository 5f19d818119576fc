"""The first element in which two tensors on different workers differ: found by digests, shown in bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from evenstep.core.checksum import checksums
from evenstep.core.octets import octets
from evenstep.exchange.group import Group

__all__ = ["Element", "first_difference"]

_BLOCKS = 256


@dataclass(frozen=True)
class Element:
    """One element of two tensors.

    Attributes:
        index: Where it is.
        found: Its value in the first tensor, and its bits.
        expected: The same for the second.
    """

    index: list[int]
    found: tuple[str, str]
    expected: tuple[str, str]

    def __str__(self) -> str:
        (found, bits), (expected, right) = self.found, self.expected
        return f"element {self.index} is {found} (bits {bits}), not {expected} (bits {right})"


def first_difference(group: Group, tag: str, found: Tensor | None, expected: Tensor | None) -> Element | None:
    """Compare two tensors, each of which one worker has. All workers must call this alike.

    Args:
        group: The workers.
        tag: What this is, in words.
        found: The first tensor, if this worker has it.
        expected: The second, if this worker has it.

    Returns:
        The first element that differs; None if nobody has one of them, or their shapes or types differ.
    """
    pair = [None if t is None else t.detach().cpu().contiguous() for t in (found, expected)]
    heads = group.gather_json(f"{tag} blocks", [_head(t) for t in pair])
    one, other = (next((head[n] for head in heads if head[n] is not None), None) for n in range(2))
    if one is None or other is None or one[:2] != other[:2]:
        return None
    block = next((n for n, (a, b) in enumerate(zip_longest(one[2], other[2])) if a != b), None)
    if block is None:
        return None
    rows = group.gather_json(
        f"{tag} block", [None if t is None else _blocks(t)[block].numpy().tobytes().hex() for t in pair]
    )
    data = [bytes.fromhex(next(row[n] for row in rows if row[n] is not None)) for n in range(2)]
    return _compare(data, block, one[0], getattr(torch, one[1]))


def _compare(data: Sequence[bytes], block: int, shape: list[int], dtype: torch.dtype) -> Element:
    size = dtype.itemsize
    at = next(n for n, (a, b) in enumerate(zip(*data, strict=True)) if a != b) // size
    number = block * (_block_bytes(torch.Size(shape).numel() * size, size) // size) + at
    index = [int(i) for i in torch.unravel_index(torch.tensor(number), shape)] if shape else []
    ends = []
    for each in data:
        raw = each[at * size : (at + 1) * size]
        ends.append((str(torch.frombuffer(bytearray(raw), dtype=dtype).item()), f"0x{raw[::-1].hex()}"))
    return Element(index, ends[0], ends[1])


def _head(tensor: Tensor | None) -> list[object] | None:
    if tensor is None:
        return None
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksums(_blocks(tensor))]


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = octets(tensor)
    return torch.split(flat, _block_bytes(flat.numel(), tensor.element_size()))


def _block_bytes(num_bytes: int, element_bytes: int) -> int:
    return max(-(-num_bytes // _BLOCKS // element_bytes) * element_bytes, element_bytes)
