"""What tasks do: one on each executor has an agent with a worker for every task there; the others hold their slots."""

import errno
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

from evenstep.agents.agent import Agent
from evenstep.agents.work import ShippedWork
from evenstep.core.errors import SilenceError

__all__ = ["SparkTask", "take_part"]

_LONGEST_S = 120.0  # how long the first task of an executor may take to start an agent
_TAKEN, _OVER = b"t", b"o"


@dataclass(frozen=True)
class SparkTask:
    """What every task needs to know.

    Attributes:
        work: What its worker runs.
        address: The address of the head.
        token: The secret that the head asks for.
        name: The name of the run, by which its tasks find each other and no others.
    """

    work: ShippedWork
    address: tuple[str, int]
    token: str
    name: str


def take_part(task: SparkTask) -> None:
    """The body of a task; returns when the run is over.

    The tasks of an executor are forked from one process, and find each other by its id: the first to arrive starts an
    agent, and those that arrive before it has imported everything get a worker in it. A later one starts another agent.

    Raises:
        ConfigError: The head has refused this executor.
        PeerError: The head is lost.
        SilenceError: The agent has ended, or the task that has it.
    """
    name = f"\0evenstep/{os.getuid()}/{task.name}/{os.getppid()}"
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            try:
                door.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                door.listen()
                _lead(task, door)
                return
        if _lodge(name):
            return


def _lead(task: SparkTask, door: socket.socket) -> None:
    lodgers: list[socket.socket] = []
    try:
        with Agent() as agent:
            agent.warm_up()
            door.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    lodgers.append(door.accept()[0])
            door.close()
            for lodger in lodgers:
                lodger.send(_TAKEN)
            agent.join(task.address, 1 + len(lodgers), task.token, task.work)
        for lodger in lodgers:
            lodger.send(_OVER)
    finally:
        for lodger in lodgers:
            lodger.close()


def _lodge(name: str) -> bool:
    """Hold the slot of a worker that another task's agent has, until the run is over; False: no agent took us in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as leader:
        leader.settimeout(_LONGEST_S)
        try:
            leader.connect(name)
            if leader.recv(1) != _TAKEN:
                return False
        except (ConnectionError, FileNotFoundError):
            return False
        leader.settimeout(None)
        with suppress(ConnectionError):
            if leader.recv(1) == _OVER:
                return True
    raise SilenceError("the task that had this executor's agent has failed; see the executor's log")
