"""Who is in a group, and which of them share memory: found by trying.

Every rank makes a card, a page of memory with a random number on it, and says through torch's store where it is. A
rank that can open the card of another process through /proc, and finds that number there, shares memory with it. The
lowest such rank is the leader of a machine: it makes the segment, and the others open it the same way. The same test
settles containers, namespaces and equal process ids on different machines; no environment variable is consulted.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.distributed.errors import SilentRanksError
from evenstep.native import core
from evenstep.transport.segment import Segment

__all__ = ["Member", "RankMeeting"]


_REMEDY = "run all ranks of a machine as one user, in one process namespace"


@dataclass(frozen=True)
class Member:
    """One rank of a group.

    Attributes:
        rank: Its number in the group.
        name: Its number in the default group, the one that the user knows.
        pid: Its process id, on its machine.
        host: The name of its machine.
        card: The descriptor of its card.
        secret: The random number on its card.
    """

    rank: int
    name: int
    pid: int
    host: str
    card: int
    secret: str

    def __str__(self) -> str:
        return f"rank {self.name} (pid {self.pid} on {self.host})"


class RankMeeting:
    """How the ranks of a new group find each other. A context manager; all must enter it, and it blocks until all have.

    The card exists until the context is left: by then the ranks that share memory must have opened the segment.

    Attributes:
        members: Everyone, by rank.
        local: The ranks that share memory with this one, this one included, in order.

    Raises:
        SilenceError: A rank did not come within the timeout.
    """

    members: list[Member]
    local: list[int]

    def __init__(self, store: Any, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._names = names
        self._card = os.memfd_create("evenstep-card", os.MFD_CLOEXEC)

    def __enter__(self) -> "RankMeeting":
        rank, secret = self._rank, secrets.token_hex(16)
        try:
            os.write(self._card, secret.encode())
            me = Member(rank, self._names[rank], os.getpid(), socket.gethostname(), self._card, secret)
            self._say("card", asdict(me))
            self.members = [Member(**self._hear("card", other)) for other in range(len(self._names))]
        except BaseException:
            os.close(self._card)
            raise
        self.local = [member.rank for member in self.members if member.rank == rank or _shares_memory(member)]
        self._say("local", self.local)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._card)

    def machines(self) -> Sequence[Sequence[int]]:
        """The ranks of each machine, in order of their leaders.

        Raises:
            ConfigError: The ranks do not agree on who shares memory.
        """
        ranks = list(range(len(self.members)))
        if self.local == ranks:
            return [self.local]
        found = sorted({tuple(self._hear("local", rank)) for rank in ranks})
        if sorted(rank for machine in found for rank in machine) != ranks:
            raise ConfigError(f"the ranks do not agree on who shares memory: {found}; {_REMEDY}")
        return found

    def segment(self, slot_bytes: int) -> Segment:
        """The segment of this machine's ranks, of which number i is the i-th of `local`.

        Raises:
            ConfigError: The ranks do not agree on who shares memory.
        """
        leader = self.members[self.local[0]]
        if leader.rank == self._rank:
            segment = Segment.create(len(self.local), slot_bytes)
            for index, rank in enumerate(self.local):
                core.set_pid(segment.base, index, self.members[rank].pid)
            self._say("segment", [segment.fd, self.local])
            return segment
        fd, local = self._hear("segment", leader.rank)
        if local != self.local:
            raise ConfigError(
                f"{self.members[self._rank]} can reach the memory of ranks {self.local}, but {leader} that of {local}; "
                f"{_REMEDY}"
            )
        return Segment(os.open(f"/proc/{leader.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def _say(self, what: str, value: Any) -> None:
        self._store.set(f"evenstep/{what}/{self._rank}", json.dumps(value))

    def _hear(self, what: str, rank: int) -> Any:
        key = f"evenstep/{what}/{rank}"
        left = max(self._deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], timedelta(seconds=left))
        except RuntimeError as error:
            raise SilentRanksError(
                f"rank {rank} of the new group did not come within {self._timeout_s:g} s: Timed out at rank "
                f"{self._rank}, which waits for it; look at what it does, or raise init_process_group(timeout=...)",
                [rank],
            ) from error
        return json.loads(self._store.get(key))


def _shares_memory(member: Member) -> bool:
    try:
        fd = os.open(f"/proc/{member.pid}/fd/{member.card}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.pread(fd, 64, 0).decode(errors="replace") == member.secret
    except OSError:
        return False
    finally:
        os.close(fd)
