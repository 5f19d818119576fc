"""The process of a head: a supervisor whose one worker keeps the state and computes nothing."""

import sys
from collections.abc import Sequence
from pathlib import Path

from evenstep.agents import process
from evenstep.agents.head import HeadOrder
from evenstep.agents.work import MODULE, ShippedWork, hold
from evenstep.core import events
from evenstep.core.errors import EvenstepError
from evenstep.launch.door import Listen
from evenstep.launch.job import Job
from evenstep.launch.supervisor import supervise

__all__ = ["main"]

_SILENCE_S = 5.0  # until a machine that hangs or is cut off is given up; one that dies closes its connection at once


def main(words: Sequence[str]) -> int:
    """Supervise a run; the words are descriptors: a socket that listens, a pipe for events, a file for the result."""
    door_fd, events_fd, result_fd = map(int, words)
    found = process.receive(sys.stdin.buffer)
    if found is None:
        return 0
    told, data = found
    order = HeadOrder(**told["order"])
    hold(ShippedWork.unpack(told["work"], data), result_fd)

    def report(event: events.Event) -> None:
        events.send(events_fd, event)

    listen = Listen(order.host, token=order.token, workers=order.awaited, silence_s=_SILENCE_S, fd=door_fd)
    job = Job(
        MODULE,
        (),
        max(order.workers, 1),
        order.shards,
        max_restarts=order.max_restarts,
        step_timeout_s=order.step_timeout_s,
        resume=order.resume,
        report=report,
        trace=_path(order.trace),
        log_json=_path(order.log_json),
        tensorboard=_path(order.tensorboard),
        page=order.page,
        listen=listen,
        keeper=order.workers == 0,
    )
    try:
        return supervise(job)
    except EvenstepError as error:
        report({"mistake": str(error)})
        return error.exit_code


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
