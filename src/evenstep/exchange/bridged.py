"""Exchanges between the workers of several machines: slots, which a bridge on each machine fills with what others post.

The same bridges put ranges of one machine's memory at the same place of another's: `Puts`.
"""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from evenstep.core.errors import SilenceError
from evenstep.core.events import Event
from evenstep.exchange.board import Board
from evenstep.exchange.generations import Generation
from evenstep.exchange.slots import SLICE_NS, Slots
from evenstep.exchange.tracing import Tracer
from evenstep.transport.outbox import ARRIVED, EVERYONE, POST, PUT, Mark, Outbox, Request
from evenstep.transport.segment import Segment

__all__ = ["EVERYONE", "Bridged", "Puts"]


class Bridged(Slots):
    """The slots of a machine, which also hold the posts of other machines' workers: see `Rounds`.

    Args:
        segment: The segment of this machine.
        worker: The worker that this process is.
        timeout_s: How long any wait for another worker may take.
        report: See `Slots`.
    """

    def __init__(
        self, segment: Segment, worker: int, timeout_s: float, report: Callable[[Event], None] | None = None
    ) -> None:
        super().__init__(segment, worker, timeout_s, report)
        self.outbox = Outbox(segment, worker)
        self.generation = 0
        self._machine_of: dict[int, int] = {}

    def begin(self, generation: Generation) -> None:
        """See `Rounds`."""
        super().begin(generation)
        self.generation = generation.number
        self.outbox.start_over()
        machines = generation.machines or [0] * len(generation.members)
        if len(set(machines)) > 1:  # what another machine posts is never here at once, and the bridge needs the core
            self._spin = 0
        self._machine_of = dict(zip(generation.members, machines, strict=True))

    def post(self, seq: int, tag: str, address: int, num_bytes: int, among: Sequence[int]) -> None:
        """See `Rounds`. What concerns workers of this machine only stays here."""
        super().post(seq, tag, address, num_bytes, among)
        here = self._machine_of[self.worker]
        local = sum(self._machine_of[worker] == here for worker in among)
        if local < len(among):
            self.outbox.push(Request(POST, self.generation, seq=seq, num_bytes=num_bytes, local=local))

    def _describe(self, worker: int) -> str:
        machine = self._machine_of.get(worker)
        if machine in (None, self._machine_of.get(self.worker)):
            return super()._describe(worker)
        return f"worker {worker} (on machine {machine})"


class Puts:
    """Ranges of this machine's memory for others, and the wait for theirs.

    Args:
        segment: The segment of this machine.
        rounds: The exchanges of this worker.
    """

    def __init__(self, segment: Segment, rounds: Bridged) -> None:
        self._segment, self._rounds = segment, rounds
        self._arrived, self._board = Mark(segment, ARRIVED), Board(segment)
        self._tracer = Tracer(segment, rounds.worker)

    def put(self, machine: int, data: Tensor | None, word: Tensor, value: int) -> None:
        """Copy memory to the same place of another machine, or of EVERYONE, then set a word there. Does not wait.

        Args:
            machine: The other machine, or EVERYONE.
            data: A tensor of the segment without gaps, which must stay as it is until the other machine has it. None:
                only the word is set.
            word: The word, as one element of a tensor of words.
            value: What to set it to.
        """
        offset, num_bytes = 0, 0
        if data is not None:
            offset, num_bytes = self._segment.memory.locate(data), data.numel() * data.element_size()
        self.put_range(machine, offset, num_bytes, word, value)

    def put_range(self, machine: int, offset: int, num_bytes: int, word: Tensor, value: int) -> None:
        """As `put`, for a range of the segment."""
        place = self._segment.memory.locate(word)
        self._rounds.outbox.push(Request(PUT, self._rounds.generation, machine, offset, num_bytes, place, value))

    def flush(self) -> None:
        """Wait until everything that was put has left this machine: the memory may be changed then.

        Raises:
            PeerError: A worker failed, or a machine is lost.
            SilenceError: It did not leave within the timeout.
        """
        self.wait(self._rounds.outbox.is_empty, "its bridge to take what it has for other machines")

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait for something that another machine puts here.

        Raises:
            PeerError: A worker failed, or a machine is lost.
            SilenceError: It did not come within the timeout.
        """
        if ready():
            return
        rounds, begin, begin_ns = self._rounds, time.monotonic(), time.monotonic_ns()
        self._board.waits(rounds.worker, True)
        try:
            while True:
                seen = self._arrived.seen()
                if ready():
                    break
                rounds.check()
                if time.monotonic() > begin + rounds.timeout_s:
                    raise SilenceError(f"worker {rounds.worker} has waited {rounds.timeout_s:g} s for {what}")
                self._arrived.wait(seen, SLICE_NS / 1e9, self._segment.base)
        finally:
            self._board.waits(rounds.worker, False)
            rounds.waited_s += time.monotonic() - begin
            self._tracer.waited(begin_ns, -1, what)
