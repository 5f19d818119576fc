"""The bridge of a machine: what its workers post goes to the other machines, what theirs post comes into its slots.

So an exchange need not know how many machines there are: every worker of the run has its slot on every machine, written
by the worker itself on its own machine and by the bridge on the others. The bridge also puts ranges of this segment at
the same place of the others' (tree nodes of gradients, state). Each generation has its own bridge, in its own process;
when the generation is over it is killed, and nothing of it remains.

What workers of one machine post in one exchange goes to each other machine as one message. Bridges with nothing else to
send *beat*: the way between two machines may be cut though both reach the head.
"""

import mmap
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from evenstep.core import points
from evenstep.native import core
from evenstep.transport import words
from evenstep.transport.links import (
    ALTERED,
    HEADS,
    RANGES,
    REST,
    SEAL_BYTES,
    WORDS,
    Links,
    Transfer,
    connect,
    seal_of,
)
from evenstep.transport.outbox import ARRIVED, EVERYONE, POST, Mark, Request, Requests
from evenstep.transport.segment import SEGMENT_BYTES, Segment
from evenstep.transport.silence import Silence

__all__ = ["Bridge", "Bridging", "serve"]

_WORDS_AHEAD = 4  # how many words, and how many heads of ranges, are expected at a time
_HEADS_AHEAD = 16
_WORDS_HELD = 32  # words to a machine that are kept: gloo drops what nobody holds, and older ones have left
_LOOK_S = 0.05
_ANY_PORT = 9
_PROBE_S = 1.0  # how long a machine may take to answer at all
_Coming: TypeAlias = "tuple[Request, tuple[Tensor, Transfer] | None]"  # None: there is no range, only a word
_UnderWay: TypeAlias = "tuple[int, Transfer, Tensor]"  # to which machine, and what; must stay alive until it has left


@dataclass(frozen=True)
class Bridging:
    """How the machines of a generation reach each other.

    Attributes:
        machine: Which of them this is, counted in this generation.
        workers: The workers of each.
        store: Where their bridges find each other.
        addresses: The address at which the others reach each; None: not known.
        backend: The backend that moves bytes.
        silence_s: How long a bridge may be silent before its machine counts as lost; None: forever.
    """

    machine: int
    workers: Sequence[Sequence[int]]
    store: tuple[str, int]
    addresses: Sequence[str | None]
    backend: str
    silence_s: float | None = None


