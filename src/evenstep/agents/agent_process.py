"""The process of an agent: imports what workers need, is told which head to join, and runs workers until the end."""

import os
import sys
from collections.abc import Sequence

from evenstep.agents import process
from evenstep.agents.work import ShippedWork, hold
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.launch.agent import join
from evenstep.launch.worker import warm_up

__all__ = ["main"]

_WAIT_S = 30.0  # for the head, which is listening already


def main(_: Sequence[str]) -> int:
    """Join the head that is named on standard input."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what imported code prints must not be read as a message
        warm_up()
        process.send(out, {"ready": True})
        order = process.receive(sys.stdin.buffer)
        if order is None:
            return 0
        told, data = order
        hold(ShippedWork.unpack(told["work"], data))
        try:
            join(told["address"], told["workers"], token=told["token"], wait_s=_WAIT_S)
        except EvenstepError as error:
            process.send(out, {"refused" if isinstance(error, ConfigError) else "lost": str(error)})
            return error.exit_code
        process.send(out, {"over": True})
    return 0
