"""Messages between two ranks of a machine: send and receive, matched by sender and tag.

Messages travel in fragments through a small ring for each pair of ranks. Only the owner of a `Mail` moves its
fragments: the caller that starts a message, and then a thread for what is still open. A message that arrives before
the one asked for is put aside, so tags may be received in any order.

The thread also checks whether open messages can still complete: all receives, messages that have arrived in part, and
the first send to each rank.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, EvenstepError, MismatchError, PeerError
from evenstep.core.octets import octets
from evenstep.distributed.errors import LostRankError
from evenstep.distributed.reductions import dtype_code
from evenstep.distributed.team import ANY, BACKGROUND_SPIN, Team
from evenstep.distributed.work import NO_TIMEOUT, PendingWork
from evenstep.native import core

__all__ = ["Mail"]

_SLICE_S = 0.05  # how often to check whether what is awaited can still come


@dataclass(eq=False)
class _Message:
    """A message on its way.

    Attributes:
        peer: The rank that it goes to or comes from.
        tag: The user's tag.
        data: The contiguous memory that it is read from or written to.
        dtype: The user's dtype.
        work: What the user waits for.
        timeout_s: How long it may take.
        number: How many messages its sender, or receiver, had started.
        target: Where a receive must finally copy it, if it was received elsewhere.
        fragments: How many have been moved.
        code: The sender's dtype, of a message that was put aside.
        since: When it last moved, or got its turn to.
    """

    peer: int
    tag: int
    data: Tensor
    dtype: torch.dtype
    work: PendingWork
    timeout_s: float
    number: int
    target: Tensor | None = None
    fragments: int = 0
    code: int = 0
    since: float = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes, self.since = self.data.numel() * self.data.element_size(), time.monotonic()

    def is_whole(self) -> bool:
        """Whether all of it has been moved."""
        return self.fragments == core.mail_fragments(self.num_bytes)

    def advance(self, fragments: int) -> bool:
        """Note how many have been moved by now; return whether that is more than before."""
        moved = fragments > self.fragments
        if moved:
            self.fragments, self.since = fragments, time.monotonic()
        return moved

    def arrive(self, source: int) -> None:
        """All of it is here."""
        if self.target is not None:
            self.target.detach().copy_(self.data)
        self.work.complete(source=source)


class _MessageWork(PendingWork):
    """What the user waits for. Meanwhile the other ranks can see which rank it waits for."""

    def __init__(self, name: str, tensor: Tensor, team: Team, peer: int, record: Any) -> None:
        super().__init__(name, [tensor], record)
        self._team, self._peer = team, peer

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `PendingWork`."""
        if not self.is_completed():
            self._team.say_awaited(self._peer)
        try:
            return super().wait(timeout)
        finally:
            self._team.say_awaited(None)


