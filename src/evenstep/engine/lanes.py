"""The shards of one worker computed side by side, taking turns, because a layer combines something over all of them.

Each shard has a thread, so thread-local state (grad mode, autocast) is its own; but only one of them runs at a time, so
user code never runs twice at once and the process-wide random generators can be swapped at the hand-over. They meet
inside the forward of a spanning layer; backward is one call for all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evenstep.core import points
from evenstep.engine.randomness import Stream
from evenstep.engine.slots import Lane
from evenstep.exchange.rendezvous import Lead, Participant, Rendezvous
from evenstep.exchange.surroundings import inside
from evenstep.exchange.threads import Threads, side_by_side
from evenstep.exchange.tracing import Kind, Tracer

__all__ = ["Crew", "LaneSurroundings", "Lanes"]


@dataclass(frozen=True)
class Crew:
    """The workers that compute anything in a step, as a spanning layer sees them: see `Workers`.

    Attributes:
        in_queue: Whether `gather` waits for no device, so that a CUDA graph can contain it.
    """

    gather: Callable[[str, Tensor], Tensor]
    swap: Callable[[str, Tensor], Sequence[Tensor]]
    shards: Sequence[Sequence[int]]
    me: int
    num_shards: int
    is_whole: bool
    in_queue: bool = False

    @property
    def alone(self) -> bool:
        """Whether this worker is the only one."""
        return len(self.shards) == 1


class LaneSurroundings:
    """What a spanning layer sees from one shard's lane."""

    def __init__(self, participant: Participant, prefix: str, crew: Crew, rows: range) -> None:
        self.token: Tensor | None = None
        self._participant: Participant | None = participant
        self._prefix, self._crew, self.rows, self.shard = prefix, crew, rows, participant.identifier
        self.shards, self.me, self.num_shards, self.is_whole = crew.shards, crew.me, crew.num_shards, crew.is_whole
        self.alone = crew.alone
        self._calls: dict[int, int] = {}

    def meet(self, tag: str, value: Any, lead: Lead) -> Any:
        """See `Surroundings`."""
        assert self._participant is not None, "layers meet in forward"
        return self._participant.meet(self._prefix + tag, value, lead)

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        """See `Surroundings`."""
        points.touch("statistics", rows)
        return self._crew.gather(self._prefix + tag, rows)

    def swap(self, tag: str, mine: Tensor) -> Sequence[Tensor]:
        """See `Workers`."""
        return self._crew.swap(self._prefix + tag, mine)

    def call_number(self, layer: object) -> int:
        """See `Surroundings`."""
        number = self._calls.get(id(layer), 0)
        self._calls[id(layer)] = number + 1
        return number

    def end(self) -> None:
        """End the forward. The graph holds the surroundings: if they held it too, neither would ever be freed.

        A token is part of the graph, and a session that failed holds an error whose traceback holds outputs.
        """
        self.token = self._participant = None


class Lanes:
    """Runs one function for each of some shards, each in its lane.

    Args:
        timeout_s: How long a lane may wait for another.
        tracer: Records which lane has its turn when.
    """

    def __init__(self, timeout_s: float, tracer: Tracer) -> None:
        self._tracer, self._turn_ns = tracer, 0
        self._rendezvous = Rendezvous(
            noun="shard", timeout_s=timeout_s, turns=True, resume=self._resume, pause=self._pause
        )
        self._streams: Sequence[Stream] = ()
        self._threads = Threads("lane")
        self._lanes: Sequence[Lane] = ()
        self._shards: Sequence[int] = ()
        self.token: Tensor | None = None  # of the last run; differentiating it too brings backward to every joint node

    def _resume(self, participant: Participant) -> None:
        self._lanes[participant.index].resume()
        self._streams[participant.index].resume()
        self._turn_ns = time.monotonic_ns()

    def _pause(self, participant: Participant) -> None:
        self._tracer.note(Kind.FORWARD, self._turn_ns, number=self._shards[participant.index])
        self._streams[participant.index].pause()
        self._lanes[participant.index].pause()

    def run(
        self,
        shards: Sequence[int],
        lanes: Sequence[Lane],
        streams: Sequence[Stream],
        prefix: str,
        crew: Crew,
        rows: Sequence[range],
        functions: Sequence[Callable[[], Any]],
    ) -> list[Any]:
        """Run the functions in turn; return their results in the order of the shards. `rows` are those of each part.

        Blocks until all have ended. The first error that is not merely a consequence of another's is raised, with a
        note that names its shard.
        """
        self._lanes, self._streams, self._shards = lanes, streams, shards

        def body(me: Participant) -> Any:
            surroundings = LaneSurroundings(me, prefix, crew, rows[me.index])
            try:
                with inside(surroundings):
                    return functions[me.index]()
            finally:
                if me.index == 0:
                    self.token = surroundings.token
                surroundings.end()

        try:
            return side_by_side(self._threads, self._rendezvous.register(shards), body, _explain)
        except BaseException:
            self.token = None
            raise

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def _explain(who: Participant, error: BaseException) -> BaseException:
    error.add_note(f"in shard {who.identifier}")
    return error
