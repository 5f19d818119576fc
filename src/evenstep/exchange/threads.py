"""Threads that are the participants of a session: each runs its body, the caller waits and gets what they return."""

import contextvars
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import GeneratorType
from typing import Any

import torch
import torch.utils.checkpoint

from evenstep.exchange.rendezvous import Participant, ParticipantError, Session

__all__ = ["Threads", "side_by_side"]

_GRACE_S = 1.0  # how long the others may take to unwind after a failure before the caller is told anyway
_LISTEN_S = 1.0  # how long the caller waits at a time: a signal that comes just before a wait does not end it


class Threads:
    """Threads that are kept for reuse: the kernels' caches are per thread, and a new one starts cold.

    They are daemons: one that is stuck in user code cannot keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def submit(self, number: int, task: Callable[[], None]) -> None:
        """Let thread `number` run a task, which must not raise, in a copy of the caller's context."""
        while len(self._threads) <= number:
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"evenstep-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(tasks,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
            self._tasks.append(tasks)
        context = contextvars.copy_context()
        self._tasks[number].put(lambda: context.run(task))

    def close(self) -> None:
        """End the threads as soon as they are idle; wait a little for that.

        A joined thread may still be in the kernel libraries' clean-up, holding one of their locks: a process forked
        just then would inherit a lock that is never released. So wait until the system has ended the thread.
        """
        for tasks in self._tasks:
            tasks.put(None)
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            thread.join(timeout=max(deadline - time.monotonic(), 0.001))
            while time.monotonic() < deadline and os.path.exists(f"/proc/self/task/{thread.native_id}"):
                time.sleep(0.0001)
        self._threads, self._tasks = [], []


def _work(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds what it worked on


def side_by_side(
    threads: Threads,
    session: Session,
    body: Callable[[Participant], Any],
    explain: Callable[[Participant, BaseException], BaseException],
) -> list[Any]:
    """Run a body for each participant of the session, each in a thread, with the caller's grad mode and autocast.

    Blocks until all have ended, or soon after one has failed.

    Args:
        threads: The threads to run it in.
        session: A fresh session.
        body: Called with each participant's handle, through which it may meet the others.
        explain: Given the participant that failed first and its error, returns the error to raise.

    Returns:
        What the body returned for each, in the order of the participants.
    """
    modes = _thread_modes()
    outcomes: queue.SimpleQueue[tuple[Participant, Any, BaseException | None]] = queue.SimpleQueue()

    def run(me: Participant) -> None:
        try:
            with me, modes():
                result = body(me)
        except BaseException as error:  # noqa: BLE001  # a thread's border: reported to the caller, who raises it
            _leave_checkpoints(error)
            outcomes.put((me, None, error))
        else:
            outcomes.put((me, result, None))

    try:
        for participant in session.participants:
            threads.submit(participant.index, partial(run, participant))
        results, failures = _collect(outcomes, session)
    except BaseException as error:  # Ctrl-C, or no memory for a thread: end the others at their next meeting
        session.cancel(f"the caller was interrupted by {type(error).__name__}", error)
        raise
    if failures:
        session.forget()
        raise explain(*_first_cause(failures))
    return [results[p.index] for p in session.participants]


def _leave_checkpoints(error: BaseException) -> None:
    """End the activation checkpoints that an error has passed through, in the thread that began them.

    torch before 2.13 ends them when the error is forgotten, wherever that is: their hooks would stay in this thread
    and take the next forward for a part of this one.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in list(frame.f_locals.values()):
            if isinstance(value, GeneratorType) and value.gi_code.co_filename == torch.utils.checkpoint.__file__:
                value.close()


def _collect(
    outcomes: "queue.SimpleQueue[tuple[Participant, Any, BaseException | None]]", session: Session
) -> tuple[dict[int, Any], dict[Participant, BaseException]]:
    results: dict[int, Any] = {}
    failures: dict[Participant, BaseException] = {}
    deadline: float | None = None
    while len(results) + len(failures) < session.num_participants:
        left = _LISTEN_S if deadline is None else max(deadline - time.monotonic(), 0.001)
        try:
            me, result, error = outcomes.get(timeout=left)
        except queue.Empty:
            if deadline is None:
                continue
            break
        if error is None:
            results[me.index] = result
        else:
            failures[me] = error
            deadline = deadline or time.monotonic() + _GRACE_S
    return results, failures


def _first_cause(failures: dict[Participant, BaseException]) -> tuple[Participant, BaseException]:
    """The cause rather than its consequences in the other participants; of several, the first participant's."""
    ordered = sorted(failures.items(), key=lambda item: item[0].index)
    return next((item for item in ordered if not isinstance(item[1], ParticipantError)), ordered[0])


def _thread_modes() -> Callable[[], ExitStack]:
    """The caller's grad mode, autocast state, CUDA stream and number of intra-op threads, for another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cache, num_threads = torch.is_autocast_cache_enabled(), torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
    autocasts = [
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]

    def enter() -> ExitStack:
        torch.set_num_threads(num_threads)  # OpenMP counts per thread, and oneDNN asks OpenMP: a new one has all cores
        if stream is not None:
            torch.cuda.set_stream(stream)  # and its device: both belong to a thread
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, dtype in autocasts:
            stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        return stack

    return enter
