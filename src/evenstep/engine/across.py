"""Gradients over several machines: each adds up its own, and the results meet at the home of every piece.

A worker that owns a bucket on its machine adds up what the workers there have, and puts the result at the homes of the
bucket's pieces. At the home of a piece, the owner adds up the nodes of all machines in tree order and puts the sum
everywhere, unless every machine is its home. All of this happens while backward still runs, whenever this worker gives
or receives something.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.engine.delivery import Delivery
from evenstep.exchange.bridged import EVERYONE, Puts
from evenstep.exchange.group import tree_sum
from evenstep.native import core
from evenstep.plan import tree
from evenstep.plan.across import EVERY, Across, Piece
from evenstep.transport.memory import ALIGNMENT, HostMemory, aligned

__all__ = ["AcrossMachines"]


class _GradientArea:
    """Room for the gradients of all parameters, bucket by bucket, each with a byte that says whether it is there."""

    def __init__(self, plan: Across, memory: HostMemory, like: Sequence[Tensor]) -> None:
        self.present: list[Any] = []  # by bucket
        self.data: list[Tensor] = []  # the bytes of each bucket
        self.tensors: dict[int, Tensor] = {}  # by parameter
        self._heads: list[Tensor] = []
        for bucket, size in zip(plan.local.buckets, plan.bucket_bytes, strict=True):
            head = aligned(len(bucket))
            whole = memory.across(head + size + ALIGNMENT).tensor(torch.Size([head + size]), torch.uint8)
            self._heads.append(whole)
            self.present.append(whole[: len(bucket)].numpy())
            self.data.append(whole[head:])
            for i in bucket:
                t, begin = like[i], head + plan.offsets[i]
                flat = whole[begin : begin + t.numel() * t.element_size()].view(t.dtype)
                self.tensors[i] = flat.as_strided(t.shape, t.stride(), flat.storage_offset())

    def range(self, piece: Piece) -> Tensor:
        """The bytes of a piece; a bucket's first piece begins with the bytes that say which parameters are there."""
        data = self.data[piece.bucket]
        if piece.begin == 0:
            whole = self._heads[piece.bucket]
            return whole[: len(whole) - len(data) + piece.end]
        return data[piece.begin : piece.end]


