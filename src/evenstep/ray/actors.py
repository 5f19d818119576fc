"""What runs on a node of a Ray cluster: an actor that looks after our own process there."""

from typing import Any

import ray

from evenstep.agents.agent import Agent
from evenstep.agents.orders import Order

__all__ = ["AgentActor"]


@ray.remote(max_restarts=0, max_task_retries=0)
class AgentActor:
    """An agent as an actor: it dies with its node, and our process on the node dies with it."""

    def __init__(self) -> None:
        self._agent = Agent()

    def facts(self, timeout_s: float) -> dict[str, str]:
        """Wait until the node is ready; returns its versions, address and process."""
        found = self._agent.facts(timeout_s)
        return {**found, "node": f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"}

    def host(self, timeout_s: float) -> tuple[str, int]:
        """Host what the workers of the next attempt find each other by; returns where."""
        return ray.util.get_node_ip_address(), self._agent.host(timeout_s)

    def start(self, order: Order, function: bytes | None, script: tuple[str, str] | None) -> None:
        """Start workers."""
        path, args = order.script, order.args
        if function is not None:
            path, args = self._agent.function(function)
        elif script is not None:
            path = self._agent.script(*script)
        self._agent.start(order.with_script(path, args))

    def reports(self, timeout_s: float) -> tuple[list[dict[str, Any]], int]:
        """What has come, after waiting for so long at most; and how many workers are still running."""
        return self._agent.reports(timeout_s), self._agent.num_running

    def result(self) -> bytes | None:
        """What worker 0 has returned, if it was here."""
        return self._agent.result()

    def stop(self) -> None:
        """End the workers."""
        self._agent.stop()

    def close(self) -> None:
        """End the node's process; the actor is of no use afterwards."""
        self._agent.close()
