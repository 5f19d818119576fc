"""Every operation of a script on its workers, done exactly once, whichever of them die in the middle of it.

An operation (a step, an evaluation, a save) is tried by all workers together. If it succeeds, the first worker writes
its result into the journal: from that moment it is committed. If a worker dies, stops or is asked to leave before that
moment, the others drop what they have, wait for the supervisor to say who is left (a new *generation*), restore the
last committed state, and try again. A worker that finds its operation already in the journal, because it was woken late
or has only just been started, takes the result from there.

State on GPUs is lost with the last worker that has it. Then there is an image of it (`engine/image.py`); what was
committed after the image was taken is done again, and must give what the journal says.

So one loop serves for going on, doing again and catching up. `tests/model/protocol.py` is a model of it, checked for
every order of events.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from evenstep.core import points
from evenstep.core.errors import BeginsAgain, ConfigError, MismatchError, NondeterminismError, PeerError
from evenstep.exchange.board import Asked
from evenstep.exchange.group import Group
from evenstep.exchange.journal import Entry, Journal
from evenstep.exchange.tracing import Kind

__all__ = ["Ledger", "Operation", "Undecided"]

T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """What the workers do together.

    Attributes:
        kind: Which one, in words; its entry in the journal has the same.
        step: How many steps came before it.
        is_step: Whether it is itself a step: only steps have a time limit and count as progress.
    """

    kind: str
    step: int
    is_step: bool = False


class Undecided(Protocol):
    """The holder of state that an operation may leave half changed."""

    def begin(self, operation: int) -> None:
        """Begin to try the operation with this number."""

    def abandon(self) -> None:
        """Forget an attempt that failed on this worker."""

    def recover(self) -> None:
        """Restore the committed state, on all workers of a generation that has just begun."""


class Ledger:
    """The operations of one process, one after another.

    Attributes:
        group: The workers.
        journal: What has been committed.
        holder: What holds the state, if there is any yet.
        prelude: Called once before the next operation, if set; it may do an operation of its own, and set itself again.
        took_part: Whether this worker took part in the last operation.
        volatile: Whether the state is lost with the workers that have it.
        missing: The workers of this generation that lack it; known while it is being restored.
        asked: What the supervisor had asked for when the last operation was committed; the same on all that took part.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.journal = Journal(group.segment)
        self.holder: Undecided | None = None
        self.prelude: Callable[[], None] | None = None
        self.took_part = True
        self._doing: str | None = None
        self._next = 0
        self._has = -1  # how many operations this worker's state contains; -1: it has no state
        self.volatile = False
        self.missing: Sequence[bool] = ()
        self._recovered = self._leveled = group.generation
        self._reported = 0  # the generation whose first step the supervisor knows of
        self.asked: Asked = (0, 0, 0)
        self._mine = torch.zeros(1, 3, dtype=torch.int64)  # what this worker has seen of that
        self._agreed: Asked | None = None  # what all have seen of it, where the attempt has found that out

    @property
    def catching_up(self) -> bool:
        """Whether the state already contains the next operation."""
        return self._next < self._counted

    @property
    def _counted(self) -> int:
        """How many operations the state contains, or its image if nobody has the state."""
        image = self.group.board.image
        return self._reached if image is None or self.group.board.is_held else image[0]

    @property
    def _reached(self) -> int:
        """How many operations the state contained when a worker last had it."""
        again = self.group.board.again
        return self.journal.committed if again is None else again

    @property
    def done(self) -> int:
        """How many operations this worker has done."""
        return self._next

    def perform(self, operation: Operation, attempt: Callable[[], Entry], adopt: Callable[[Entry, bool], T]) -> T:
        """Do the next operation. All workers must call this alike; blocks until it is committed.

        Args:
            operation: Which one; the same on all workers.
            attempt: Computes the operation and returns its entry. It ends with an exchange of all workers (`share`, of
                a step), so that when it returns all have done their part. May be called several times: it must leave
                nothing changed that the holder's `recover` does not restore.
            adopt: Called once with the committed entry, and whether this worker took part in it (if not, it is
                catching up, and the state may be ahead of the entry); returns the result.

        Raises:
            ConfigError: This process is a copy of the worker, or it is inside another operation.
            PeerError: Another worker failed, and there is nobody to replace it.
            MismatchError: This worker does another operation than the others did.
        """
        self.group.check_process()
        if self._doing is not None:
            raise ConfigError(
                f"'{operation.kind}' was begun inside '{self._doing}', by a function that not every worker calls, or "
                "not equally often; expected one after the other: let such a function only compute and return"
            )
        if self.prelude is not None:
            prelude, self.prelude = self.prelude, None
            prelude()
        self._doing = operation.kind
        try:
            entry, self.took_part = self._obtain(operation, attempt)
        finally:
            self._doing = None
        if self.took_part:
            self._has = self._next + 1 + len(entry.followers)
        elif self._has <= self._next:
            self._has = -1
            self.group.board.holds(self.group.worker, False)
        result = adopt(entry, self.took_part)
        self._next += 1
        return result

    def share(self, tag: str, value: Any) -> list[Any]:
        """Offer a JSON value when this worker has done its part of a step; return everyone's in rank order.

        Over several machines everyone also learns what the supervisor asks for. So each machine can count the step by
        itself, without another exchange between them: none can change anything in the next step before all have.
        """
        if self.group.num_machines == 1:
            return self.group.gather_json(tag, value)
        of_all = self.group.gather_json(tag, [value, self.group.board.asked()])
        regroup, checkpoint, stop = (max(seen) for seen in zip(*(asked for _, asked in of_all), strict=True))
        self._agreed = (regroup, checkpoint, stop)
        return [theirs for theirs, _ in of_all]

    def _obtain(self, operation: Operation, attempt: Callable[[], Entry]) -> tuple[Entry, bool]:
        """The committed entry of the next operation, and whether this worker took part in it."""
        while not self.catching_up:
            if self.group.left:
                self.group.enter()
                if not self.volatile:  # otherwise all find out together where this worker has to be
                    continue
            if (tried := self._try(operation, attempt)) is not None:
                return tried, True
        entry = self.journal.read(self._next)
        if entry.kind != operation.kind:
            raise MismatchError(
                f"worker {self.group.worker} does '{operation.kind}' where the other workers did '{entry.kind}': the "
                "script must do the same whenever it runs; look for a branch that depends on the worker, the time or "
                "unseeded randomness"
            )
        return entry, False

    def _try(self, operation: Operation, attempt: Callable[[], Entry]) -> Entry | None:
        """Try the next operation once; None if the workers must change first, or the journal has it by now."""
        entry, begin_ns, name = None, time.monotonic_ns(), f"{operation.kind}, to be done again"
        if operation.is_step:  # other operations may take any time, and so may the wait for the next generation
            self.group.board.begin(self.group.worker, operation.step)
        try:
            if not self._recover():
                return None
            self._agreed = None
            entry = attempt()
            if self.group.board.again is not None:
                entry = self._repeated(entry)
            with self.group.tracer.span(Kind.COMMIT):
                self._commit(operation, entry)
            name = operation.kind
        except BaseException as error:
            committed = self.catching_up  # then whatever went wrong came too late to matter to this operation
            name = operation.kind if committed else name
            if not committed and self.holder is not None:
                self.holder.abandon()
            if not isinstance(error, PeerError) or not (self.group.elastic or committed):
                raise
            if self.group.elastic:
                self.group.leave()
            return entry if committed else None
        finally:
            self.group.board.end(self.group.worker)
            self.group.tracer.note(Kind.OPERATION, begin_ns, name, operation.step)
        return entry

    def _recover(self) -> bool:
        """Bring everyone to the committed state, as the first act of a new generation.

        Returns:
            Whether this worker can go on: it cannot if its operation turns out to be committed.
        """
        if self._leveled != self.group.generation:
            self._level()
            self._leveled = self.group.generation
            if self.catching_up and not self.volatile:
                return False
        if self.holder is not None:
            self.holder.begin(self._next)
        if self._recovered != self.group.generation:
            self._recover_state()
        self.group.board.holds(self.group.worker, True)
        return True

    def _recover_state(self) -> None:
        behind = self._next < self._reached
        if self.volatile:
            self._see_who_has_it()
        if self.holder is not None:
            with self.group.tracer.span(Kind.RECOVERY, number=self.group.generation):
                self.holder.recover()
        if behind:
            self._go_back()
        self._recovered, self._has = self.group.generation, self._next
        if self.group.leads:
            self.group.board.lacks_state = False

    def _see_who_has_it(self) -> None:
        """Find out who has the state, and check that this worker is where the state is.

        One that was just started has caught up with the others, or with the image if nobody had the state; that may
        have changed meanwhile.

        Raises:
            BeginsAgain: The state is elsewhere.
        """
        mine = torch.tensor([[self._has < 0, self._next]], dtype=torch.int64)
        of_all = self.group.gather("who has the state", mine).tolist()
        self.missing = [bool(lacks) for lacks, _ in of_all]
        image = self.group.board.image
        found = [done for lacks, done in of_all if not lacks] or [image[0] if image else self._next]
        if self._next != found[0]:
            raise BeginsAgain

    def _go_back(self) -> None:
        """Start from an image of the state: do again what the journal has beyond it."""
        if self.group.rank == 0:
            count = self._reached - self._next
            self.group.tell({"says": f"all workers were lost; what they did last is done again (operations: {count})"})
            self.group.board.again = self._next
        self.group.barrier("going back")

    def _level(self) -> None:
        """Make the journals of all machines hold what any of them has counted.

        Each machine counts an operation on its own when all have done their part, so one may count it and be lost
        before another has. What any surviving machine has counted was done by all of them.
        """
        group, journal = self.group, self.journal
        if group.num_machines == 1:
            return
        counts = [int(n) for n in group.gather("what is committed", torch.tensor([[journal.committed]]))]
        most, least = max(counts), min(counts)
        if least == most:
            return
        donor = counts.index(most)
        packed = journal.packed(most, least) if group.rank == donor else b""
        packed = group.from_one("committed elsewhere", donor, packed)
        if group.leads and journal.committed < most:
            entries = Journal.unpack(packed)[journal.committed - least :]
            journal.append_packed(b"".join(entry.pack() for entry in entries), len(entries))
        group.barrier("committed everywhere")

    def _of_first(self, operation: Operation, entry: Entry) -> Entry:
        """The entry as the first worker has it."""
        packed = b"".join(each.pack() for each in (entry, *entry.followers)) if self.group.rank == 0 else b""
        first, *followers = Journal.unpack(self.group.from_one(f"{operation.kind}: entry", 0, packed))
        return replace(first, followers=followers)

    def _commit(self, operation: Operation, entry: Entry) -> None:
        """Commit what everyone has done; the first worker of a machine counts it, and nobody there goes on before."""
        group = self.group
        points.reach("before commit")
        if group.num_machines > 1 and not operation.is_step:  # not everyone need know what it gave
            entry = self._of_first(operation, entry)
        if group.leads:
            self._count(entry)
            points.reach("inside commit")
        tag = f"{operation.kind}: committed"
        if self._agreed is not None:
            group.follow_leader(tag)
            self.asked = self._agreed
        else:
            self._mine.numpy()[0] = group.board.asked()
            regroup, checkpoint, stop = group.gather(tag, self._mine).numpy().max(0).tolist()
            self.asked = (regroup, checkpoint, stop)
        if group.rank == 0 and self._reported != group.generation and operation.is_step:
            group.tell({"committed": operation.step})
            self._reported = group.generation
        points.reach("after commit")
        if self.asked[0] > group.generation:
            group.leave()

    def _count(self, entry: Entry) -> None:
        """Count an operation as committed."""
        if self.group.board.again is None:
            self.journal.append(entry)
        else:
            end = self._next + 1 + len(entry.followers)
            self.group.board.again = end if end < self.journal.committed else None

    def _repeated(self, entry: Entry) -> Entry:
        """The entry of an operation that was done again.

        Raises:
            NondeterminismError: Its result differs from before.
        """
        count = 1 + len(entry.followers)
        known = [self.journal.read(number) for number in range(self._next, self._next + count)]
        same = [_gave(each) for each in known] == [_gave(each) for each in (entry, *entry.followers)]
        if self.group.rank == 0 and not same:  # what the others give does not count
            raise NondeterminismError(
                f"all workers were lost, and '{entry.kind}' gave something else when it was done again from an image "
                "of the state: the script depends on the time, on unseeded randomness, or on a file that has changed"
            )
        return replace(known[0], followers=known[1:])


def _gave(entry: Entry) -> bytes:
    return replace(entry, aside=None).pack()
