"""Words that everyone may read at any time without an exchange: what a worker is doing, what the supervisor asks for.

Each word has one writer. They serve to supervise a run and are never part of its arithmetic.
"""

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from evenstep.native import core
from evenstep.transport.segment import Segment

__all__ = ["Asked", "Asks", "Board", "Doing", "Spent"]


class _Of(IntEnum):
    """The words of a worker."""

    BUSY_SINCE = 0
    STEP = 1
    SHARD = 2
    WAITING = 3
    HOLDS = 4
    SHARDS = 5
    COMPUTE = 6
    WAIT = 7
    UPDATE = 8
    STEPS = 9


class Asks(IntEnum):
    """What the supervisor asks for: each a number that only grows, so that no request is overlooked."""

    REGROUP = 0
    CHECKPOINT = 1
    STOP = 2


_COMMITTED = 3  # in the supervisor's row, but written by the first worker: how many operations are in the journal
_LACKS_STATE = 4  # in the supervisor's row too: whether the memory of this machine has yet to be given the state
_IMAGE = 5  # 1 + twice the number of operations in the image of the state + which of the two images it is
_FINGERPRINT = 7  # how often the supervisor has asked for one
_TRACED = 8  # whether workers record spans of what they do
_AGAIN = 6  # 1 + the number of operations in the state, while operations of the journal are done again

_SPENT = (_Of.COMPUTE, _Of.WAIT, _Of.UPDATE, _Of.STEPS)

Asked = tuple[int, int, int]


@dataclass(frozen=True)
class Doing:
    """What a worker is doing now.

    Attributes:
        busy_s: How long it has been inside its operation; None: it is in none.
        step: The step of that operation.
        shard: The shard it is computing; None: none.
        waiting: Whether it is waiting for another worker.
    """

    busy_s: float | None
    step: int
    shard: int | None
    waiting: bool


@dataclass(frozen=True)
class Spent:
    """Where the time of a worker has gone since it started.

    Attributes:
        compute_s: In forward and backward, without waits.
        wait_s: Waiting for other workers, in steps.
        update_s: In the optimizer.
        steps_s: In steps altogether; the remainder went into exchanges.
    """

    compute_s: float
    wait_s: float
    update_s: float
    steps_s: float


