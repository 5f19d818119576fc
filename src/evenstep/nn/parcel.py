"""Tensors as bytes, to be sent between workers: sizes and types first, then the data. No pickle."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.core.octets import octets

__all__ = ["pack", "unpack"]


def pack(tensors: Sequence[Tensor | None]) -> Tensor:
    """All tensors as one tensor of bytes on the CPU, never empty. It also tells which need gradients or are None."""
    facts = [
        None if t is None else [str(t.dtype).removeprefix("torch."), list(t.shape), t.requires_grad] for t in tensors
    ]
    head = json.dumps(facts).encode()
    rows = [torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)]
    rows += [octets(t.detach().cpu()) for t in tensors if t is not None]
    return torch.cat(rows)


def unpack(parcel: Tensor, device: torch.device) -> list[Tensor | None]:
    """The inverse of `pack`; each tensor has its own memory."""
    start = 8 + int.from_bytes(parcel[:8].numpy().tobytes(), "little")
    found: list[Tensor | None] = []
    for fact in json.loads(parcel[8:start].numpy().tobytes()):
        if fact is None:
            found.append(None)
            continue
        dtype, shape, requires_grad = fact
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        end = start + tensor.nbytes
        octets(tensor).copy_(parcel[start:end])
        found.append(tensor.to(device).requires_grad_(requires_grad))
        start = end
    return found
