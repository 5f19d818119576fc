"""Sums over several sites of one machine, each with its own memory: the traffic of a ring, in the order of the tree.

Each site puts its nodes where the others can read them, adds up its share of all elements, and reads the sums of the
other shares. What is added, and in which order, does not depend on who adds it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from evenstep.engine.flat import Buffer, NodeSums
from evenstep.exchange.group import Group
from evenstep.exchange.sites import open_windows
from evenstep.plan import tree
from evenstep.plan.placement import cut
from evenstep.plan.summing import Summing
from evenstep.transport.windows import Windows

__all__ = ["Peers", "connect"]


def connect(group: Group, device: torch.device, plan: Summing, like: Sequence[Tensor]) -> "Peers":
    """Connect the sites of one machine: through each other's memory on GPUs, otherwise through the segment."""
    return Peers(group, plan, like, partial(open_windows, group, device, what="gradients"))


class Peers:
    """Adds up nodes.

    Args:
        group: The workers: each is a site.
        plan: Whose nodes there are, and how they are added up.
        like: The parameters.
        open_windows: Opens windows, given the slots of each worker and the bytes of a slot. All workers call it alike.
    """

    def __init__(
        self,
        group: Group,
        plan: Summing,
        like: Sequence[Tensor],
        open_windows: Callable[[Sequence[int], int], Windows],
    ) -> None:
        self._group, self._plan, self._open = group, plan, open_windows
        self._windows: Windows | None = None
        self._sums = Buffer(like)
        self._offsets: dict[torch.dtype, int] = {}
        self._slot_bytes = 0
        for dtype, flat in self._sums.flats.items():
            self._offsets[dtype] = self._slot_bytes
            self._slot_bytes += flat.nbytes
        self._num_nodes = [sum(1 for rank, _ in plan.nodes if rank == r) for r in range(group.num_workers)]

    @torch.no_grad()
    def add_up(self, nodes: Sequence[NodeSums]) -> list[Tensor | None]:
        """The sum of every parameter over all sites. All workers must call this alike; blocks until all have.

        Args:
            nodes: This site's nodes, from left to right.
        """
        if self._windows is None:
            self._windows = self._open([num + 1 for num in self._num_nodes], self._slot_bytes)
        for slot, node in enumerate(nodes):
            if node.buffer is not None:
                for dtype, flat in node.buffer.flats.items():
                    self._windows.write(slot, self._offsets[dtype], flat.view(torch.uint8))
        self._windows.flush()
        mine = [None if node.buffer is None else "".join("01"[here] for here in node.present) for node in nodes]
        of_all = self._group.gather_json("gradients: nodes", mine)
        present = [of_all[rank][node] for rank, node in self._plan.nodes]
        there = {row for row in present if row is not None}
        if len(there) == 1:
            self._in_shares([row is not None for row in present])
            (row,) = there
            return [view if here == "1" else None for view, here in zip(self._sums.views, row, strict=True)]
        return self._one_by_one(present)

    def _in_shares(self, present: Sequence[bool]) -> None:
        """Each site adds up a share of all elements: every node has the same parameters."""
        windows, me, place = self._windows, self._group.rank, self._num_nodes
        assert windows is not None, "windows are opened before anything is delivered"
        num_workers = self._group.num_workers
        for dtype, flat in self._sums.flats.items():
            first, end = cut(flat.numel(), num_workers)[me]
            if first < end:
                total = self._add(dtype, first, end - first, present)
                windows.write(place[me], self._offsets[dtype] + first * dtype.itemsize, total.view(torch.uint8))
        windows.flush()
        self._group.barrier("gradients: sums")
        for dtype, flat in self._sums.flats.items():
            for rank, (first, end) in enumerate(cut(flat.numel(), num_workers)):
                if first < end:
                    at, num_bytes = self._offsets[dtype] + first * dtype.itemsize, (end - first) * dtype.itemsize
                    flat[first:end].copy_(windows.read(rank, place[rank], at, num_bytes).view(dtype))

    def _one_by_one(self, present: Sequence[str | None]) -> list[Tensor | None]:
        """Every site adds up every parameter itself: some node lacks a parameter that another has."""
        found: list[Tensor | None] = []
        for i, view in enumerate(self._sums.views):
            here = [row is not None and row[i] == "1" for row in present]
            if any(here) and view.numel():
                first = int(view.storage_offset())
                flat = self._sums.flats[view.dtype][first : first + view.numel()]
                flat.copy_(self._add(view.dtype, first, view.numel(), here))
            found.append(view if any(here) else None)
        self._windows_flush()
        self._group.barrier("gradients: read")
        return found

    def _windows_flush(self) -> None:
        assert self._windows is not None, "windows are opened before anything is delivered"
        self._windows.flush()

    def _add(self, dtype: torch.dtype, first: int, count: int, present: Sequence[bool]) -> Tensor:
        """The sum of some elements over the nodes that are present, in the order of the tree."""
        assert self._windows is not None, "windows are opened before anything is delivered"
        at, num_bytes = self._offsets[dtype] + first * dtype.itemsize, count * dtype.itemsize
        program = iter(tree.present_program(self._plan.program, tuple(present)))
        stack: list[tuple[Tensor, bool]] = []  # each with whether we may change it
        for (rank, node), here in zip(self._plan.nodes, present, strict=True):
            if not here:
                continue
            stack.append((self._windows.read(rank, node, at, num_bytes).view(dtype), False))
            for _ in range(next(program)):
                right, _ = stack.pop()
                left, own = stack.pop()
                stack.append((left.add_(right) if own else left + right, True))
        ((total, _),) = stack
        return total

    def close(self) -> None:
        """Close the windows."""
        if self._windows is not None:
            self._windows.close()
            self._windows = None
