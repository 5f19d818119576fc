"""The handle that a process of the cluster holds on an agent, which joins a head with the workers of a node.

Importing this module does not import torch: only the process that forks workers needs it (`agent_process.py`).
"""

import select
from contextlib import suppress

from evenstep.agents import process
from evenstep.agents.work import ShippedWork
from evenstep.core.errors import ConfigError, PeerError, SilenceError

__all__ = ["Agent"]

_ENDING_S = 5.0
_WARM_S = 120.0  # to import torch on a node that has never done so


class Agent:
    """An agent in a process of its own, which ends with the thread that created this object. A context manager."""

    def __init__(self) -> None:
        self._process = process.begin("evenstep.agents.agent_process")

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the agent."""
        return self._process.pid

    def warm_up(self) -> None:
        """Wait until the agent has imported what its workers need.

        Raises:
            SilenceError: It has ended instead, or takes longer than two minutes.
        """
        assert self._process.stdout is not None, "the process was started with a pipe as its standard output"
        if not select.select([self._process.stdout], [], [], _WARM_S)[0]:
            raise SilenceError(
                f"the agent (pid {self.pid}) did not import torch within {_WARM_S:g} s; check that the node can read "
                "its Python environment"
            )
        self._wait()

    def join(self, address: tuple[str, int], num_workers: int, token: str, work: ShippedWork) -> None:
        """Take part in a run, after `warm_up`; returns when the run is over, however it ended.

        Raises:
            ConfigError: The head has refused this node; the message says why.
            PeerError: The head is lost.
            SilenceError: The agent has ended.
        """
        text, data = work.pack()
        host, port = address
        with suppress(BrokenPipeError):  # the agent has ended, which _wait reports
            order = {"address": f"{host}:{port}", "workers": num_workers, "token": token, "work": text}
            process.send(self._process.stdin, order, data)
        said = self._wait()
        if "refused" in said:
            raise ConfigError(said["refused"])
        if "lost" in said:
            raise PeerError(said["lost"], 0)

    def _wait(self) -> dict[str, str]:
        found = process.receive(self._process.stdout)
        if found is None:
            code = self._process.wait(_ENDING_S)
            raise SilenceError(f"the agent (pid {self.pid}) {process.describe_end(code)}; see the node's log")
        return found[0]

    def close(self) -> None:
        """End the agent and its workers."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "the process was started with pipes"
            with suppress(BrokenPipeError):
                pipe.close()
