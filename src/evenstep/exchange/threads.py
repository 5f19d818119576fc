"""Threads that are the participants of a session: each runs its body, the caller waits and gets what they return."""

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from evenstep.exchange.rendezvous import Participant, ParticipantError, Session

__all__ = ["side_by_side", "thread_modes"]

_GRACE_S = 1.0  # how long the others may take to unwind after a failure before the caller is told anyway


def side_by_side(
    session: Session,
    body: Callable[[Participant], Any],
    explain: Callable[[Participant, BaseException], BaseException],
) -> list[Any]:
    """Run a body for each participant of the session, each in a thread, with the caller's grad mode and autocast.

    Blocks until all have ended, or soon after one has failed.

    Args:
        session: A fresh session.
        body: Called with each participant's handle, through which it may meet the others.
        explain: Given the participant that failed first and its error, returns the error to raise.

    Returns:
        What the body returned for each, in the order of the participants.
    """
    modes = thread_modes()
    outcomes: queue.SimpleQueue[tuple[Participant, Any, BaseException | None]] = queue.SimpleQueue()

    def run(me: Participant) -> None:
        try:
            with me, modes():
                result = body(me)
        except BaseException as error:  # noqa: BLE001  # a thread's border: reported to the caller, who raises it
            outcomes.put((me, None, error))
        else:
            outcomes.put((me, result, None))

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, p),
            name=f"evenstep-{session.settings.noun}-{p.identifier}",
            daemon=True,
        )
        for p in session.participants
    ]
    try:
        for thread in threads:
            thread.start()
        results, failures = _collect(outcomes, session)
    except BaseException as error:  # Ctrl-C, or no memory for a thread: let them go at their next meeting
        session.cancel(f"the caller was interrupted by {type(error).__name__}", error)
        _join(threads, _GRACE_S)
        raise
    _join(threads, 0.1)  # they have nothing left to do, or are given up
    if failures:
        raise explain(*_first_cause(failures))
    return [results[p.index] for p in session.participants]


def _collect(
    outcomes: "queue.SimpleQueue[tuple[Participant, Any, BaseException | None]]", session: Session
) -> tuple[dict[int, Any], dict[Participant, BaseException]]:
    results: dict[int, Any] = {}
    failures: dict[Participant, BaseException] = {}
    deadline: float | None = None
    while len(results) + len(failures) < session.num_participants:
        try:
            me, result, error = outcomes.get(timeout=deadline and max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            break
        if error is None:
            results[me.index] = result
        else:
            failures[me] = error
            deadline = deadline or time.monotonic() + _GRACE_S
    return results, failures


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread.ident is not None:
            thread.join(timeout=max(deadline - time.monotonic(), 0.001))


def _first_cause(failures: dict[Participant, BaseException]) -> tuple[Participant, BaseException]:
    """The cause rather than its consequences in the other participants; of several, the first participant's."""
    ordered = sorted(failures.items(), key=lambda item: item[0].index)
    return next((item for item in ordered if not isinstance(item[1], ParticipantError)), ordered[0])


def thread_modes() -> Callable[[], ExitStack]:
    """The caller's grad mode and autocast state, to be entered by another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocasts = [
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, dtype in autocasts:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        return stack

    return enter