class Board:
    """The words of a segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._supervisor = segment.num_workers

    def _store(self, worker: int, number: int, value: int) -> None:
        core.store(self._segment.word(worker, number), value)

    def _load(self, worker: int, number: int) -> int:
        return core.load(self._segment.word(worker, number))

    def begin(self, worker: int, step: int) -> None:
        """Note that this worker is inside an operation from now on."""
        self._store(worker, _Of.STEP, step)
        self._store(worker, _Of.SHARD, 0)
        self._store(worker, _Of.BUSY_SINCE, time.monotonic_ns())

    def end(self, worker: int) -> None:
        """Note that this worker is outside any operation."""
        self._store(worker, _Of.BUSY_SINCE, 0)
        self._store(worker, _Of.SHARD, 0)

    def computes(self, worker: int, shard: int) -> None:
        """Note that this worker computes a shard."""
        self._store(worker, _Of.SHARD, shard + 1)

    def waits(self, worker: int, waiting: bool) -> None:
        """Note that this worker waits for another, or no longer does."""
        self._store(worker, _Of.WAITING, int(waiting))

    def has(self, worker: int, shards: range) -> None:
        """Note that this worker has these shards from now on."""
        self._store(worker, _Of.SHARDS, shards.start << 32 | shards.stop)

    def shards(self, worker: int) -> range:
        """The shards that a worker has."""
        both = self._load(worker, _Of.SHARDS)
        return range(both >> 32, both & 0xFFFFFFFF)

    def spend(self, worker: int, spent: Spent) -> None:
        """Add the time that a step has taken this worker."""
        seconds = (spent.compute_s, spent.wait_s, spent.update_s, spent.steps_s)
        for number, more in zip(_SPENT, seconds, strict=True):
            self._store(worker, number, self._load(worker, number) + int(1e9 * more))

    def spent(self, worker: int) -> Spent:
        """Where the time of a worker has gone."""
        return Spent(*(self._load(worker, number) / 1e9 for number in _SPENT))

    def busy_since(self, worker: int) -> int:
        """When a worker began its present operation, by the monotonic clock, in ns; 0: it is in none."""
        return self._load(worker, _Of.BUSY_SINCE)

    def doing(self, worker: int) -> Doing:
        """What a worker is doing now."""
        since = self.busy_since(worker)
        busy_s = (time.monotonic_ns() - since) / 1e9 if since else None
        shard = self._load(worker, _Of.SHARD)
        return Doing(
            busy_s, self._load(worker, _Of.STEP), shard - 1 if shard else None, bool(self._load(worker, _Of.WAITING))
        )

    def row(self, worker: int) -> dict[str, Any]:
        """What a worker is doing, which shards it has, and where its time has gone, as JSON."""
        doing, spent, shards = self.doing(worker), self.spent(worker), self.shards(worker)
        return {
            "step": doing.step,
            "shards": [shards.start, shards.stop],
            "shard": doing.shard,
            "waiting": doing.waiting,
            "compute_s": spent.compute_s,
            "wait_s": spent.wait_s,
            "update_s": spent.update_s,
            "exchange_s": max(spent.steps_s - spent.compute_s - spent.wait_s - spent.update_s, 0.0),
        }

    def clear(self, worker: int) -> None:
        """Clear the row of a free place for the next worker that takes it."""
        for number in _Of:
            self._store(worker, number, 0)

    def ask(self, what: Asks, number: int) -> None:
        """Ask for something, as the supervisor."""
        self._store(self._supervisor, what, number)

    def asked(self) -> Asked:
        """What the supervisor has asked for so far."""
        regroup, checkpoint, stop = (self._load(self._supervisor, what) for what in Asks)
        return regroup, checkpoint, stop

    def ask_fingerprint(self) -> None:
        """Ask the first worker for a fingerprint, as the supervisor."""
        self._store(self._supervisor, _FINGERPRINT, self.fingerprints_asked + 1)

    @property
    def fingerprints_asked(self) -> int:
        """How often a fingerprint was asked for."""
        return self._load(self._supervisor, _FINGERPRINT)

    @property
    def traced(self) -> bool:
        """Whether workers record what they do when; set before the first of them starts."""
        return bool(self._load(self._supervisor, _TRACED))

    @traced.setter
    def traced(self, traced: bool) -> None:
        self._store(self._supervisor, _TRACED, int(traced))

    @property
    def committed(self) -> int:
        """How many operations have been committed."""
        return self._load(self._supervisor, _COMMITTED)

    @committed.setter
    def committed(self, number: int) -> None:
        self._store(self._supervisor, _COMMITTED, number)

    @property
    def lacks_state(self) -> bool:
        """Whether the memory of this machine has yet to be given the state, having joined a run under way."""
        return bool(self._load(self._supervisor, _LACKS_STATE))

    @lacks_state.setter
    def lacks_state(self, lacks: bool) -> None:
        self._store(self._supervisor, _LACKS_STATE, int(lacks))

    def holds(self, worker: int, holds: bool) -> None:
        """Note that this worker has the committed state, or no longer has it."""
        self._store(worker, _Of.HOLDS, int(holds))

    @property
    def is_held(self) -> bool:
        """Whether any living worker has the committed state."""
        return any(self._load(worker, _Of.HOLDS) for worker in range(self._segment.num_workers))

    @property
    def image(self) -> tuple[int, int] | None:
        """How many operations the image of the state contains, and which of the two it is; None: there is none."""
        word = self._load(self._supervisor, _IMAGE)
        return divmod(word - 1, 2) if word else None

    @image.setter
    def image(self, image: tuple[int, int]) -> None:
        self._store(self._supervisor, _IMAGE, 1 + 2 * image[0] + image[1])

    @property
    def again(self) -> int | None:
        """How many operations the state contains while some of the journal are done again; None: all of them."""
        word = self._load(self._supervisor, _AGAIN)
        return word - 1 if word else None

    @again.setter
    def again(self, operations: int | None) -> None:
        self._store(self._supervisor, _AGAIN, 0 if operations is None else 1 + operations)
