"""The ranks of a group, wherever they are: what a process group asks of them, and how they meet."""

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import Work

from evenstep.distributed.machines import MachineRanks
from evenstep.distributed.mail import Mail
from evenstep.distributed.members import RankMeeting
from evenstep.distributed.team import SLOT_BYTES, Call, Pieces, Team
from evenstep.native import core

__all__ = ["Ranks", "meet"]


class Ranks(Protocol):
    """All ranks of a group. Memory is given by address; it must stay until the call returns.

    Attributes:
        team: All of them as one team, if they share memory.
    """

    team: Team | None

    def call(self, call: Call, ins: Pieces, outs: Pieces, timeout_s: float) -> None:
        """Take part in an operation. All ranks must, in one order; blocks.

        Raises:
            MismatchError: A rank is at another operation.
            PeerError: A rank failed, ended, or left the group.
            SilenceError: A rank did not come within the timeout.
        """

    def all_to_all(
        self,
        tag: bytes,
        ins: tuple[int, ...],
        in_bytes: tuple[int, ...],
        outs: tuple[int, ...],
        out_bytes: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        """Give each rank a piece and get one from each. As `call`."""

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any) -> Work:
        """Start to send a tensor to a rank. A profiler gets the record when it is over."""

    def receive(self, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any) -> Work:
        """Start to receive a tensor from a rank, or from `ANY`."""

    def in_background(self, yes: bool) -> None:
        """Say whether the next operations run beside a computation, whose core they must not take while waiting."""

    def check(self) -> None:
        """Raise the error of a group that has failed."""

    def abort(self) -> None:
        """Make everything open in the group fail, on all ranks."""

    def close(self) -> None:
        """Leave the group."""


class OneMachine:
    """Ranks that all share memory."""

    def __init__(self, team: Team) -> None:
        self.call = team.call
        self.all_to_all = team.all_to_all
        self.check = team.check
        self.abort = team.abort
        self.in_background = team.in_background
        self.team: Team | None = team
        self._team = team
        self._mail = Mail(team)
        self.send = self._mail.send
        self.receive = self._mail.receive

    def close(self) -> None:
        """See `Ranks`."""
        self._mail.close()
        self._team.close()


def meet(store: Any, rank: int, names: Sequence[int], timeout_s: float) -> Ranks:
    """Find the ranks of a new group through torch's store. All must call this; blocks until all have."""
    with RankMeeting(store, rank, names, timeout_s) as meeting, contextlib.ExitStack() as undo:
        members = [meeting.members[other] for other in meeting.local]
        team = Team(meeting.segment(SLOT_BYTES), members, meeting.local.index(rank))
        undo.callback(team.close)
        team.call(Call(core.ES_BARRIER, b"making the group"), None, None, timeout_s)
        team.number = 0
        machines = meeting.machines()
        found = (
            OneMachine(team)
            if len(machines) == 1
            else MachineRanks(store, team, meeting.members, rank, machines, timeout_s)
        )
        undo.pop_all()
        return found
