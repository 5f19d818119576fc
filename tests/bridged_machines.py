"""The test kit for several machines: workers around one segment for each, with bridges between them, on this host.

Everything is as under the launcher but who starts it: real processes, real gloo over the loopback interface.
"""

import faulthandler
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from evenstep.core import env
from evenstep.core.children import fork
from evenstep.core.config import MAX_SHARDS
from evenstep.launch.store import StoreProcess
from evenstep.transport.bridge import Bridge
from evenstep.transport.links import GlooLinks
from evenstep.transport.segment import Segment
from workers import Outcome, WorkersFailed, outcomes_of

__all__ = ["run_machine_outcomes", "run_machines"]


def run_machines(counts: Sequence[int], body: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run `body(worker)` on so many workers of each machine; return what they returned, in worker order.

    Raises:
        WorkersFailed: A worker raised, exited or was killed.
    """
    outcomes = run_machine_outcomes(counts, body, timeout_s)
    if any(outcome.kind for outcome in outcomes):
        raise WorkersFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def run_machine_outcomes(counts: Sequence[int], body: Callable[[int], Any], timeout_s: float = 60.0) -> list[Outcome]:
    """As `run_machines`, but a worker that fails is an `Outcome` like any other."""
    machines = [machine for machine, count in enumerate(counts) for _ in range(count)]
    workers = [[w for w, where in enumerate(machines) if where == machine] for machine in range(len(counts))]
    segments = [Segment.create(MAX_SHARDS) for _ in counts]
    store = StoreProcess()
    bridges = []
    try:
        for machine, segment in enumerate(segments):
            start = partial(_bridge, segment, machine, workers, store.port)
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


def _bridge(segment: Segment, machine: int, workers: Sequence[Sequence[int]], port: int) -> int:
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    Bridge(segment, 1, workers, GlooLinks(store, machine, len(workers), "127.0.0.1", 20.0)).run()
    return 0
