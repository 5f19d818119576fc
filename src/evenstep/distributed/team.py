"""The ranks of one machine: operations over their shared segment, and failure that reaches all of them.

Every wait ends: with what was awaited, or with the same error on all ranks, which says who did not arrive, at which
operation, and where. A team that has failed stays failed.
"""

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, TypeAlias

import torch

from evenstep.core.errors import ConfigError, EvenstepError, MismatchError, PeerError, SilenceError
from evenstep.distributed.errors import group_error
from evenstep.distributed.members import Member
from evenstep.distributed.reductions import BYTES
from evenstep.exchange.liveness import Liveness, look_count, spin_count
from evenstep.native import core
from evenstep.plan import tree
from evenstep.transport.segment import Segment

__all__ = ["ANY", "Call", "Pieces", "Team"]

ANY = -1
"""The source of a receive that accepts messages from any rank."""

Pieces: TypeAlias = "int | tuple[int, ...] | None"
"""The address of one contiguous piece of memory, or one for each rank, or nothing."""

_AT_ONCE_BYTES = 1 << 17  # up to here a second meeting costs more than reducing everything on every rank
_STEP_BYTES = 1 << 18  # what is on its way stays in the cache
_LONG_STEP_BYTES = 1 << 19  # beside a computation every meeting takes long, so there should be fewer
_RING_BYTES = (1 << 21) + (1 << 15)  # see collective.h
SLOT_BYTES = 1 << 13
BACKGROUND_SPIN = 16
_AWAITED = 0  # the word on the board that says whose message a rank waits for


class Call(NamedTuple):
    """An operation, called alike by all ranks (see collective.h).

    Attributes:
        kind: Which one.
        tag: What it is, in words: must be the same on all ranks.
        dtype: The type in the core of what is reduced.
        op: How it is reduced.
        root: The root, where there is one.
        num_items: The size of a piece; a piece is what one rank gives or gets in one place.
    """

    kind: int
    tag: bytes
    dtype: int = BYTES
    op: int = 0
    root: int = 0
    num_items: int = 0


