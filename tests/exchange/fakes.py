"""Peers without processes: rounds that are a table in memory, and a membership that a test decides."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep.core.errors import Dismissed, MismatchError, PeerError, SilenceError
from evenstep.core.events import Event
from evenstep.exchange.generations import Generation
from evenstep.exchange.group import Group
from evenstep.transport.segment import Segment


@dataclass
class Table:
    """What all workers have posted."""

    posts: dict[tuple[int, int], tuple[str, bytes]] = field(default_factory=dict)
    failure: tuple[int, str] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)


class FakeRounds:
    """`Rounds` over a table; every worker is a thread."""

    def __init__(self, table: Table, worker: int, timeout_s: float = 30.0, most_bytes: int = 4096) -> None:
        self.worker, self.timeout_s, self.waited_s, self.most_bytes = worker, timeout_s, 0.0, most_bytes
        self._table = table
        self.among: list[Sequence[int]] = []
        self.begun: list[Generation] = []

    def begin(self, generation: Generation) -> None:
        self.begun.append(generation)

    def post(self, seq: int, tag: str, address: int, num_bytes: int, among: Sequence[int]) -> None:
        assert num_bytes <= self.most_bytes
        assert self.worker in among
        self.among.append(among)
        with self._table.changed:
            assert (self.worker, seq) not in self._table.posts, "one post for each number"
            self._table.posts[self.worker, seq] = (tag, ctypes.string_at(address, num_bytes))
            self._table.changed.notify_all()

    def collect(self, worker: int, seq: int, tag: str, address: int, num_bytes: int, deadline: float) -> None:
        with self._table.changed:
            while (worker, seq) not in self._table.posts:
                self.check()
                if not self._table.changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise SilenceError(f"worker {worker} did not come to '{tag}'")
            theirs, data = self._table.posts[worker, seq]
        if theirs != tag or len(data) != num_bytes:
            raise MismatchError(f"'{tag}' met '{theirs}'")
        ctypes.memmove(address, data, num_bytes)

    def follow(self, worker: int, seq: int, tag: str, deadline: float) -> None:
        with self._table.changed:
            while not any(who == worker and number >= seq for who, number in self._table.posts):
                self.check()
                if not self._table.changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise SilenceError(f"worker {worker} did not come to '{tag}'")

    def check(self) -> None:
        if self._table.failure is not None:
            raise PeerError(self._table.failure[1], self._table.failure[0])

    def check_process(self) -> None:
        pass

    def fail(self, text: str) -> None:
        with self._table.changed:
            self._table.failure = self._table.failure or (self.worker, text)
            self._table.changed.notify_all()

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeMembership:
    """Generations from a list; when there are no more, the worker is dismissed."""

    elastic = True
    first = None

    def __init__(self, *generations: Generation, before: Callable[[Generation], None] = lambda _: None) -> None:
        self._left, self._before = list(generations), before
        self.told: list[Event] = []

    def next(self, known: int, timeout_s: float) -> Generation:
        self.told.append({"waits": known})
        if not self._left:
            raise Dismissed
        self._before(self._left[0])
        return self._left.pop(0)

    def tell(self, event: Event) -> None:
        self.told.append(event)


class FakeFixed(FakeMembership):
    """The same workers for ever."""

    elastic = False

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.first = Generation(1, 0, list(range(num_workers)), None)


def groups(segment: Segment, num_workers: int, **options: Any) -> list[Group]:
    """So many workers of one process that exchange through one table."""
    table = Table()
    return [Group(segment, FakeRounds(table, w, **options), FakeFixed(num_workers)) for w in range(num_workers)]


def together(members: Sequence[Any], body: Callable[[Any], Any]) -> list[Any]:
    """Run a body for each in a thread of its own; return what they returned, or raise what one raised."""
    results: list[Any] = [None] * len(members)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = body(members[number])
        except BaseException as error:  # noqa: BLE001  # a thread's border: the test gets it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "it waits"
    if errors:
        raise errors[0]
    return results
