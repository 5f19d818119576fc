"""The in-process synchroniser: the participants of one process meet in rounds. Free of torch.

Participants register for a *session* and each gets a handle. In a round every participant of the session offers a value
under a tag; one of them (always the first that was registered) leads: it sees all offers in registration order and
returns an answer for each. A session has any number of rounds, the next session any other participants. Any value
may be offered or answered, None too.

Nobody waits for ever: a participant that raises, leaves before the others are done, comes under another tag or does
not come within the timeout ends the session for all with an error that names it.

With `turns`, only one participant runs at a time: it runs until it must wait or leaves, then the next one goes on. The
`resume` and `pause` hooks are called by the participant itself when it gets and before it gives up its turn.
"""

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from evenstep.core.errors import MismatchError, SilenceError

__all__ = ["Lead", "Participant", "ParticipantError", "Rendezvous"]

Lead = Callable[[list[Any]], Sequence[Any]]


class ParticipantError(MismatchError):
    """Another participant of the session failed, or left while others still met. Chained to its error, if any."""


class Participant:
    """One participant's handle: `meet` in every round, `leave` at the end, whatever happens."""

    def __init__(self, session: "Rendezvous", identifier: Hashable, index: int) -> None:
        self.identifier = identifier
        self.index = index
        self.running = False
        self.left = False
        self.offer: tuple[str, Any, Lead] | None = None
        self.last_tag = "nothing"
        self.answer: Any = None
        self.wake = threading.Lock()  # locked while there is nothing to wake up for; cheaper than a Semaphore
        self.wake.acquire()
        self._session = session

    def rouse(self) -> None:
        """Let it go on, now or when it next waits. Called with the session's lock held."""
        if self.wake.locked():
            self.wake.release()

    def start(self) -> None:
        """Wait for the first turn; with no turns to take, go on at once."""
        self._session._start(self)

    def meet(self, tag: str, value: Any, lead: Lead) -> Any:
        """Offer a value and return the answer to it.

        Blocks until all participants of the session have come and the first of them has led the round.

        Args:
            tag: What this round is; alike for all.
            value: What this participant offers.
            lead: Called by the leading participant with all offers; returns one answer for each.

        Raises:
            ParticipantError: Another participant failed, left, or raised while leading.
            MismatchError: Another participant came with another tag.
            SilenceError: Another participant did not come within the timeout.
        """
        return self._session._meet(self, tag, value, lead)

    def leave(self, error: BaseException | None = None) -> None:
        """Take part no more. With an error, the session ends for all."""
        self._session._leave(self, error)