class Team:
    """The ranks around a segment. One thread at a time may call its operations.

    Attributes:
        index: The number of this rank among them.
        members: All of them, by that number.
        core: The C core's object for the team.
    """

    def __init__(self, segment: Segment, members: Sequence[Member], index: int) -> None:
        self.segment = segment
        self.base = segment.base
        self.members = members
        self.index = index
        self._closed = False
        self._eager_looks, self._eager_spin = look_count(len(members)), spin_count(len(members))
        self._liveness = Liveness()
        for member in members:
            self._liveness.watch(member.pid)  # before its process id could be reused
        at_once = _AT_ONCE_BYTES if len(members) > 2 else sys.maxsize  # two ranks gain nothing by taking parts
        size = len(members) * _RING_BYTES
        self._rings = segment.memory.reserve(size).tensor(torch.Size([size]), torch.uint8)
        self.core = core.Team(
            self.base,
            index,
            tree.leaf_program(len(members)),
            at_once,
            self._rings.data_ptr(),
            _RING_BYTES,
            self.has_ended,
        )
        self.in_background(False)

    @property
    def number(self) -> int:
        """How many operations were started so far."""
        return self.core.number

    @number.setter
    def number(self, number: int) -> None:
        self.core.number = number

    def call(self, call: Call, ins: Pieces, outs: Pieces, timeout_s: float) -> None:
        """Take part in an operation. Blocks until this rank has what it is to get.

        Raises:
            MismatchError: A rank is at another operation.
            PeerError: A rank failed, ended, or left the group.
            SilenceError: A rank did not come within the timeout.
        """
        try:
            rc = self.core.collective(*call, ins, outs, int(timeout_s * 1e9))
        except BaseException as error:
            self._interrupted(call.tag, error)
            raise
        if rc:
            self._fail(rc & 0xFF, rc >> 8, call.tag, timeout_s)

    def all_to_all(
        self,
        tag: bytes,
        ins: tuple[int, ...],
        in_bytes: tuple[int, ...],
        outs: tuple[int, ...],
        out_bytes: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        """Give each rank a piece and get one from each. Raises as `call` does."""
        try:
            rc = self.core.all_to_all(tag, ins, in_bytes, outs, out_bytes, int(timeout_s * 1e9))
        except BaseException as error:
            self._interrupted(tag, error)
            raise
        if rc:
            self._fail(rc & 0xFF, rc >> 8, tag, timeout_s)

    def sum_failed(self, code: int, about: int | BaseException, tag: bytes, timeout_s: float) -> None:
        """Handle the failure of a sum that C did on its own: caused by a rank, or by an interruption of this one."""
        if isinstance(about, BaseException):
            self._interrupted(tag, about)
        else:
            self._fail(code, about, tag, timeout_s)

    def _interrupted(self, tag: bytes, error: BaseException) -> None:
        me = self.members[self.index]
        if self._closed:
            raise ConfigError(f"{me} destroyed this process group before it started {tag.decode()}") from error
        self.fail(PeerError, self.index, f"{me} was interrupted in {self._at(tag)}: {error!r}")

    def in_background(self, yes: bool) -> None:
        """Say whether the next operations run beside a computation, whose core they must not take while waiting."""
        self.core.looks = 0 if yes else self._eager_looks
        self.core.spin = BACKGROUND_SPIN if yes else self._eager_spin
        self.core.step_bytes = _LONG_STEP_BYTES if yes else _STEP_BYTES

    def has_ended(self, index: int) -> bool:
        """Whether a rank will never arrive: its process has ended or it has left the group."""
        pid = core.pid(self.base, index)
        return pid == 0 or self._liveness.ended(pid)

    def fail(self, kind: type[EvenstepError], culprits: int | Sequence[int], text: str) -> None:
        """Tell everyone that the team has failed; only the first failure counts."""
        found = [culprits] if isinstance(culprits, int) else culprits
        head = " ".join([kind.__name__, *(str(self.members[index].rank) for index in found)])
        core.abort_all(self.base, self.index, found[0], f"{head}\n{text}")

    def abort(self) -> None:
        """Fail on behalf of the user, so that nobody waits any longer."""
        me = self.members[self.index]
        if not self._closed and os.getpid() == me.pid:
            self.fail(PeerError, self.index, f"{me} aborted the group")

    def check(self) -> None:
        """Raise the error of a team that has failed."""
        if core.aborted(self.base) is not None:
            self.raise_failure()

    def raise_failure(self) -> NoReturn:
        """Raise the error that everyone gets."""
        culprit, text = core.aborted(self.base) or (self.index, "PeerError\nthe group has failed")
        head, _, text = text.partition("\n")
        kind, *ranks = head.split()
        raise group_error(kind, text, self.members[culprit].name, [int(rank) for rank in ranks])

    def say_awaited(self, peer: int | None) -> None:
        """Show the others whose message this rank waits for, so that they do not blame it for being missing."""
        if os.getpid() != self.members[self.index].pid:
            return
        word = 0 if peer is None else 1 + (len(self.members) if peer == ANY else peer)
        core.store(self.segment.word(self.index, _AWAITED), word)

    def _awaited_by(self, index: int) -> Sequence[int]:
        """Whom a rank waits for, as far as this one can see: in a receive, or otherwise in a collective."""
        everyone = range(len(self.members))
        word = core.load(self.segment.word(index, _AWAITED))
        if word:
            return [word - 1] if word <= len(everyone) else [other for other in everyone if other != index]
        steps = [core.last_post(self.base, other)[0] for other in everyone]
        return [other for other in everyone if steps[other] < steps[index]]

    def _missing(self, awaited: Sequence[int]) -> Sequence[int]:
        """Of the awaited ranks, and those that they await in turn, the ones that await nobody."""
        found, seen, left = [], {self.index}, list(awaited)
        while left:
            index = left.pop(0)
            if index not in seen:
                seen.add(index)
                further = self._awaited_by(index)
                left += further
                found += [] if further else [index]
        return found

    def fail_gone(self, culprits: Sequence[int], where: str) -> NoReturn:
        """Fail everywhere because ranks have ended or left; if one has died, name that one."""
        culprit = next((index for index in culprits if core.pid(self.base, index)), culprits[0])
        gone = "left the group" if core.pid(self.base, culprit) == 0 else "ended"
        waiting = self.members[self.index]
        self.fail(PeerError, culprit, f"{self.members[culprit]} {gone}; {waiting} waits for it in {where}")
        self.raise_failure()

    def fail_silent(self, awaited: Sequence[int], where: str, timeout_s: float) -> NoReturn:
        """Fail everywhere because ranks did not arrive in time."""
        culprits = self._missing(awaited) or awaited
        names = ", ".join(str(self.members[index]) for index in culprits)
        theirs = self._awaited_by(culprits[0])
        if theirs:
            names += f", which waits for {', '.join(str(self.members[index]) for index in theirs)} itself,"
        text = (
            f"{names} said nothing for {timeout_s:g} s: Timed out at {self.members[self.index]}, which waits in "
            f"{where}; look at what it does, or raise init_process_group(timeout=...)"
        )
        self.fail(SilenceError, culprits, text)
        self.raise_failure()

    def _fail(self, code: int, culprit: int, tag: bytes, timeout_s: float) -> NoReturn:
        if code == core.ES_ABORTED:
            self.raise_failure()
        where = f"{self._at(tag)}; its last operation was {self._last(culprit)}"
        if code == core.ES_GONE:
            self.fail_gone([culprit], where)
        if code == core.ES_SILENT:
            self.fail_silent(self._awaited_by(self.index) or [culprit], where, timeout_s)
        text = (
            f"{self.members[self.index]} is at {self._at(tag)}, but {self.members[culprit]} is at "
            f"{self._last(culprit)}: all ranks of a group must start the same operations in the same order, on tensors "
            "of one shape and dtype"
        )
        self.fail(MismatchError, culprit, text)
        self.raise_failure()

    def _at(self, tag: bytes) -> str:
        return f"{tag.decode()}, operation {self.number} of the group"

    def _last(self, index: int) -> str:
        seq, _, tag, number = core.last_post(self.base, index)
        return f"{tag}, operation {number} of the group" if seq else "none"

    def close(self) -> None:
        """Leave. Ranks that wait for this one from now on get an error."""
        if os.getpid() == self.members[self.index].pid:  # a forked copy must not leave on its behalf
            core.set_pid(self.base, self.index, 0)
        self._closed = True
        self.core.close()
        self._liveness.close()
        self.segment.close()