class AcrossMachines:
    """The delivery between machines; see `Delivery`.

    Args:
        plan: Who adds up what.
        inside: The delivery between the workers of this machine.
        memory: The memory of this machine; laid out alike on all.
        like: The parameters.
        words: A row of words for each piece: one for every node, and one for the sum.
        puts: The way to the other machines.
    """

    def __init__(
        self, plan: Across, inside: Delivery, memory: HostMemory, like: Sequence[Tensor], words: Tensor, puts: Puts
    ) -> None:
        self._plan, self._inside, self._words, self._puts = plan, inside, words, puts
        self._like = like
        self._nodes = [_GradientArea(plan, memory, like) for _ in plan.nodes]
        self._sums = _GradientArea(plan, memory, like)
        self._alone = len(plan.workers) == 1
        self._at_home = all(piece.home == EVERY for piece in plan.pieces)  # then no sum travels
        self._owned = plan.local.owned_buckets
        self._inputs = [plan.inputs_of(plan.nodes[n][1]) for n in plan.own]

    # ---- what a delivery does ----

    def begin(self, token: int, active: Sequence[int]) -> None:
        """See `Delivery`."""
        if self._at_home:  # nodes of the last step may still be on their way
            self._puts.flush()
        workers = self._plan.workers
        here = [rank - workers.start for rank in active if rank in workers]
        machines = {self._plan.machines[rank] for rank in active}
        self._inside.begin(token, here)
        self._token = token
        self._expected = [machine in machines for machine, _ in self._plan.nodes]
        self._given: set[int] = set()
        self._open = list(self._owned)  # buckets not yet added up on this machine
        self._pieces = [
            n for bucket in self._owned for n in self._plan.pieces_of[bucket]
        ]  # pieces whose sum is missing
        self._missing = {bucket: len(self._plan.pieces_of[bucket]) for bucket in self._owned}

    def place(self, i: int, node: int) -> Tensor | None:
        """See `Delivery`. The nodes of a worker that is alone on its machine are the machine's."""
        return self._nodes[self._plan.own[node]].tensors[i] if self._alone else self._inside.place(i, node)

    def give(self, bucket: int, nodes: Sequence[Sequence[Tensor | None]]) -> None:
        """See `Delivery`."""
        self._inside.give(bucket, nodes)
        self._given.add(bucket)
        self._advance()

    def ready(self, bucket: int) -> bool:
        """See `Delivery`."""
        self._advance()
        return not self._missing[bucket]

    def wait(self, bucket: int) -> None:
        """See `Delivery`."""
        self._puts.wait(lambda: self.ready(bucket), f"the sums of bucket {bucket}")

    def nodes(self, i: int) -> list[Tensor | None]:
        """See `Delivery`. There is one: the sum over all machines."""
        bucket = self._plan.local.bucket_of[i]
        here = bool(self._sums.present[bucket][self._plan.local.buckets[bucket].index(i)])
        return [self._sums.tensors[i] if here else None]

    def settle(self) -> None:
        """See `Delivery`."""
        if not self._at_home:
            self._puts.flush()

    def end(self) -> None:
        """See `Delivery`."""
        self._inside.end()

    # ---- how it comes about ----

    def _advance(self) -> None:
        """Do what can be done now."""
        for bucket in [b for b in self._open if b in self._given and self._inside.ready(b)]:
            self._open.remove(bucket)
            self._add_up_here(bucket)
        for n in [n for n in self._pieces if self._has_come(n)]:
            self._pieces.remove(n)
            self._missing[self._plan.pieces[n].bucket] -= 1

    def _add_up_here(self, bucket: int) -> None:
        """Add up this machine's nodes from those of its workers; then put them at the homes of the pieces."""
        plan = self._plan
        for place, i in enumerate(plan.local.buckets[bucket]):
            theirs = self._inside.nodes(i)
            for own, (inside, program) in zip(plan.own, self._inputs, strict=True):
                found = tuple(theirs[n] is not None for n in inside)
                inputs = [node for n in inside if (node := theirs[n]) is not None]
                area = self._nodes[own]
                area.present[bucket][place] = bool(inputs)
                _add(inputs, tree.present_program(program, found), area.tensors[i])
        for own in plan.own:
            anything = int(bool(self._nodes[own].present[bucket].any()))
            for n in plan.pieces_of[bucket]:
                piece = plan.pieces[n]
                if piece.home in (plan.machine, EVERY):
                    core.store(self._word(n, own), 2 * self._token + anything)
                if piece.home != plan.machine:
                    target = EVERYONE if piece.home == EVERY else piece.home
                    data = self._nodes[own].range(piece) if anything else None
                    self._puts.put(target, data, self._words[n, own : own + 1], 2 * self._token + anything)

    def _has_come(self, n: int) -> bool:
        """Whether the sum of a piece is here; at its home this adds it up."""
        plan, piece = self._plan, self._plan.pieces[n]
        if piece.home not in (plan.machine, EVERY):
            word = core.load(self._word(n, len(plan.nodes)))
            if word >> 1 < self._token:
                return False
            if piece.begin or not word & 1:
                self._sums.present[piece.bucket][:] = word & 1
            return True
        words = [core.load(self._word(n, node)) if here else 0 for node, here in enumerate(self._expected)]
        if any(here and word >> 1 < self._token for here, word in zip(self._expected, words, strict=True)):
            return False
        there = [node for node, word in enumerate(words) if word & 1]
        self._add_up(piece, there)
        if piece.home == EVERY:
            return True
        data = self._sums.range(piece) if there else None
        self._puts.put(EVERYONE, data, self._words[n, len(plan.nodes) :][:1], 2 * self._token + bool(there))
        return True

    def _add_up(self, piece: Piece, nodes: Sequence[int]) -> None:
        """Add up a piece over some nodes, parameters with the same nodes present at once."""
        plan, b = self._plan, piece.bucket
        whole = piece.end - piece.begin == plan.bucket_bytes[b]  # otherwise a part of one parameter, which is there
        present = {node: self._nodes[node].present[b].tolist() if whole else [1] for node in nodes}
        runs: list[tuple[tuple[int, ...], torch.dtype, int, int]] = []
        for place, i in enumerate(piece.parameters):
            there = tuple(node for node in nodes if present[node][place])
            self._sums.present[b][place] = bool(there)
            t = self._like[i]
            begin = max(plan.offsets[i], piece.begin)
            end = min(plan.offsets[i] + aligned(t.numel() * t.element_size()), piece.end)
            if runs and runs[-1][:2] == (there, t.dtype):
                runs[-1] = (there, t.dtype, runs[-1][2], end)
            elif there:
                runs.append((there, t.dtype, begin, end))
        for there, dtype, begin, end in runs:
            inputs = [self._nodes[node].data[b][begin:end].view(dtype) for node in there]
            program = tree.present_program(plan.program, tuple(n in there for n in range(len(plan.nodes))))
            _add(inputs, program, self._sums.data[b][begin:end].view(dtype))

    def _word(self, piece: int, number: int) -> int:
        return self._words.data_ptr() + 8 * (piece * self._words.shape[1] + number)


def _add(inputs: Sequence[Tensor], program: bytes, out: Tensor) -> None:
    """Add up the inputs that are there, if any, into `out`."""
    if len(inputs) > 1:
        tree_sum(inputs, program, out)
    elif inputs and inputs[0].data_ptr() != out.data_ptr():
        out.copy_(inputs[0])