class Rendezvous:
    """Sessions of participants that meet in rounds. See the module's contract."""

    def __init__(
        self,
        *,
        noun: str = "participant",
        timeout_s: float = 300.0,
        turns: bool = False,
        resume: Callable[[Participant], None] | None = None,
        pause: Callable[[Participant], None] | None = None,
    ) -> None:
        self.noun = noun
        self.timeout_s = timeout_s
        self._turns = turns
        self._resume = resume or (lambda participant: None)
        self._pause = pause or (lambda participant: None)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._participants: list[Participant] = []
        self._error: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has the settings and no session."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_participants", "_error")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def register(self, identifiers: Sequence[Hashable]) -> list[Participant]:
        """Open a session for these participants, in place of the last one.

        Raises:
            MismatchError: The last session still has participants that neither left nor failed.
        """
        still = [p.identifier for p in self._participants if not p.left]
        if still and self._error is None:
            raise MismatchError(f"{self.noun}s {still} have not left the last session; every handle must leave")
        self._reset()
        self._participants = [Participant(self, identifier, i) for i, identifier in enumerate(identifiers)]
        if self._turns and self._participants:
            self._participants[0].rouse()
        return self._participants

    @property
    def num_participants(self) -> int:
        """How many were registered for the session."""
        return len(self._participants)

    def cancel(self, error: Exception) -> None:
        """End the session for all who wait or will wait."""
        with self._lock:
            self._end(error)

    def _start(self, me: Participant) -> None:
        if self._turns:
            self._wait(me, "the first turn")
        me.running = True
        self._resume(me)

    def _meet(self, me: Participant, tag: str, value: Any, lead: Lead) -> Any:
        with self._lock:
            self._raise_error()
            me.offer, me.last_tag = (tag, value, lead), tag
            self._check_tags(me)
        self._pause(me)
        me.running = False
        with self._lock:
            self._pass_on(me)
        self._wait(me, tag)
        me.running = True
        self._resume(me)
        if me.offer is not None:  # woken without an answer: this is the leader, and everyone has come
            self._lead(me, tag)
        answer, me.answer = me.answer, None
        return answer

    def _lead(self, me: Participant, tag: str) -> None:
        offers = [p.offer for p in self._participants]
        try:
            answers = offers[0][2]([offer[1] for offer in offers if offer])  # type: ignore[index]  # all have come
        except Exception as error:
            self.cancel(self._blame(me, f"failed while leading '{tag}'", error))
            raise
        with self._lock:
            for participant, answer in zip(self._participants, answers, strict=True):
                participant.answer, participant.offer = answer, None
                if participant is not me and not self._turns:
                    participant.rouse()

    def _leave(self, me: Participant, error: BaseException | None) -> None:
        if me.left:
            return
        if me.running:
            self._pause(me)
        with self._lock:
            me.left, me.running = True, False
            if error is not None:
                self._end(self._blame(me, "failed", error))
            else:
                self._check_tags(me)
                self._pass_on(me)

    def _pass_on(self, me: Participant) -> None:
        """Wake whoever can go on now. Called with the lock held, by a participant that is about to wait or gone."""
        if self._error is not None:
            return
        if all(p.offer is not None for p in self._participants):
            self._participants[0].rouse()
        elif self._turns:
            after = self._participants[me.index + 1 :] + self._participants[: me.index]
            for participant in after:
                if participant.offer is None and not participant.left:
                    participant.rouse()
                    return

    def _check_tags(self, me: Participant) -> None:
        """End the session if participants wait for different things, or for one that has left."""
        waiting = [p for p in self._participants if p.offer is not None]
        for other in waiting:
            if other.left or me.offer is None or other.offer is None:
                continue
            if other.offer[0] != me.offer[0]:
                self._end(
                    MismatchError(
                        f"{self.noun} {me.identifier} is at '{me.offer[0]}' but {self.noun} {other.identifier} is at "
                        f"'{other.offer[0]}': all must call the same layers in the same order"
                    )
                )
        gone = [p for p in self._participants if p.left]
        if waiting and gone:
            self._end(
                ParticipantError(
                    f"{self.noun} {gone[0].identifier} ended after '{gone[0].last_tag}' and never came to "
                    f"'{waiting[0].last_tag}', where {self.noun} {waiting[0].identifier} waits"
                )
            )
        if me.offer is not None:
            self._raise_error()

    def _wait(self, me: Participant, tag: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not me.wake.acquire(timeout=min(1.0, max(deadline - time.monotonic(), 0.001))):
            if time.monotonic() >= deadline:
                with self._lock:
                    missing = [str(p.identifier) for p in self._participants if p.offer is None and p is not me]
                    self._end(
                        SilenceError(
                            f"{self.noun} {', '.join(missing)} did not come to '{tag}' within {self.timeout_s:g} s, "
                            f"where {self.noun} {me.identifier} waits"
                        )
                    )
        if self._error is not None:
            me.offer = None
            self._raise_error()

    def _blame(self, who: Participant, what: str, error: BaseException) -> ParticipantError:
        blame = ParticipantError(f"{self.noun} {who.identifier} {what}: {type(error).__name__}: {error}")
        blame.__cause__ = error
        return blame

    def _end(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        for participant in self._participants:
            participant.rouse()

    def _raise_error(self) -> None:
        """Each participant gets an error of its own: one object raised by several threads mixes their tracebacks."""
        if self._error is not None:
            mine = type(self._error)(*self._error.args)
            raise mine from self._error.__cause__
