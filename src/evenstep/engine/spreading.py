"""How values get from one site to all others: rarely, and unchanged."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenstep.exchange.group import Group
from evenstep.plan.sites import Sites

__all__ = ["Spreading", "ThroughHost"]

_CHUNK_BYTES = 1 << 24


class Spreading(Protocol):
    """Brings tensors of one site to all sites."""

    def spread(
        self, tag: str, tensors: Sequence[Tensor], source: int, sites: Sites, only: Collection[int] | None = None
    ) -> None:
        """Give every site the values of one worker. All workers must call this alike, inside an operation.

        Args:
            tag: What is spread, in words.
            tensors: Dense, of the same forms on all workers; where a site has several workers, the same memory.
            source: The rank of the worker whose values count.
            sites: The sites.
            only: The numbers of the sites that need them; None: all.
        """


class ThroughHost:
    """Through the segment that all sites of one machine share.

    Making one takes room in it, so all workers must do it alike.

    Args:
        group: The workers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._room = group.segment.memory.reserve(_CHUNK_BYTES).tensor(torch.Size([_CHUNK_BYTES]), torch.uint8)

    @torch.no_grad()
    def spread(
        self, tag: str, tensors: Sequence[Tensor], source: int, sites: Sites, only: Collection[int] | None = None
    ) -> None:
        """See `Spreading`."""
        gives, takes = self._group.rank == source, sites.takes(source, only)
        for chunk in _chunks(tensors):
            at = 0
            places = []
            for flat in chunk:
                places.append(self._room[at : at + flat.numel()])
                at += flat.numel()
            if gives:
                for place, flat in zip(places, chunk, strict=True):
                    place.copy_(flat)
            self._group.barrier(f"{tag}: given")
            if takes:
                for place, flat in zip(places, chunk, strict=True):
                    flat.copy_(place)
            self._group.barrier(f"{tag}: taken")


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The bytes of all tensors, in groups of pieces; each group fits and is spread at once."""
    chunks: list[list[Tensor]] = [[]]
    room = _CHUNK_BYTES
    for tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        while flat.numel():
            if not room:
                chunks.append([])
                room = _CHUNK_BYTES
            piece, flat = flat[:room], flat[room:]
            chunks[-1].append(piece)
            room -= piece.numel()
    return [chunk for chunk in chunks if chunk]
