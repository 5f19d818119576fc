"""The in-process synchroniser: the participants of one process meet in rounds. Does not use torch.

Participants are registered for a *session* and each gets a handle. In a round every participant of the session offers
a value under a tag; one of them (always the first registered) leads: it sees all offers in registration order and
returns an answer for each. A session has any number of rounds; the next session may have other participants, and
inherits nothing from the last. Any value may be offered or answered, even None.

Nobody waits forever: a participant that raises, leaves before the others are done, comes with another tag or stays
silent beyond the timeout ends the session for all, with an error that names it. Such a session stays ended.

With `turns`, only one participant runs at a time: it runs until it must wait or leaves, then the next one goes on (when
a session ends by an error, all go on at once, to unwind). Each participant calls the `resume` and `pause` hooks itself,
when it gets its turn and before it gives it up.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from evenstep.core.errors import EvenstepError, MismatchError, SilenceError

__all__ = ["Lead", "Participant", "ParticipantError", "Rendezvous", "Session"]

Lead = Callable[[list[Any]], Sequence[Any]]


class ParticipantError(MismatchError):
    """Another participant of the session failed, or left while others still met. Chained to its error, if any."""


class Rendezvous:
    """How participants meet. It holds settings and no session, so models that hold it can be copied and pickled.

    Args:
        noun: What a participant is called in errors.
        timeout_s: How long a participant waits while nothing happens in its session.
        turns: Whether only one participant may run at a time.
        resume: Called by a participant when it begins or goes on to run.
        pause: Called by a participant before it waits or leaves.
    """

    def __init__(
        self,
        *,
        noun: str = "participant",
        timeout_s: float = 300.0,
        turns: bool = False,
        resume: "Callable[[Participant], None] | None" = None,
        pause: "Callable[[Participant], None] | None" = None,
    ) -> None:
        self.noun = noun
        self.timeout_s = timeout_s
        self.turns = turns
        self.resume = resume
        self.pause = pause

    def register(self, identifiers: Sequence[Hashable]) -> "Session":
        """Open a session for these participants; the first of them will lead.

        Raises:
            ValueError: Two participants have the same identifier, so errors could not tell them apart.
        """
        if len(set(identifiers)) != len(identifiers):
            raise ValueError(f"{self.noun}s {list(identifiers)} were registered; each needs an identifier of its own")
        return Session(self, identifiers)


class _Offer(NamedTuple):
    tag: str
    value: Any
    lead: Lead


class Participant:
    """One participant's handle, for one thread: `with participant:`, and `meet` in every round.

    Attributes:
        identifier: What it was registered as.
        index: Its place in the session, 0 for the one that leads.
    """

    def __init__(self, session: "Session", identifier: Hashable, index: int) -> None:
        self.identifier = identifier
        self.index = index
        self._session = session
        self._offer: _Offer | None = None
        self._answer: Any = None
        self._place = "its start"  # the last tag that it came to
        self._running = False
        self._left = False
        self._go = False  # it may run
        self._wake = threading.Lock()  # released to make it look at `_go`; cheaper than a Condition
        self._wake.acquire()

    def __enter__(self) -> "Participant":
        """Wait for the first turn, where there are turns."""
        try:
            if self._session.settings.turns:
                self._session.wait(self, "its first turn")
            self._resume()
        except BaseException as error:
            self.leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def meet(self, tag: str, value: Any, lead: Lead) -> Any:
        """Offer a value and return the answer to it.

        Blocks until all participants of the session have come and the first of them has led the round.

        Args:
            tag: What this round is; the same for all.
            value: What this participant offers.
            lead: Called by the leading participant with all offers; returns one answer for each.

        Raises:
            ParticipantError: Another participant failed, left, or raised while leading.
            MismatchError: Another participant came with another tag, or this one has already left.
            SilenceError: Another participant did not come within the timeout.
            Exception: Whatever `lead` raised, for the participant that leads.
        """
        session = self._session
        self._pause()
        session.arrive(self, _Offer(tag, value, lead))
        session.wait(self, tag)
        self._resume()
        if self._offer is not None:  # woken without an answer: this one leads, and everyone has come
            session.lead(self, tag, lead)
        answer, self._answer = self._answer, None
        return answer

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the session. With an error, it ends for all. Leaving again does nothing."""
        if self._left:
            return
        try:
            self._pause()
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            self._session.depart(self, error)

    def _resume(self) -> None:
        self._running = True
        if self._session.settings.resume is not None:
            self._session.settings.resume(self)

    def _pause(self) -> None:
        was_running, self._running = self._running, False
        if was_running and self._session.settings.pause is not None:
            self._session.settings.pause(self)


