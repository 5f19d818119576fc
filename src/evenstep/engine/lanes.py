"""The shards of one worker computed side by side, taking turns, because a layer combines something over all of them.

Each shard has a thread, so thread-local state (grad mode, autocast) is its own; but only one of them runs at a time, so
user code never runs twice at once and the process-wide random generators can be swapped at the hand-over. They meet
inside the forward of a spanning layer; backward is one call for all.
"""

import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from evenstep.engine.randomness import Stream
from evenstep.engine.slots import Lane
from evenstep.exchange.rendezvous import Lead, Participant, ParticipantError, Rendezvous
from evenstep.exchange.surroundings import inside

__all__ = ["LaneSurroundings", "Lanes"]

Gather = Callable[[str, Tensor], Tensor]


class LaneSurroundings:
    """What a spanning layer sees from one shard's lane."""

    def __init__(self, participant: Participant, prefix: str, gather: Gather) -> None:
        self.token: Tensor | None = None
        self._participant, self._prefix, self._gather = participant, prefix, gather
        self._calls: dict[int, int] = {}

    def meet(self, tag: str, value: Any, lead: Lead) -> Any:
        """See `Surroundings`."""
        return self._participant.meet(self._prefix + tag, value, lead)

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        """See `Surroundings`."""
        return self._gather(self._prefix + tag, rows)

    def call_number(self, layer: object) -> int:
        """See `Surroundings`."""
        number = self._calls.get(id(layer), 0)
        self._calls[id(layer)] = number + 1
        return number


class Lanes:
    """Runs one function for each of some shards, each in its lane."""

    def __init__(self, timeout_s: float) -> None:
        self._rendezvous = Rendezvous(
            noun="shard", timeout_s=timeout_s, turns=True, resume=self._resume, pause=self._pause
        )
        self._streams: list[Stream] = []
        self._threads: list[_LaneThread] = []
        self._lanes: Sequence[Lane] = ()
        self.token: Tensor | None = None  # of the last run: differentiated too, it brings backward to every joint node

    def _resume(self, participant: Participant) -> None:
        self._lanes[participant.index].resume()
        self._streams[participant.index].resume()

    def _pause(self, participant: Participant) -> None:
        self._streams[participant.index].pause()
        self._lanes[participant.index].pause()

    def run(
        self,
        shards: Sequence[int],
        lanes: Sequence[Lane],
        seeds: Sequence[int],
        prefix: str,
        gather: Gather,
        functions: Sequence[Callable[[], Any]],
    ) -> list[Any]:
        """Run the functions in turn; return their results in the order of the shards.

        Blocks until all have ended. The first error that is not merely a consequence of another's is raised, with a note
        that names its shard.
        """
        self._lanes = lanes
        self._streams += [Stream() for _ in range(len(shards) - len(self._streams))]
        for stream, seed in zip(self._streams, seeds, strict=False):
            stream.reseed(seed)
        results: list[Any] = [None] * len(shards)
        errors: list[BaseException | None] = [None] * len(shards)
        modes = _thread_modes()

        def body(participant: Participant) -> None:
            surroundings = LaneSurroundings(participant, prefix, gather)
            try:
                with participant, modes(), inside(surroundings):
                    results[participant.index] = functions[participant.index]()
            except BaseException as error:  # noqa: BLE001  # a thread's border: the caller raises it
                errors[participant.index] = error
            if participant.index == 0:
                self.token = surroundings.token
            surroundings.token = None  # the graph holds the surroundings: the other way round too, both would stay

        session = self._rendezvous.register(shards)
        self._threads += [_LaneThread(len(self._threads) + n) for n in range(len(shards) - len(self._threads))]
        running = [thread.submit(body, p) for thread, p in zip(self._threads, session.participants, strict=False)]
        try:
            for done in running:
                while not done.wait(timeout=1.0):
                    pass
        except BaseException:  # Ctrl-C, say: let the shards go at their next meeting
            session.cancel("the step was interrupted")
            for done in running:
                done.wait(timeout=5.0)
            raise
        _raise_first(shards, errors)
        return results


    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.close()
        self._threads = []


class _LaneThread:
    """A thread that lives as long as the run: the kernels' caches are per thread, and a new one starts cold."""

    def __init__(self, number: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"evenstep-lane-{number}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def submit(self, body: Callable[[Participant], None], participant: Participant) -> threading.Event:
        """Run `body`, which never raises, in the caller's context; the event says when it has ended."""
        done = threading.Event()
        context = contextvars.copy_context()

        def task() -> None:
            context.run(body, participant)
            done.set()

        self._tasks.put(task)
        return done

    def close(self) -> None:
        """End the thread; one that is stuck in user code is left behind, it cannot keep the process."""
        self._tasks.put(None)
        self._thread.join(timeout=5.0)


def _raise_first(shards: Sequence[int], errors: Sequence[BaseException | None]) -> None:
    """Raise the cause rather than its consequences in the other shards."""
    found = [(shard, error) for shard, error in zip(shards, errors, strict=True) if error is not None]
    causes = [(shard, error) for shard, error in found if not isinstance(error, ParticipantError)]
    for shard, error in causes or found:
        error.add_note(f"in shard {shard}")
        raise error


def _thread_modes() -> Callable[[], ExitStack]:
    """The caller's grad mode and autocast state, to be entered by another thread."""
    grad = torch.is_grad_enabled()
    autocasts = [
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, dtype in autocasts:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        return stack

    return enter
