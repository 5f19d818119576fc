"""Ranks on several machines: shared memory inside a machine, gloo between the leaders, one for each machine.

Sums keep the tree order over all ranks: a leader adds what its ranks give as far as the tree allows, the leaders
exchange these partial sums, and everyone gets them added in tree order. Collectives that move data go through the
leaders too: a gather or an all-to-all sends everything everywhere, which is correct but not cheap. Messages go through
gloo, rank to rank.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Work

from evenstep.core.errors import EvenstepError, MismatchError, SilenceError, UnsupportedError
from evenstep.distributed.failures import Failures, Word
from evenstep.distributed.leaders import Leaders
from evenstep.distributed.machine_messages import DirectWork
from evenstep.distributed.members import Member
from evenstep.distributed.reductions import ITEM_BYTES
from evenstep.distributed.team import ANY, Call, Pieces, Team
from evenstep.native import core
from evenstep.plan import tree
from evenstep.transport.links import gloo

__all__ = ["MachineRanks"]

_TAG_BYTES = 256
_PATIENCE_S = 2 * Failures.report_s  # how much longer than its leader a rank waits


class MachineRanks:
    """The ranks of a group that spans machines, as one of them sees them.

    Args:
        store: Where ranks of different machines find each other, and report a failure.
        team: The ranks of this machine.
        members: Everyone, by rank.
        rank: The number of this one.
        machines: The ranks of each machine, in order; leaders in order of rank.
        timeout_s: How long to wait for the others to arrive.
    """

    def __init__(
        self,
        store: Any,
        team: Team,
        members: Sequence[Member],
        rank: int,
        machines: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> None:
        self.team: Team | None = None
        self._team = team
        self._failures = Failures(Word(store), team)
        self._members = members
        self._rank = rank
        self._machines = machines
        self._mine = next(number for number, ranks in enumerate(machines) if rank in ranks)
        self._leads = rank == machines[self._mine][0]
        self._nodes = [_nodes(ranks, len(members)) for ranks in machines]
        self._number = 0
        self._leaders: Any = self._meet_leaders(store, timeout_s) if self._leads else None
        self._direct: Any = gloo(PrefixStore("evenstep/ranks/", store), rank, len(members), None, timeout_s)

    def _meet_leaders(self, store: Any, timeout_s: float) -> Leaders:
        count = len(self._machines)
        group = gloo(PrefixStore("evenstep/leaders/", store), self._mine, count, None, timeout_s)
        others = ", ".join(str(self._leader(number)) for number in range(count) if number != self._mine)
        return Leaders(group, count, others, self._failures, self._team.check)

    # ---- operations ----

    def call(self, call: Call, ins: Pieces, outs: Pieces, timeout_s: float) -> None:
        """See `Ranks`."""
        kind, tag, dtype, op, root, count = call
        piece = count * ITEM_BYTES[dtype]
        with self._telling():
            self._agree(tag, timeout_s)
            if not piece:
                return
            mine, here = _flat(ins, piece), slice(self._rank * piece, (self._rank + 1) * piece)
            if kind in (core.ES_ALL_REDUCE, core.ES_REDUCE):
                found = [self._sum(tag, dtype, op, mine, timeout_s)]
            elif kind == core.ES_REDUCE_SCATTER:
                found = [self._sum(tag, dtype, op, mine, timeout_s)[here]]
            elif kind == core.ES_BROADCAST:
                found = [self._from_root(tag, root, mine, piece, timeout_s)]
            elif kind == core.ES_SCATTER:
                found = [self._from_root(tag, root, mine, piece * len(self._members), timeout_s)[here]]
            else:
                found = self._gather(tag, mine, timeout_s)
        _put(found, outs, piece)

    def all_to_all(
        self,
        tag: bytes,
        ins: tuple[int, ...],
        in_bytes: tuple[int, ...],
        outs: tuple[int, ...],
        out_bytes: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        """See `Ranks`."""
        with self._telling():
            self._agree(tag, timeout_s)
            sizes = torch.tensor(in_bytes, dtype=torch.int64).view(torch.uint8)
            table = torch.stack(self._gather(tag, sizes, timeout_s)).view(torch.int64)
            for source, expected in enumerate(out_bytes):
                if table[source, self._rank] != expected:
                    self._failures.fail(
                        MismatchError,
                        f"{self._members[source]} gives {table[source, self._rank]} bytes to "
                        f"{self._members[self._rank]}, which expects {expected}, in {self._at(tag)}",
                    )
            most = int(table.sum(1).max())
            given = [_at(address, num_bytes) for address, num_bytes in zip(ins, in_bytes, strict=True)]
            padding = torch.zeros(most - sum(in_bytes), dtype=torch.uint8)
            everything = self._gather(tag, torch.cat([*given, padding]), timeout_s) if most else []
        for source, data in enumerate(everything):
            start = int(table[source, : self._rank].sum())
            _at(outs[source], out_bytes[source]).copy_(data[start : start + out_bytes[source]])

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any) -> Work:
        """See `Ranks`."""
        ours, name = tensor.detach().contiguous(), f"send to {self._members[peer]} with tag {tag}"
        return self._message(name, peer, ours, timeout_s, record, lambda gloo: gloo.send([ours], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any) -> Work:
        """See `Ranks`.

        Raises:
            UnsupportedError: The tensor is not contiguous.
        """
        if not tensor.is_contiguous():
            raise UnsupportedError("a message between machines needs a contiguous tensor; receive into one and copy")
        ours = tensor.detach()
        if peer == ANY:
            name = f"receive from any rank with tag {tag}"
            return self._message(name, peer, ours, timeout_s, record, lambda gloo: gloo.recv_anysource([ours], tag))
        name = f"receive from {self._members[peer]} with tag {tag}"
        return self._message(name, peer, ours, timeout_s, record, lambda gloo: gloo.recv([ours], peer, tag))

    def _message(
        self, name: str, peer: int, tensor: Tensor, timeout_s: float, record: Any, start: Callable[[Any], Work]
    ) -> Work:
        self._team.check()
        fail = partial(self._lose_message, name, peer)
        try:
            return DirectWork(start(self._direct), tensor, timeout_s, record, fail)
        except RuntimeError as error:  # the connection was already broken
            fail(error, timeout_s)

    def in_background(self, yes: bool) -> None:
        """See `Ranks`."""
        self._team.in_background(yes)

    def check(self) -> None:
        """See `Ranks`."""
        self._team.check()

    def abort(self) -> None:
        """See `Ranks`."""
        self._team.abort()

    def close(self) -> None:
        """See `Ranks`."""
        self._leaders = self._direct = None
        self._team.close()

    # ---- between machines ----

    def _agree(self, tag: bytes, timeout_s: float) -> None:
        """Meet everyone, so that no rank starts what others do not; a rank at another operation is a mismatch."""
        self._number += 1
        self._local(Call(core.ES_BARRIER, tag), None, None, timeout_s, patience_s=0.0)
        if self._leads:
            text = torch.zeros(_TAG_BYTES, dtype=torch.uint8)
            short = bytearray(tag[:_TAG_BYTES])
            text[: len(short)] = torch.frombuffer(short, dtype=torch.uint8)
            for number, theirs in enumerate(self._leaders.gather(text, self._at(tag), timeout_s)):
                if not torch.equal(theirs, text):
                    self._disagree(self._at(tag), number, bytes(theirs.tolist()).rstrip(b"\0"))
        self._local(Call(core.ES_BARRIER, tag), None, None, timeout_s)

    def _sum(self, tag: bytes, dtype: int, op: int, mine: Tensor, timeout_s: float) -> Tensor:
        """The reduction of what all ranks give, in tree order."""
        given = self._local_gather(tag, mine, timeout_s)
        total = torch.empty_like(mine)
        if self._leads:
            width = max(len(nodes) for nodes in self._nodes)
            nodes = torch.zeros(width, len(mine), dtype=torch.uint8)
            for row, span in zip(nodes, self._nodes[self._mine], strict=False):
                leaves = tuple((rank, rank + 1) for rank in range(*span))
                inputs = [given[self._machines[self._mine].index(rank)] for rank, _ in leaves]
                _reduce(dtype, op, inputs, tree.merge_program(leaves, len(self._members)), row)
            found = self._leaders.gather(nodes, self._at(tag), timeout_s)
            rows: dict[tuple[int, int], Tensor] = {}
            for spans_there, theirs in zip(self._nodes, found, strict=True):
                rows.update(zip(spans_there, theirs, strict=False))
            spans = tuple(sorted(rows))
            _reduce(dtype, op, [rows[span] for span in spans], tree.merge_program(spans, len(self._members)), total)
        return self._local_broadcast(tag, total, 0, timeout_s)

    def _gather(self, tag: bytes, mine: Tensor, timeout_s: float) -> list[Tensor]:
        """What all ranks give, by rank."""
        given = self._local_gather(tag, mine, timeout_s)
        everything = torch.empty(len(self._members), len(mine), dtype=torch.uint8)
        if self._leads:
            most = max(len(ranks) for ranks in self._machines)
            padded = torch.zeros(most, len(mine), dtype=torch.uint8)
            padded[: len(given)] = torch.stack(given)
            found = self._leaders.gather(padded, self._at(tag), timeout_s)
            for number, ranks in enumerate(self._machines):
                everything[list(ranks)] = found[number][: len(ranks)]
        return list(self._local_broadcast(tag, everything.view(-1), 0, timeout_s).view_as(everything))

    def _from_root(self, tag: bytes, root: int, mine: Tensor, num_bytes: int, timeout_s: float) -> Tensor:
        """What the root gives."""
        home = next(number for number, ranks in enumerate(self._machines) if root in ranks)
        data = mine if self._rank == root else torch.empty(num_bytes, dtype=torch.uint8)
        if self._mine == home:
            data = self._local_broadcast(tag, data, self._machines[home].index(root), timeout_s)
        if self._leads:
            self._leaders.broadcast(data, home, self._at(tag), timeout_s)
        return data if self._mine == home else self._local_broadcast(tag, data, 0, timeout_s)

    def _local_gather(self, tag: bytes, mine: Tensor, timeout_s: float) -> list[Tensor]:
        found = [torch.empty_like(mine) for _ in self._machines[self._mine]] if self._leads else []
        outs = tuple(each.data_ptr() for each in found) if self._leads else None
        self._local(Call(core.ES_GATHER, tag, num_items=len(mine)), mine.data_ptr(), outs, timeout_s)
        return found

    def _local_broadcast(self, tag: bytes, data: Tensor, root: int, timeout_s: float) -> Tensor:
        address, gives = data.data_ptr(), self._team.index == root
        ins, outs = (address, None) if gives else (None, address)
        self._local(Call(core.ES_BROADCAST, tag, root=root, num_items=len(data)), ins, outs, timeout_s)
        return data

    def _local(self, call: Call, ins: Pieces, outs: Pieces, timeout_s: float, patience_s: float = _PATIENCE_S) -> None:
        """Do a part of an operation inside the machine.

        A rank may wait here for a leader that waits for another machine, which waits for one of its own ranks. Each
        waits longer than the next one in this chain, so that the error names the rank that is really missing.
        """
        self._team.number = self._number - 1  # all parts belong to one operation of the group
        self._team.call(call, ins, outs, timeout_s + patience_s)

    # ---- failure ----

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Leave word of a failure for the other machines."""
        try:
            with self._failures.telling():
                yield
        except EvenstepError:
            self._direct = None  # ranks that wait for our message see the connection close
            raise

    def _at(self, tag: bytes) -> str:
        return f"{tag.decode(errors='replace')}, operation {self._number} of the group"

    def _disagree(self, here: str, number: int, their_tag: bytes) -> NoReturn:
        sides = [f"{self._leader(self._mine)} is at {here}", f"{self._leader(number)} is at {self._at(their_tag)}"]
        first, second = sides if self._mine < number else reversed(sides)
        text = (
            f"{first}, but {second}: all ranks of a group must start the same operations in the same order, on tensors "
            "of one shape and dtype"
        )
        self._failures.fail(MismatchError, text)

    def _leader(self, number: int) -> Member:
        return self._members[self._machines[number][0]]

    def _lose_message(self, name: str, peer: int, error: RuntimeError, timeout_s: float) -> NoReturn:
        me, other = self._members[self._rank], "a rank" if peer == ANY else self._members[peer]
        with self._telling():
            if "imed out" not in str(error):
                self._failures.lose(f"{other} was lost; {me} waits for it in {name}: {error}")
            text = f"{other} said nothing for {timeout_s:g} s: Timed out at {me}, which waits in {name}; look at it"
            self._failures.fail(SilenceError, f"{text}, or raise init_process_group(timeout=...)")