class Session:
    """Some participants and their rounds; made by `Rendezvous.register`.

    All state is changed under one lock. A participant waits for its own `_wake` and then looks at `_go` and `_failure`
    under the lock, so a spurious wake-up does no harm and none is lost.

    Attributes:
        settings: The rendezvous that it belongs to.
        participants: The handles, in registration order.
    """

    def __init__(self, settings: Rendezvous, identifiers: Sequence[Hashable]) -> None:
        self.settings = settings
        self.participants = tuple(Participant(self, identifier, i) for i, identifier in enumerate(identifiers))
        self._lock = threading.Lock()
        self._failure: tuple[type[EvenstepError], str, BaseException | None] | None = None
        self._leading: Participant | None = None
        self._progress = time.monotonic()
        if settings.turns and self.participants:
            self._rouse(self.participants[0])

    @property
    def num_participants(self) -> int:
        """How many were registered."""
        return len(self.participants)

    def cancel(self, reason: str, error: BaseException | None = None) -> None:
        """End the session for all that wait now or later."""
        with self._lock:
            self._end(ParticipantError, reason, error)

    def forget(self) -> None:
        """Drop offers, answers and the error itself after a session has failed.

        These may hold autograd graphs whose nodes hold the session, a cycle that no garbage collector finds.
        """
        with self._lock:
            if self._failure is not None:
                self._failure = (*self._failure[:2], None)
            for participant in self.participants:
                participant._offer = participant._answer = None

    # ---- what a participant's handle calls ----

    def arrive(self, me: Participant, offer: _Offer) -> None:
        """Record an offer; wake the participant that can go on now."""
        noun = self.settings.noun
        with self._lock:
            if me._left:
                raise MismatchError(f"{noun} {me.identifier} has left its session and cannot come to '{offer.tag}'")
            self._raise_failure()
            self._progress = time.monotonic()
            me._offer, me._place = offer, offer.tag
            for other in self.participants:
                if other._offer is not None and other._offer.tag != offer.tag:
                    self._end(
                        MismatchError,
                        f"{noun} {me.identifier} is at '{offer.tag}' but {noun} {other.identifier} is at "
                        f"'{other._offer.tag}': all must call the same layers in the same order",
                    )
                if other._left:
                    self._end_without(other, me)
            if self._failure is not None:
                me._offer = None
                self._raise_failure()
            self._pass_on(me)

    def wait(self, me: Participant, tag: str) -> None:
        """Wait to be woken. The only place that waits."""
        while True:
            with self._lock:
                if self._failure is not None:
                    me._offer = None
                    self._raise_failure()
                if me._go:
                    me._go = False
                    return
                # A leader may itself wait that long for other workers, and its error says more than ours.
                patience_s = self.settings.timeout_s * (1 if self._leading is None else 2)
                left_s = self._progress + patience_s - time.monotonic()
                if left_s <= 0:
                    self._end(SilenceError, self._silence(me, tag))
                    continue
            me._wake.acquire(timeout=min(left_s, threading.TIMEOUT_MAX))

    def lead(self, me: Participant, tag: str, lead: Lead) -> None:
        """Answer all offers."""
        with self._lock:
            self._leading, self._progress = me, time.monotonic()
            values = [p._offer.value for p in self.participants if p._offer is not None]
        try:
            answers = list(lead(values))
            if len(answers) != self.num_participants:
                raise ValueError(f"'{tag}' has {len(answers)} answers for {self.num_participants} offers")
        except BaseException as error:
            with self._lock:
                me._offer = None
                self._end_by(me, f"failed while leading '{tag}'", error)
            raise
        with self._lock:
            self._leading, self._progress = None, time.monotonic()
            me._offer = None
            self._raise_failure()
            for participant, answer in zip(self.participants, answers, strict=True):
                participant._answer, participant._offer = answer, None
                if participant is not me and not self.settings.turns:
                    self._rouse(participant)

    def depart(self, me: Participant, error: BaseException | None) -> None:
        """Remove a participant; those that wait for it learn of it at once."""
        with self._lock:
            self._progress = time.monotonic()
            me._left, me._offer = True, None
            if error is not None:
                self._end_by(me, "failed", error)
            for other in self.participants:
                if other._offer is not None:
                    self._end_without(me, other)
            self._pass_on(me)

    # ---- with the lock held ----

    def _pass_on(self, me: Participant) -> None:
        """Wake the participant that can go on, now that `me` waits or is gone."""
        if all(p._offer is not None for p in self.participants):
            self._rouse(self.participants[0])  # once per round: only the last to arrive finds everyone there
        elif self.settings.turns:
            for participant in self.participants[me.index + 1 :] + self.participants[: me.index]:
                if participant._offer is None and not participant._left:
                    self._rouse(participant)
                    return

    def _rouse(self, participant: Participant) -> None:
        participant._go = True
        if participant._wake.locked():
            participant._wake.release()

    def _end(self, kind: type[EvenstepError], message: str, cause: BaseException | None = None) -> None:
        if self._failure is None:  # the first failure is the cause, the others its consequences
            self._failure = (kind, message, cause)
        for participant in self.participants:
            if participant._wake.locked():
                participant._wake.release()

    def _end_by(self, who: Participant, what: str, error: BaseException) -> None:
        reason = f"{self.settings.noun} {who.identifier} {what}: {type(error).__name__}: {error}"
        self._end(ParticipantError, reason, error)

    def _end_without(self, gone: Participant, waiting: Participant) -> None:
        noun = self.settings.noun
        self._end(
            ParticipantError,
            f"{noun} {gone.identifier} ended after '{gone._place}' and never came to '{waiting._place}', "
            f"where {noun} {waiting.identifier} waits",
        )

    def _silence(self, me: Participant, tag: str) -> str:
        noun, timeout_s = self.settings.noun, self.settings.timeout_s
        if self._leading is not None:
            return f"{noun} {self._leading.identifier} has led '{tag}' for more than {2 * timeout_s:g} s"
        late = [p for p in self.participants if p is not me and p._offer is None and not p._left]
        if self.settings.turns:  # the others only wait for the one that has the turn
            late = [p for p in late if p._running or p._go] or late
        names = ", ".join(f"{p.identifier} (last at '{p._place}')" for p in late)
        return f"{noun} {names} did not come to '{tag}' within {timeout_s:g} s, where {noun} {me.identifier} waits"

    def _raise_failure(self) -> None:
        """Raise a separate error for each participant: one object raised in several threads mixes their tracebacks."""
        if self._failure is not None:
            kind, message, cause = self._failure
            raise kind(message) from cause
