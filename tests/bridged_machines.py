"""The test kit for several machines: workers around one segment for each, with bridges between them, on this host.

Everything is as under the launcher but who starts it: real processes, real gloo over the loopback interface.
"""

import faulthandler
import mmap
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from evenstep.core import env
from evenstep.core.children import fork
from evenstep.core.config import MAX_SHARDS
from evenstep.launch.store import StoreProcess
from evenstep.transport.bridge import Bridge
from evenstep.transport.links import WORDS, GlooLinks, Transfer
from evenstep.transport.segment import Segment
from workers import Outcome, WorkersFailed, outcomes_of

__all__ = ["counters", "run_machine_outcomes", "run_machines"]


def run_machines(
    counts: Sequence[int], body: Callable[[int], Any], timeout_s: float = 100.0, words: np.ndarray | None = None
) -> list[Any]:
    """Run `body(worker)` on so many workers of each machine; return what they returned, in worker order.

    Args:
        counts: How many workers each machine has.
        body: What they do.
        timeout_s: How long they may take.
        words: Counts the messages, other than ranges of memory, that each machine sends; from `counters`.

    Raises:
        WorkersFailed: A worker raised, exited or was killed.
    """
    outcomes = run_machine_outcomes(counts, body, timeout_s, words)
    if any(outcome.kind for outcome in outcomes):
        raise WorkersFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def counters(count: int) -> np.ndarray:
    """Numbers that forks of this process share with it."""
    return np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64, count)


class _Counted:
    """Links whose messages are counted; see `Links`."""

    def __init__(self, links: GlooLinks, words: np.ndarray) -> None:
        self._links, self._words, self.machine, self.count = links, words, links.machine, links.count

    def send(self, machine: int, channel: int, data: torch.Tensor) -> Transfer:
        self._words[self.machine] += channel == WORDS
        return self._links.send(machine, channel, data)

    def receive(self, machine: int, channel: int, data: torch.Tensor) -> Transfer:
        return self._links.receive(machine, channel, data)


def run_machine_outcomes(
    counts: Sequence[int], body: Callable[[int], Any], timeout_s: float = 100.0, words: np.ndarray | None = None
) -> list[Outcome]:
    """As `run_machines`, but a worker that fails is an `Outcome` like any other."""
    machines = [machine for machine, count in enumerate(counts) for _ in range(count)]
    workers = [[w for w, where in enumerate(machines) if where == machine] for machine in range(len(counts))]
    segments = [Segment.create(MAX_SHARDS) for _ in counts]
    store = StoreProcess()
    bridges = []
    try:
        for machine, segment in enumerate(segments):
            start = partial(_bridge, segment, machine, workers, store.port, words)
            bridges.append(fork(start, keep={segment.fd}))
        places = [
            env.worker_variables(worker, len(machines), None, segments[machine].fd, -1, machines=machines)
            for worker, machine in enumerate(machines)
        ]
        return outcomes_of(places, body, timeout_s)
    finally:
        for bridge in bridges:
            bridge.kill()
        store.close()
        for segment in segments:
            segment.close()


def _bridge(
    segment: Segment, machine: int, workers: Sequence[Sequence[int]], port: int, words: np.ndarray | None
) -> int:
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    links = GlooLinks(store, machine, len(workers), "127.0.0.1", 20.0)
    Bridge(segment, 1, workers, links if words is None else _Counted(links, words)).run()
    return 0