class Bridge:
    """One generation's bridge on one machine. `run` returns when it is stopped or a machine is lost.

    Args:
        segment: The segment of this machine.
        generation: Its number.
        workers: The workers of each machine.
        links: To the other machines.
        silence_s: See `Bridging`.
    """

    def __init__(
        self,
        segment: Segment,
        generation: int,
        workers: Sequence[Sequence[int]],
        links: Links,
        silence_s: float | None = None,
    ) -> None:
        self._segment, self._links, self._workers = segment, links, workers
        self._requests = Requests(segment, workers[links.machine], generation)
        self._others = [machine for machine in range(links.count) if machine != links.machine]
        self._whole = mmap.mmap(segment.fd, SEGMENT_BYTES)
        self._begin = torch.frombuffer(self._whole, dtype=torch.uint8, count=1).data_ptr()
        self._arrivals = Mark(segment, ARRIVED)
        # of each machine: words and heads that will come, and the ranges whose heads have come
        self._words: dict[int, deque[tuple[Tensor, Transfer]]] = {machine: deque() for machine in self._others}
        self._heads: dict[int, deque[tuple[Tensor, Transfer]]] = {machine: deque() for machine in self._others}
        self._coming: dict[int, queue.SimpleQueue[_Coming | None]] = {m: queue.SimpleQueue() for m in self._others}
        self._posts: dict[int, list[int]] = {}  # by sequence number: who has posted
        self._silence = None if silence_s is None else Silence(self._others, silence_s, time.monotonic())
        # ranges that are being sent, for each request, with its worker and number
        self._under_way: queue.SimpleQueue[tuple[list[_UnderWay], int, int] | None] = queue.SimpleQueue()
        self._said: deque[_UnderWay] = deque()  # words
        self._told = False  # whether the other machines know of a failure
        self._stopped = threading.Event()
        self._failure: tuple[int, BaseException] | None = None

    def run(self) -> tuple[int, BaseException] | None:
        """Carry messages until `stop` is called, or a machine is lost: return which one, and why.

        The workers of this machine then no longer wait for those of the lost one.
        """
        threads = [
            threading.Thread(target=self._receive, args=(take, machine), name=f"evenstep-bridge-{machine}", daemon=True)
            for machine in self._others
            for take in (self._take_words, self._take_heads, self._take_ranges)
        ]
        threads.append(threading.Thread(target=self._finish_sending, name="evenstep-bridge-sent", daemon=True))
        for thread in threads:
            thread.start()
        while not self._stopped.is_set():
            seen = self._requests.mark.seen()
            found = False
            for worker, number, request in self._requests.take():
                found = True
                if request.kind == POST:
                    self._send_post(worker, request)
                else:
                    self._under_way.put((self._send_range(request), worker, number))
            self._pass_on_failure()
            self._beat()
            if not found:
                self._requests.mark.wait(seen, _LOOK_S)
        self._under_way.put(None)
        if self._failure is not None:
            machine, error = self._failure
            worker = self._workers[machine][0]
            self._abort(worker, f"the connection to the machine of worker {worker} broke: {error}")
        return self._failure

    def stop(self) -> None:
        """Make `run` return. Threads that wait for another machine are daemons, and stay."""
        self._stopped.set()

    # ---- out ----

    def _send_post(self, worker: int, request: Request) -> None:
        """Send what a worker has posted, with that of the others here who take part. It is copied: the slot is free."""
        together = self._posts.setdefault(request.seq, [])
        together.append(worker)
        if len(together) < request.local:
            return
        messages = words.posts(self._segment.base, request.seq, sorted(self._posts.pop(request.seq)))
        for machine in self._others:
            for channel, message in zip((WORDS, REST), messages, strict=False):
                self._say(machine, channel, message)

    def _send_range(self, request: Request) -> list[_UnderWay]:
        under_way = []
        data = self._range(request.offset, request.num_bytes) if request.num_bytes else None
        if data is not None:
            request = request._replace(seal=seal_of(data))
        head = torch.tensor([*request.pack(), 0], dtype=torch.int64).view(torch.uint8)
        for machine in self._others if request.target == EVERYONE else [request.target]:
            under_way += self._send(machine, HEADS, head)
            if data is not None:
                under_way += self._send(machine, RANGES, data)
        return under_way

    def _pass_on_failure(self) -> None:
        """Once the workers of this machine have failed, tell the other machines, once."""
        found = core.aborted(self._segment.base)
        if found is None or self._told:
            return
        self._told = True
        for machine in self._others:
            self._say(machine, WORDS, words.failure(*found))

    def _beat(self) -> None:
        """Send the others something, and find out who is silent."""
        if self._silence is None:
            return
        now = time.monotonic()
        for machine in self._silence.due(now):
            self._say(machine, WORDS, words.beat())
        for machine in self._silence.lost(now):
            self._lose(machine, RuntimeError(f"it has said nothing for {self._silence.silence_s:g} s"))

    def _say(self, machine: int, channel: int, message: Tensor) -> None:
        """Send words, without waiting until they have left."""
        if self._silence is not None:
            self._silence.said(machine, time.monotonic())
        self._said += self._send(machine, channel, message)
        while len(self._said) > _WORDS_HELD * len(self._others):
            to, link, _ = self._said.popleft()
            self._leaves(to, link)

    def _send(self, machine: int, channel: int, data: Tensor) -> list[_UnderWay]:
        try:
            return [(machine, self._links.send(machine, channel, data), data)]
        except RuntimeError as error:
            self._lose(machine, error)
            return []

    def _leaves(self, machine: int, link: Transfer) -> bool:
        """Wait until something has left for a machine; whether it has."""
        try:
            link.wait()
        except RuntimeError as error:
            self._lose(machine, error)
            return False
        return True

    def _finish_sending(self) -> None:
        """Tell workers which of their ranges have left, in the order in which they were put."""
        while (item := self._under_way.get()) is not None:
            under_way, worker, number = item
            if not all(self._leaves(machine, link) for machine, link, _ in under_way):
                return
            self._requests.is_sent(worker, number)
            self._arrivals.bump()

    def _range(self, offset: int, num_bytes: int) -> Tensor:
        return torch.frombuffer(self._whole, dtype=torch.uint8, offset=offset, count=num_bytes)

    # ---- in ----

    def _receive(self, take: Callable[[int], None], machine: int) -> None:
        try:
            while not self._stopped.is_set():
                take(machine)
                if self._silence is not None:
                    self._silence.heard(machine, time.monotonic())
        except RuntimeError as error:
            self._lose(machine, error)
        self._coming[machine].put(None)  # for the thread that waits for ranges

    def _take_words(self, machine: int) -> None:
        ahead = self._words[machine]
        while len(ahead) < _WORDS_AHEAD:
            self._expect_words(machine, words.empty())
        first, arrival = ahead.popleft()
        arrival.wait()
        rest = None
        if num_bytes := words.rest_of(first):
            rest = words.empty(num_bytes)
            self._links.receive(machine, REST, rest).wait()
        if (failure := words.failure_in(first)) is not None:
            self._abort(*failure)
        else:
            words.take_posts(self._segment.base, first, rest)
        self._expect_words(machine, first)

    def _expect_words(self, machine: int, room: Tensor) -> None:
        self._words[machine].append((room, self._links.receive(machine, WORDS, room)))

    def _take_heads(self, machine: int) -> None:
        """Expect the range whose head comes next, though earlier ones may still be on their way."""
        heads = self._heads[machine]
        while len(heads) < _HEADS_AHEAD:
            head = torch.zeros(8 + SEAL_BYTES // 8, dtype=torch.int64)
            heads.append((head, self._links.receive(machine, HEADS, head.view(torch.uint8))))
        head, arrival = heads.popleft()
        arrival.wait()
        request = Request.unpack(head[:8].tolist())
        expected = None
        if request.num_bytes:
            data = self._range(request.offset, request.num_bytes)
            expected = data, self._links.receive(machine, RANGES, data)
        self._coming[machine].put((request, expected))

    def _take_ranges(self, machine: int) -> None:
        coming = self._coming[machine].get()
        if coming is None:
            return
        request, expected = coming
        if expected is not None:
            data, arrival = expected
            arrival.wait()
            points.touch("node", data)
            if seal_of(data) != request.seal:
                route = f"from machine {machine} to machine {self._links.machine}"
                raise RuntimeError(f"{ALTERED} ({request.num_bytes} bytes {route})")
        if request.word:
            core.store(self._begin + request.word, request.value)
        self._arrivals.bump()

    def _abort(self, culprit: int, text: str) -> None:
        """Stop all waits on this machine."""
        self._told = True  # every machine that has to know knows, or is lost
        core.abort_all(self._segment.base, self._segment.num_workers, culprit, text)

    def _lose(self, machine: int, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (machine, error)
        self._stopped.set()


def serve(segment: Segment, generation: int, plan: Bridging, timeout_s: float) -> tuple[int, BaseException] | None:
    """Run the bridge of a machine for one generation, in its own process. Returns when a machine is lost.

    Args:
        segment: The segment of this machine.
        generation: The number of the generation.
        plan: How the machines reach each other.
        timeout_s: How long the others may take to come.

    Returns:
        The machine that was lost, and why; this one if it is not known which.
    """
    torch.set_num_threads(1)
    links = _meet(generation, plan, timeout_s)
    if isinstance(links, tuple):
        lost, error = links
        core.abort_all(
            segment.base, segment.num_workers, plan.workers[lost][0], f"no bridge to other machines: {error}"
        )
        return links
    return Bridge(segment, generation, plan.workers, links, plan.silence_s).run()


def _meet(generation: int, plan: Bridging, timeout_s: float) -> Links | tuple[int, BaseException]:
    """Connect to the others; or return which machine cannot be reached, and why.

    Connecting cannot be interrupted, so it happens in a thread of its own, which ends with this process.
    """
    outcome: queue.SimpleQueue[Links | RuntimeError] = queue.SimpleQueue()

    def connect_all() -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            found = TCPStore(*plan.store, is_master=False, timeout=timeout, wait_for_workers=False)
            rooms = PrefixStore(f"evenstep/bridge/{generation}", found)
            address, count = plan.addresses[plan.machine], len(plan.workers)
            outcome.put(connect(plan.backend, rooms, plan.machine, count, address, timeout_s))
        except RuntimeError as error:
            outcome.put(error)

    threading.Thread(target=connect_all, name="evenstep-bridge-meets", daemon=True).start()
    while True:
        try:
            found = outcome.get(timeout=None if plan.silence_s is None else plan.silence_s / 2)
        except queue.Empty:
            lost = next((m for m, address in enumerate(plan.addresses) if m != plan.machine and _is_cut(address)), None)
            if lost is not None:
                return lost, RuntimeError(f"nobody answers at {plan.addresses[lost]}")
            continue
        return (plan.machine, found) if isinstance(found, RuntimeError) else found


def _is_cut(address: str | None) -> bool:
    """Whether nothing comes back from an address, not even that nobody listens at a port."""
    if address is None:
        return False
    try:
        socket.create_connection((address, _ANY_PORT), timeout=_PROBE_S).close()
    except ConnectionError:
        return False
    except OSError:
        return True
    return False
