"""The bridge of a machine: what its workers post goes to the other machines, what theirs post comes into its slots.

So an exchange does not know how many machines there are: every worker of the run has its slot on every machine, written
by the worker itself on its own and by the bridge on the others. Beside that the bridge puts ranges of this segment at
the same place of the others' (tree nodes of gradients, state). Each generation has a bridge of its own, in a process of
its own; when the generation is over it is killed, and nothing of it is left.

What workers of one machine post in one exchange goes as one message to each other machine.
"""

import ctypes
import mmap
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.native import core
from evenstep.transport.links import RANGES, WORDS, Link, Links
from evenstep.transport.outbox import ARRIVED, EVERYONE, POST, Mark, Request, Requests
from evenstep.transport.segment import SEGMENT_BYTES, Segment

__all__ = ["Bridge"]

_FIRST_BYTES = 4096  # what comes at once; only what does not fit into it needs a second message
_HEAD = struct.Struct("<QQ")  # of a message: bytes in all, number of posts
_POST = struct.Struct(f"<QQQ{core.ES_TAG_BYTES}s")  # of a post: worker, sequence number, bytes, tag
_SLOT_HEAD = struct.Struct(f"<QQQQQ{core.ES_TAG_BYTES}s")  # as it lies before the data of a slot (core.c)
_LOOK_S = 0.05
_AT_ONCE = 4  # ranges on their way to one machine


class Bridge:
    """One generation's bridge on one machine. `run` returns when it is stopped or a machine is lost.

    Args:
        segment: Of this machine.
        generation: Its number.
        workers: The workers of this machine.
        links: To the other machines.
    """

    def __init__(self, segment: Segment, generation: int, workers: Sequence[int], links: Links) -> None:
        self._segment, self._links = segment, links
        self._requests = Requests(segment, workers, generation)
        self._others = [machine for machine in range(links.count) if machine != links.machine]
        self._whole = mmap.mmap(segment.fd, SEGMENT_BYTES)
        self._begin = torch.frombuffer(self._whole, dtype=torch.uint8, count=1).data_ptr()
        self._arrivals = Mark(segment, ARRIVED)
        self._posts: dict[int, list[int]] = {}  # by sequence number: who has posted
        self._under_way: dict[tuple[int, int], deque[tuple[Link, Tensor]]] = {
            (machine, lane): deque() for machine in self._others for lane in (WORDS, RANGES)
        }
        self._stopped = threading.Event()
        self._failure: tuple[int, BaseException] | None = None

    def run(self) -> tuple[int, BaseException] | None:
        """Carry on until `stop` is called, or a machine is lost: then which one, and why."""
        threads = [
            threading.Thread(target=self._receive, args=(take, machine), name=f"evenstep-bridge-{machine}", daemon=True)
            for machine in self._others
            for take in (self._take_words, self._take_ranges)
        ]
        for thread in threads:
            thread.start()
        while not self._stopped.is_set():
            seen = self._requests.mark.seen()
            found = False
            for worker, request in self._requests.take():
                found = True
                self._carry_out(worker, request)
            if not found:
                self._requests.mark.wait(seen, _LOOK_S)
        return self._failure

    def stop(self) -> None:
        """Let `run` return. Those who wait for another machine are daemons, and stay."""
        self._stopped.set()

    # ---- out ----

    def _carry_out(self, worker: int, request: Request) -> None:
        if request.kind == POST:
            together = self._posts.setdefault(request.seq, [])
            together.append(worker)
            if len(together) == request.local:
                self._send_posts(request.seq, sorted(self._posts.pop(request.seq)))
            return
        head = torch.tensor(request.pack(), dtype=torch.int64).view(torch.uint8)
        for machine in self._others if request.target == EVERYONE else [request.target]:
            self._send(machine, RANGES, head)
            if request.num_bytes:
                self._send(machine, RANGES, self._range(request.offset, request.num_bytes))

    def _send_posts(self, seq: int, workers: Sequence[int]) -> None:
        posts = [self._post(worker, seq) for worker in workers]
        size = _HEAD.size + sum(map(len, posts))
        message = b"".join([_HEAD.pack(size, len(posts)), *posts]).ljust(_FIRST_BYTES, b"\0")
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for machine in self._others:
            self._send(machine, WORDS, data[:_FIRST_BYTES])
            if size > _FIRST_BYTES:
                self._send(machine, WORDS, data[_FIRST_BYTES:])

    def _post(self, worker: int, seq: int) -> bytes:
        place = core.slot_data(self._segment.base, worker, seq) - self._segment.base
        _, num_bytes, _, _, _, tag = _SLOT_HEAD.unpack_from(self._whole, place - _SLOT_HEAD.size)
        return _POST.pack(worker, seq, num_bytes, tag) + self._whole[place : place + num_bytes]

    def _send(self, machine: int, lane: int, data: Tensor) -> None:
        under_way = self._under_way[machine, lane]
        while len(under_way) >= 2 * _AT_ONCE:
            self._finish(machine, under_way.popleft()[0])
        try:
            under_way.append((self._links.send(machine, lane, data), data))
        except RuntimeError as error:
            self._lose(machine, error)

    def _finish(self, machine: int, link: Link) -> None:
        try:
            link.wait()
        except RuntimeError as error:
            self._lose(machine, error)

    def _range(self, offset: int, num_bytes: int) -> Tensor:
        return torch.frombuffer(self._whole, dtype=torch.uint8, offset=offset, count=num_bytes)

    # ---- in ----

    def _receive(self, take: Callable[[int], None], machine: int) -> None:
        try:
            while not self._stopped.is_set():
                take(machine)
        except RuntimeError as error:
            self._lose(machine, error)

    def _take_words(self, machine: int) -> None:
        first = torch.empty(_FIRST_BYTES, dtype=torch.uint8)
        self._links.receive(machine, WORDS, first)
        size, count = _HEAD.unpack(ctypes.string_at(first.data_ptr(), _HEAD.size))
        message = first
        if size > _FIRST_BYTES:
            message = torch.empty(size, dtype=torch.uint8)
            message[:_FIRST_BYTES] = first
            self._links.receive(machine, WORDS, message[_FIRST_BYTES:])
        place = _HEAD.size
        for _ in range(count):
            worker, seq, num_bytes, tag = _POST.unpack(ctypes.string_at(message.data_ptr() + place, _POST.size))
            place += _POST.size
            text = tag.rstrip(b"\0").decode(errors="replace")
            core.post(self._segment.base, worker, seq, text, message.data_ptr() + place, num_bytes)
            place += num_bytes

    def _take_ranges(self, machine: int) -> None:
        head = torch.empty(8, dtype=torch.int64)
        self._links.receive(machine, RANGES, head.view(torch.uint8))
        request = Request.unpack(head.tolist())
        if request.num_bytes:
            self._links.receive(machine, RANGES, self._range(request.offset, request.num_bytes))
        if request.word:
            core.store(self._begin + request.word, request.value)
        self._arrivals.bump()

    def _lose(self, machine: int, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (machine, error)
        self._stopped.set()