def _nodes(ranks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """The largest nodes of the tree over all ranks that lie among these."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1][1] += 1
        else:
            runs.append([rank, rank + 1])
    return [node for first, end in runs for node in tree.cover((first, end), size)]


def _reduce(dtype: int, op: int, inputs: Sequence[Tensor], program: bytes, out: Tensor) -> None:
    addresses = tuple(each.data_ptr() for each in inputs)
    core.tree_reduce(dtype, op, addresses, program, out.data_ptr(), len(out) // ITEM_BYTES[dtype])


def _at(address: int, num_bytes: int) -> Tensor:
    """The memory at an address, which the caller keeps alive."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def _flat(pieces: Pieces, num_bytes: int) -> Tensor:
    """Everything that a rank gives, as one tensor."""
    if pieces is None:
        return torch.empty(0, dtype=torch.uint8)
    if isinstance(pieces, int):
        return _at(pieces, num_bytes)
    return torch.cat([_at(piece, num_bytes) for piece in pieces])


def _put(found: Sequence[Tensor], pieces: Pieces, num_bytes: int) -> None:
    """Write what a rank gets to where it wants it."""
    if pieces is not None:
        targets = (pieces,) if isinstance(pieces, int) else pieces
        for target, data in zip(targets, found, strict=True):
            _at(target, num_bytes).copy_(data)
