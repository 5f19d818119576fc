"""How a process finds its fellow workers: none, by the launcher's segment, or by torchrun's store."""

import os

from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError
from evenstep.exchange.group import Group
from evenstep.exchange.ledger import Ledger
from evenstep.exchange.tracing import Tracer
from evenstep.run.nodes import meet
from evenstep.transport.segment import Segment

__all__ = ["alone", "is_alone", "join"]

_joined: dict[tuple[int, int], Ledger] = {}


def is_alone(env: Environment) -> bool:
    """Whether nobody has started this process as a worker."""
    return env.num_workers == 1 and env.segment_fd is None and not env.torchrun


def alone(env: Environment, timeout_s: float) -> Ledger:
    """Become the only worker of a group; the caller closes it. If there is a launcher, it can trace what is done."""
    segment = Segment.create(1)
    try:
        ledger = Ledger(Group.around(segment, 0, timeout_s))
        if env.segment_fd is not None:
            ledger.group.tracer = Tracer(_inherited(env), env.worker)
        return ledger
    except BaseException:
        segment.close()
        raise


def join(env: Environment, timeout_s: float) -> Ledger:
    """Become one of several workers. Consecutive runs of a process share one ledger.

    Raises:
        ConfigError: The launcher's segment cannot be reached.
    """
    key = (os.getpid(), env.worker)
    if key not in _joined:
        _joined[key] = Ledger(meet(env, timeout_s) if env.torchrun else _group(env, _inherited(env), timeout_s))
    _joined[key].group.timeout_s = timeout_s
    return _joined[key]


def _group(env: Environment, segment: Segment, timeout_s: float) -> Group:
    events_fd = env.events_fd if env.supervised else None
    if env.machines is None:
        return Group.around(segment, env.worker, timeout_s, events_fd)
    return Group.across(segment, env.worker, timeout_s, events_fd=events_fd, machines=env.machines)


def _inherited(env: Environment) -> Segment:
    if env.segment_fd is None:
        raise ConfigError("EVENSTEP_WORKER is set but EVENSTEP_SEGMENT_FD is not; start workers with `evenstep run`")
    return _open(env, env.segment_fd)


def _open(env: Environment, fd: int) -> Segment:
    segment = Segment(fd)
    if segment.num_workers != env.num_workers and not env.supervised and env.machines is None:
        raise ConfigError(
            f"the segment is for {segment.num_workers} workers but the environment says {env.num_workers}"
        )
    return segment
