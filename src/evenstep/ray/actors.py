"""What runs on the nodes of a Ray cluster: actors that look after processes of ours, which end with them."""

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
        """Take part in a run until it is over; returns whether the head has refused this node, and what was said."""
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
        """Where agents come to."""
        return self._head.address

    def reports(self, timeout_s: float) -> tuple[list[dict[str, Any]], int | None]:
        """What it has said, after waiting for so long at most, and its exit code if it has ended."""
        return self._head.reports(timeout_s), self._head.code

    def result(self) -> bytes | None:
        """What worker 0 has returned, if it has."""
        return self._head.result

    def has_begun(self) -> bool:
        """Whether the workers have met."""
        return self._head.has_begun

    def wait_for(self, num_workers: int) -> None:
        """Let the first step wait for so many workers, no more."""
        self._head.wait_for(num_workers)

    def stop(self) -> None:
        """Let it stop after this step; called again, at once."""
        self._head.stop()
