"""How a process finds its fellow workers: alone, by the launcher's segment, or by torchrun's store."""

import os
from datetime import timedelta

from torch import distributed

from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError, SilenceError
from evenstep.exchange.group import Group
from evenstep.exchange.ledger import Ledger
from evenstep.transport.segment import Segment

__all__ = ["alone", "is_alone", "join"]

_joined: dict[tuple[int, int], Ledger] = {}


def is_alone(env: Environment) -> bool:
    """Whether nobody has started this process as a worker."""
    return env.num_workers == 1 and env.segment_fd is None and not env.torchrun


def alone(timeout_s: float) -> Ledger:
    """Become the only worker of a group; the caller closes it."""
    segment = Segment.create(1)
    try:
        return Ledger(Group.around(segment, 0, timeout_s))
    except BaseException:
        segment.close()
        raise


def join(env: Environment, timeout_s: float) -> Ledger:
    """Become one of several workers. Several runs of a process, one after the other, go on in one ledger.

    Raises:
        ConfigError: The launcher's segment cannot be reached.
    """
    key = (os.getpid(), env.worker)
    if key not in _joined:
        segment = _from_store(env, timeout_s) if env.torchrun else _inherited(env)
        _joined[key] = Ledger(Group.around(segment, env.worker, timeout_s, env.events_fd if env.supervised else None))
    _joined[key].group.timeout_s = timeout_s
    return _joined[key]


def _inherited(env: Environment) -> Segment:
    if env.segment_fd is None:
        raise ConfigError("EVENSTEP_WORKER is set but EVENSTEP_SEGMENT_FD is not; start workers with `evenstep run`")
    return _open(env, env.segment_fd)


def _from_store(env: Environment, timeout_s: float) -> Segment:
    """Worker 0 makes the segment; the others open it through /proc, so that it needs no name."""
    timeout = timedelta(seconds=timeout_s)
    try:
        meeting = distributed.rendezvous("env://", env.worker, env.num_workers, timeout=timeout)  # type: ignore[attr-defined]  # not in __all__
        store, _, _ = next(iter(meeting))
        if env.worker == 0:
            segment = Segment.create(env.num_workers)
            store.set("evenstep/segment", f"/proc/{os.getpid()}/fd/{segment.fd}")
            return segment
        path = store.get("evenstep/segment").decode()
    except RuntimeError as error:
        raise SilenceError(
            f"worker 0 did not come within {timeout_s:g} s: worker {env.worker} waits for its word in torchrun's store "
            f"({error}); look at what it does, or raise Run(timeout_s=...)"
        ) from error
    try:
        return _open(env, os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"worker {env.worker} cannot open worker 0's segment {path} ({error}); all workers must run on one "
            "machine, as one user, in one process namespace"
        ) from error


def _open(env: Environment, fd: int) -> Segment:
    segment = Segment(fd)
    if segment.num_workers != env.num_workers and not env.supervised:
        raise ConfigError(
            f"the segment is for {segment.num_workers} workers but the environment says {env.num_workers}"
        )
    return segment
