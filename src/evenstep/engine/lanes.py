"""The shards of one worker computed side by side, taking turns, because a layer combines something over all of them.

Each shard has a thread, so thread-local state (grad mode, autocast) is its own; but only one of them runs at a time, so
user code never runs twice at once and the process-wide random generators can be swapped at the hand-over. They meet
inside the forward of a spanning layer; backward is one call for all.
"""

import contextvars
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
        self._lanes: Sequence[Lane] = ()

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
            index = participant.index
            try:
                participant.start()
                with modes(), inside(LaneSurroundings(participant, prefix, gather)):
                    results[index] = functions[index]()
            except BaseException as error:  # noqa: BLE001  # a thread's border: reported and re-raised by the caller
                errors[index] = error
                participant.leave(error)
            else:
                participant.leave()

        participants = self._rendezvous.register(shards)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(body, p), name=f"evenstep-shard-{p.identifier}", daemon=True
            )
            for p in participants
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=1.0)
        except BaseException:  # Ctrl-C, say: let the shards go at their next meeting
            self._rendezvous.cancel(RuntimeError("the step was interrupted"))
            for thread in threads:
                thread.join(timeout=5.0)
            raise
        _raise_first(shards, errors)
        return results


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
