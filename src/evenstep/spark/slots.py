"""Slots for the first workers: whether the application has as many, and how long they are waited for."""

import time
from typing import Any, Protocol

from evenstep.agents.view import RunView
from evenstep.core.errors import ConfigError, SilenceError

__all__ = ["FirstWorkers", "await_slots"]

_LOOK_S = 0.25
_APPEARING_S = 10.0  # how long executors may take to register
_PATIENCE_S = 5.0  # until the user is told what is waited for
_OFTEN_S = 1.0


def await_slots(context: Any, least: int, most: int, timeout_s: float) -> int:
    """How many workers to begin with: as many of `most` as the application has slots, taken or not.

    An application with dynamic allocation has more as soon as they are asked for.

    Raises:
        ConfigError: There are fewer than `least`, and will be.
    """
    deadline = time.monotonic() + min(timeout_s, _APPEARING_S)
    expected = _to_come(context)
    while True:
        inner = context._jsc.sc()
        slots = int(inner.maxNumConcurrentTasks(inner.resourceProfileManager().defaultResourceProfile()))
        if max(slots, expected) >= least:
            return min(max(slots, least), most)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{least} workers, but the application has {max(slots, expected):g} task slots; expected one for each: "
                "use fewer workers, or start it with more cores (spark.executor.instances, spark.executor.cores)"
            )
        time.sleep(_LOOK_S)


def _to_come(context: Any) -> float:
    """How many slots dynamic allocation may add up to."""
    options = context.getConf()
    if options.get("spark.dynamicAllocation.enabled", "false") != "true":
        return 0
    executors = float(options.get("spark.dynamicAllocation.maxExecutors", "inf"))
    return executors * (int(options.get("spark.executor.cores", "1")) // int(options.get("spark.task.cpus", "1")))


class _Head(Protocol):
    @property
    def has_begun(self) -> bool: ...

    def wait_for(self, num_workers: int) -> bool: ...


class _Tasks(Protocol):
    def running(self) -> tuple[int, int]: ...


class FirstWorkers:
    """Those who look whether the first workers come, until they have met.

    Args:
        head: Who waits for them.
        stage: Knows how many of their tasks have a slot, and how many of other jobs.
        least: How many there must be.
        awaited: How many the head waits for.
        timeout_s: How long they may take.
        view: Where the user is told.
    """

    def __init__(self, head: _Head, stage: _Tasks, least: int, awaited: int, timeout_s: float, view: RunView) -> None:
        self._head, self._stage, self._view = head, stage, view
        self._least, self._awaited, self._timeout_s = least, awaited, timeout_s
        self._since = self._looked_at = time.monotonic()
        self._have_met, self._was_said, self._most_seen = False, False, 0

    def look(self) -> None:
        """See how far they are; call it several times a second.

        If not all tasks have got a slot after some seconds, the user is told, or the run begins with fewer workers if
        these are enough.

        Raises:
            SilenceError: They have not met in time.
        """
        now = time.monotonic()
        if self._have_met or now - self._looked_at < _OFTEN_S:
            return
        self._looked_at, self._have_met = now, self._head.has_begun
        if self._have_met:
            return
        waited_s, (ours, others) = now - self._since, self._stage.running()
        self._most_seen = max(self._most_seen, ours)  # fewer later may mean that the run has just ended
        if waited_s < min(_PATIENCE_S, self._timeout_s):
            return
        if self._least <= ours < self._awaited:
            if self._head.wait_for(ours):
                self._awaited = ours
        elif self._most_seen < self._least and not self._was_said:
            self._was_said = True
            self._view.warn(f"{self._lack(ours, others)}; waiting for up to {self._timeout_s:g} s")
        if waited_s > self._timeout_s:
            raise SilenceError(
                f"the first workers did not start within {self._timeout_s:g} s: {self._lack(ours, others)}; wait for "
                "other jobs, use fewer workers, or raise start_timeout_s (startTimeout of an estimator)"
            )

    def _lack(self, ours: int, others: int) -> str:
        return (
            f"workers asked for: {self._least}, with a task slot: {ours}, slots that other jobs of the application "
            f"have: {others}"
        )