class Mail:
    """The messages of one rank."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._pid = os.getpid()
        self._rank = team.index
        self._num_ranks = len(team.members)
        num_bytes = core.mail_bytes(self._num_ranks)
        self._memory = team.segment.memory.reserve(num_bytes).tensor(torch.Size([num_bytes]), torch.uint8)
        self._mail = self._memory.data_ptr()
        self._lock = threading.Lock()  # held by the thread that moves fragments
        self._sends: list[deque[_Message]] = [deque() for _ in team.members]
        self._receives: list[_Message] = []
        self._arriving: list[_Message | None] = [None for _ in team.members]  # of which some fragments are here
        self._aside: list[_Message] = []  # came before they were asked for
        self._number = 0
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def send(self, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any = None) -> PendingWork:
        """Start to send a tensor. It is done when the memory may be used again, whether or not it was received."""
        message = self._message(f"send to {self._team.members[peer]}", tensor, peer, tag, timeout_s, record)
        self._sends[peer].append(message)
        return self._begin(message, record)

    def receive(self, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any = None) -> PendingWork:
        """Start to receive into a tensor, from a rank or from `ANY`."""
        source = "any rank" if peer == ANY else str(self._team.members[peer])
        message = self._message(f"receive from {source}", tensor, peer, tag, timeout_s, record)
        message.target = None if message.data.data_ptr() == tensor.data_ptr() else tensor
        self._receives.append(message)
        return self._begin(message, record)

    def _message(self, what: str, tensor: Tensor, peer: int, tag: int, timeout_s: float, record: Any) -> _Message:
        self._team.check()
        self._number += 1
        name = f"{what} with tag {tag}, message {self._number} of the group"
        work = _MessageWork(name, tensor, self._team, peer, record)
        data = tensor.detach().contiguous()
        return _Message(peer, tag, data, data.dtype, work, timeout_s, self._number)

    def _begin(self, message: _Message, record: Any) -> PendingWork:
        """Move what can be moved at once; leave the rest, or everything if a profiler is on, to the thread."""
        if record is None:
            self._guarded(self._move)
        if not message.work.is_completed():
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="evenstep-mail", daemon=True)
                self._thread.start()
            self._wake.put(True)
        return message.work

    def _serve(self) -> None:
        while self._wake.get():
            looked_s = time.monotonic()
            while self._is_waiting():
                seen, rc = core.mail_seen(self._mail, self._rank), core.ES_OK
                if not self._guarded(self._move):
                    slice_ns = int(_SLICE_S * 1e9)
                    rc = core.mail_wait(self._team.base, self._mail, self._rank, seen, BACKGROUND_SPIN, slice_ns)
                # even while other messages come and go
                if rc != core.ES_OK or time.monotonic() > looked_s + _SLICE_S:
                    self._guarded(self._look_around)
                    looked_s = time.monotonic()

    def _is_waiting(self) -> bool:
        return bool(self._receives) or any(self._sends) or any(message is not None for message in self._arriving)

    def _guarded(self, action: Callable[[], bool]) -> bool:
        """Run an action on the messages; if it fails, all messages fail, here and on the other ranks."""
        with self._lock:
            try:
                return action()
            except EvenstepError as error:
                self._fail_all(error)
            except BaseException as error:
                me = self._team.members[self._rank]
                text = f"{me} could not move its messages: {error!r}"
                self._team.fail(PeerError, self._rank, text)
                self._fail_all(LostRankError(text, me.name))
                if not isinstance(error, Exception):  # an interruption, which is for the caller
                    raise
        return True

    def _move(self) -> bool:
        """Move all fragments that can be moved now; return whether there were any."""
        sent = [self._push(queue) for queue in self._sends]
        received = self._take_from_aside()
        pulled = [self._pull(source) for source in range(self._num_ranks)]
        return received or any(sent) or any(pulled)

    def _push(self, messages: "deque[_Message]") -> bool:
        moved = False
        while messages:
            message = messages[0]
            fragments = core.mail_push(
                self._mail,
                self._num_ranks,
                self._rank,
                message.peer,
                message.tag,
                message.num_bytes,
                dtype_code(message.dtype),
                message.number,
                message.data.data_ptr(),
                message.fragments,
            )
            moved |= message.advance(fragments)
            if not message.is_whole():
                break
            messages.popleft()
            message.work.complete()
            if messages:
                messages[0].since = message.since  # its turn has come
        return moved

    def _pull(self, source: int) -> bool:
        moved = False
        while (message := self._arriving[source] or self._next(source)) is not None:
            self._arriving[source] = message
            address, before = message.data.data_ptr(), message.fragments
            moved |= message.advance(
                core.mail_pull(self._mail, self._num_ranks, source, self._rank, message.num_bytes, address, before)
            )
            if not message.is_whole():
                break
            self._arriving[source] = None
            message.arrive(source)
        return moved

    def _next(self, source: int) -> _Message | None:
        """Where the message at the head of a ring goes: to the receive that wants it, aside, or nowhere yet."""
        if not any(wanted.peer in (source, ANY) for wanted in self._receives):
            return None
        head = self._head(source)
        if head is None:
            return None
        tag, num_bytes, code, number = head
        wanted = self._claim(source, tag, num_bytes, code, number)
        if wanted is not None:
            return wanted
        data = torch.empty(num_bytes, dtype=torch.uint8)
        aside = _Message(source, tag, data, data.dtype, PendingWork("", []), 0.0, number, code=code)
        self._aside.append(aside)
        return aside

    def _claim(self, source: int, tag: int, num_bytes: int, code: int, number: int) -> _Message | None:
        """The receive that wants a message; it is then no longer open."""
        for wanted in self._receives:
            if wanted.peer in (source, ANY) and wanted.tag == tag:
                if wanted.num_bytes != num_bytes or dtype_code(wanted.dtype) != code:
                    sender, me = self._team.members[source], self._team.members[self._rank]
                    text = (
                        f"{sender} sent {num_bytes} bytes with tag {tag} (its message {number} of the group), but {me} "
                        f"expects {wanted.num_bytes} bytes of {wanted.dtype} in {wanted.work.name}: send and receive "
                        "tensors of one size and dtype"
                    )
                    self._team.fail(MismatchError, source, text)
                    self._team.raise_failure()
                self._receives.remove(wanted)
                return wanted
        return None

    def _take_from_aside(self) -> bool:
        found = False
        for message in [message for message in self._aside if message.is_whole()]:
            wanted = self._claim(message.peer, message.tag, message.num_bytes, message.code, message.number)
            if wanted is not None:
                self._aside.remove(message)
                octets(wanted.data).copy_(message.data)
                wanted.arrive(message.peer)
                found = True
        return found

    def _look_around(self) -> bool:
        """Check whether open messages can still complete."""
        self._team.check()
        for source, message in enumerate(self._arriving):
            if message is None:
                continue
            if message not in self._aside:
                self._look_after(message, [source])
            elif self._is_lost([source]):  # nobody has asked for it yet; a later receive will learn that it never comes
                self._aside.remove(message)
                self._arriving[source] = None
        for message in self._receives:
            self._look_after(message, self._sources(message))
        for messages in self._sends:
            if messages:
                self._look_after(messages[0], [messages[0].peer], sent=True)
        return True

    def _look_after(self, message: _Message, awaited: Sequence[int], *, sent: bool = False) -> None:
        """Fail if what a message waits for can no longer come, or has not come in time."""
        if self._is_lost(awaited, sent=sent):
            self._team.fail_gone(awaited, message.work.name)
        if time.monotonic() > message.since + message.timeout_s:
            self._team.fail_silent(awaited, message.work.name, message.timeout_s)

    def _is_lost(self, awaited: Sequence[int], *, sent: bool = False) -> bool:
        """Whether all awaited ranks have ended, and have left nothing in the rings."""
        if not awaited or not all(self._team.has_ended(rank) for rank in awaited):
            return False
        return sent or all(self._head(rank) is None for rank in awaited)

    def _sources(self, wanted: _Message) -> Sequence[int]:
        """The ranks that can satisfy a receive: only one if its message had begun to arrive beforehand."""
        for source, message in enumerate(self._arriving):
            if message in self._aside and wanted.peer in (source, ANY) and wanted.tag == message.tag:
                return [source]
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        return others if wanted.peer == ANY else [wanted.peer]

    def _head(self, source: int) -> tuple[int, int, int, int] | None:
        """Tag, size, dtype and number of the message that comes next from a rank, if there is one."""
        return core.mail_head(self._mail, self._num_ranks, source, self._rank)

    def _fail_all(self, error: EvenstepError) -> None:
        messages = [*self._receives, *(message for queue in self._sends for message in queue)]
        messages += [message for message in self._arriving if message is not None]
        self._receives, self._aside = [], []
        self._arriving = [None] * self._num_ranks
        for queue_ in self._sends:
            queue_.clear()
        for message in messages:
            message.work.complete(error)

    def close(self) -> None:
        """End the thread. What is still open fails."""
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:  # a forked copy has no thread, and its lock may be held
            with self._lock:
                self._fail_all(ConfigError("the process group was destroyed before the message was sent or received"))
            self._wake.put(False)
            core.mail_bump(self._mail, self._rank)
            thread.join()
