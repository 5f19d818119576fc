"""What runs on the nodes of a Ray cluster: actors, each with a process of our own that ends with it."""

from typing import Any

import ray

from evenstep.agents.agent import Agent
from evenstep.agents.head import Head, HeadOrder
from evenstep.agents.work import ShippedWork
from evenstep.core.errors import ConfigError, EvenstepError

__all__ = ["AgentActor", "HeadActor"]


@ray.remote(max_restarts=0, max_task_retries=0)
class AgentActor:
    """An agent, with as many workers as its node has room for."""

    def __init__(self) -> None:
        self._agent = Agent()

    def join(self, address: tuple[str, int], num_workers: int, token: str, work: ShippedWork) -> tuple[bool, str]:
        """Take part in a run until it is over; returns whether the head refused this node, and the reason given."""
        try:
            self._agent.warm_up()
            self._agent.join(address, num_workers, token, work)
        except EvenstepError as error:
            return isinstance(error, ConfigError), str(error)
        return False, ""


@ray.remote(max_restarts=0, max_task_retries=0)
class HeadActor:
    """The head."""

    def __init__(self, work: ShippedWork, options: dict[str, Any]) -> None:
        self._head = Head(work, HeadOrder(ray.util.get_node_ip_address(), **options))

    def address(self) -> tuple[str, int]:
        """Where agents connect."""
        return self._head.address

    def reports(self, timeout_s: float) -> tuple[list[dict[str, Any]], int | None]:
        """What the head has said, waiting at most `timeout_s`, and its exit code if it has ended."""
        return self._head.reports(timeout_s), self._head.code

    def result(self) -> bytes | None:
        """What worker 0 returned, if it has."""
        return self._head.result

    def has_begun(self) -> bool:
        """Whether the workers have met."""
        return self._head.has_begun

    def wait_for(self, num_workers: int) -> None:
        """Make the first step wait for this many workers, no more."""
        self._head.wait_for(num_workers)

    def stop(self) -> None:
        """Ask the run to stop after this step; a second call stops it at once."""
        self._head.stop()
