"""The workers of torchrun, on any machines: which of them share memory is tested, and bridges join the machines."""

import atexit
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import PrefixStore

from evenstep.core import env
from evenstep.core.children import default_signals, fork
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError, SilenceError
from evenstep.distributed.members import RankMeeting
from evenstep.exchange.group import Group
from evenstep.transport import bridge
from evenstep.transport.bridge import Bridging
from evenstep.transport.links import address_towards
from evenstep.transport.segment import Segment

__all__ = ["meet"]

_FAREWELL_S = 10.0  # how long a machine that is done waits for the others
_GENERATION = 1  # the only one: nobody is ever replaced
_stores: list[Any] = []  # kept open: if torchrun did not make it, worker 0 hosts it, and others may still ask


def meet(environment: Environment, timeout_s: float) -> Group:
    """Become a worker among those that torchrun has started, on one machine or on several.

    Raises:
        ConfigError: Workers of one machine are not neighbours, or cannot reach each other's memory.
        SilenceError: A worker does not come.
    """
    worker, count = environment.worker, environment.num_workers
    store = _store(worker, count, timeout_s)
    _stores.append(store)
    with RankMeeting(PrefixStore("evenstep/workers", store), worker, range(count), timeout_s) as meeting:
        machines = meeting.machines()
        for ranks in machines:
            if list(ranks) != list(range(ranks[0], ranks[-1] + 1)):
                raise ConfigError(
                    f"workers {list(ranks)} share a machine but are not neighbours; number workers machine by machine "
                    "(srun --distribution=block)"
                )
        segment = _segment(store, worker, meeting.local, [member.pid for member in meeting.members], count, timeout_s)
        _await_all(store, worker, count, timeout_s)
        if len(machines) == 1:
            return Group.around(segment, worker, timeout_s)
        machine_of = [machine for machine, ranks in enumerate(machines) for _ in ranks]
        group = Group.across(segment, worker, timeout_s, machines=machine_of)
        if group.leads:
            _build_bridge(segment, machines, group, store, timeout_s)
        return group


def _store(worker: int, count: int, timeout_s: float) -> Any:
    try:
        timeout = timedelta(seconds=timeout_s)
        meeting = distributed.rendezvous("env://", worker, count, timeout=timeout)  # type: ignore[attr-defined]  # not in __all__
        return next(iter(meeting))[0]
    except RuntimeError as error:
        raise _silence(worker, timeout_s, error) from error


def _await_all(store: Any, worker: int, count: int, timeout_s: float) -> None:
    """Wait until all have seen who shares memory with whom, before anybody leaves."""
    store.set(f"evenstep/there/{worker}", "1")
    try:
        store.wait([f"evenstep/there/{other}" for other in range(count)], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise SilenceError(
            f"not all of {count} workers have come within {timeout_s:g} s ({error}); look at what they do, or raise "
            "Run(timeout_s=...)"
        ) from error


def _silence(worker: int, timeout_s: float, error: RuntimeError) -> SilenceError:
    return SilenceError(
        f"worker 0 did not come within {timeout_s:g} s: worker {worker} waits for its word in torchrun's store "
        f"({error}); look at what it does, or raise Run(timeout_s=...)"
    )


def _segment(
    store: Any, worker: int, local: Sequence[int], pids: Sequence[int], count: int, timeout_s: float
) -> Segment:
    """The first worker of a machine makes the segment; the others open it through /proc, so that it needs no name."""
    key = f"evenstep/segment/{local[0]}"
    if worker == local[0]:
        segment = Segment.create(count)
        store.set(key, str(segment.fd))
        return segment
    try:
        fd = int(store.get(key))
    except RuntimeError as error:
        raise _silence(worker, timeout_s, error) from error
    path = f"/proc/{pids[local[0]]}/fd/{fd}"
    try:
        return Segment(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"worker {worker} cannot open the segment {path} of worker {local[0]} ({error}); all workers of a machine "
            "must run as one user, in one process namespace"
        ) from error


def _build_bridge(
    segment: Segment, machines: Sequence[Sequence[int]], group: Group, store: Any, timeout_s: float
) -> None:
    """Start the bridge of this machine, which stays until all machines are done."""
    where = env.store_address()
    machine = group.machine
    addresses = [address_towards(*where) if each == machine else None for each in range(len(machines))]
    plan = Bridging(machine, machines, where, addresses, "gloo")

    def main() -> int:
        default_signals()
        bridge.serve(segment, _GENERATION, plan, timeout_s)
        return 0

    child = fork(main, keep={segment.fd})
    mine = os.getpid()

    def say_farewell() -> None:
        """Wait until the others have what this machine's workers posted last: the bridge ends with this process."""
        if os.getpid() != mine:
            return
        with suppress(Exception):  # they have failed, or are gone
            group.check()
            store.set(f"evenstep/done/{machine}", "1")
            others = [f"evenstep/done/{other}" for other in range(len(machines))]
            store.wait(others, timedelta(seconds=_FAREWELL_S))
        child.kill()

    atexit.register(say_farewell)
