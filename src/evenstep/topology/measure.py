"""Measuring links: pairs of workers exchange messages, as a run does, and a clock times them.

Workers are forked, one for each core that this process may use and pinned to it, around their own segment. While two of
them exchange, the others sleep. So this measures the path that gradients take between processes of one machine: through
shared memory, with waits and copies.
"""

import json
import os
import select
import signal
import time
from dataclasses import replace

import torch

from evenstep.core.errors import EvenstepError
from evenstep.exchange.group import Group
from evenstep.native import core
from evenstep.plan.topology import Link, Topology
from evenstep.topology.machine import read_cores
from evenstep.transport.segment import Segment

__all__ = ["measure"]

_SMALL_BYTES = 64
_SMALL_TIMES = 200
_REPEATS = 3
_PATIENCE_S = 20.0  # how long a worker waits for another
_PAIR_S = 10.0  # how long a pair may take


def measure(num_bytes: int = 8 << 20, topology: Topology | None = None) -> Topology:
    """Measure the links between the cores that this process may use; blocks for a fraction of a second per pair.

    Call it from a process with one thread, which can be forked.

    Args:
        num_bytes: The size of the large message. The small one has 64 bytes.
        topology: The cores, by `read_cores`; read here if None. Its devices are cores of this machine, in order.

    Returns:
        The topology with a link of its own for every pair: latency of a small message, bandwidth of a large one, each
        the best of several.

    Raises:
        EvenstepError: A worker failed, or took too long.
    """
    topology = topology or read_cores()
    (machine,) = topology.machines
    cores = [int(device.name.removeprefix("core")) for device in machine.devices]
    if len(cores) == 1:
        return topology
    segment = Segment.create(len(cores))
    reading, writing = os.pipe()
    pids: list[int] = []
    try:
        for worker, number in enumerate(cores):
            pid = os.fork()
            if pid == 0:
                _be_worker(segment, worker, number, num_bytes, writing)
            pids.append(pid)
        os.close(writing)
        figures = _listen(reading, _PATIENCE_S + _PAIR_S * len(cores) * (len(cores) - 1) / 2)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reading)
        segment.close()
    links = tuple((a, b, Link(topology.link(a, b).kind, bandwidth, latency)) for a, b, bandwidth, latency in figures)
    return Topology((replace(machine, links=links),), topology.links)


def _listen(pipe: int, timeout_s: float) -> list[tuple[int, int, float, float]]:
    """The measurements that worker 0 writes before it ends."""
    text, deadline = b"", time.monotonic() + timeout_s
    while True:
        if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            raise EvenstepError(f"the links could not be measured within {timeout_s:g} s; try again on idle cores")
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        text += data
    try:
        found = json.loads(text)
    except ValueError:
        raise EvenstepError("a worker ended before all links were measured") from None
    if isinstance(found, str):
        raise EvenstepError(f"the links could not be measured: {found}")
    return [(a, b, bandwidth, latency) for a, b, bandwidth, latency in found]


def _be_worker(segment: Segment, worker: int, core_number: int, num_bytes: int, pipe: int) -> None:
    """Run as one worker; does not return."""
    try:
        core.die_with_parent()
        os.sched_setaffinity(0, {core_number})
        group = Group.around(segment, worker, _PATIENCE_S + _PAIR_S)
        try:
            found: object = _exchange_pairwise(group, num_bytes)
        except Exception as error:  # noqa: BLE001  # the border of the process: reported, and the measurement ends
            found = f"worker {worker}: {error}"
            group.fail(str(error))
        if worker == 0:
            view = memoryview(json.dumps(found).encode())
            while view:
                view = view[os.write(pipe, view) :]
    finally:
        os._exit(0)


def _exchange_pairwise(group: Group, num_bytes: int) -> list[tuple[int, int, float, float]]:
    """(worker, worker, bytes per second, seconds of latency) of every pair, on all workers."""
    mine: list[tuple[int, int, float, float]] = []
    count, me = group.num_workers, group.worker
    small, large = (torch.zeros(1, size, dtype=torch.uint8) for size in (_SMALL_BYTES, num_bytes))
    for a in range(count):
        for b in range(a + 1, count):
            group.barrier(f"pair {a} {b}")
            if me not in (a, b):
                continue
            shares = [int(worker in (a, b)) for worker in range(count)]

            def seconds(rows: torch.Tensor, times: int, shares: list[int] = shares) -> float:
                group.gather("ready", rows, shares)
                begin = time.perf_counter()
                for _ in range(times):
                    group.gather("message", rows, shares)
                return (time.perf_counter() - begin) / times

            latency = min(seconds(small, _SMALL_TIMES) for _ in range(_REPEATS))
            whole = min(seconds(large, 4) for _ in range(_REPEATS))
            if me == a:
                mine.append((a, b, num_bytes / max(whole - latency, 1e-9), latency))
    return [tuple(each) for of_worker in group.gather_json("figures", mine) for each in of_worker]
