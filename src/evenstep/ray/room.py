"""Room on the nodes of a Ray cluster: what a worker takes, what is free on each node, how many workers fit."""

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from evenstep.core.errors import ConfigError
from evenstep.ray.connection import is_client

__all__ = ["as_options", "needs_of_worker", "node_of_driver", "nodes_of_cluster", "room_in"]


def node_of_driver() -> str:
    """The node where the head is: if it is lost, so is the caller of the run."""
    return str(ray.get_runtime_context().get_node_id())


def nodes_of_cluster(*, whole: bool = False) -> dict[str, dict[str, float]]:
    """The free resources of every living node, by node id, the driver's first; or all that it has, free or not."""
    home = node_of_driver()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != home)
    if whole:
        return {node["NodeID"]: node["Resources"] for node in alive}
    if is_client():  # then only the cluster's own processes can ask for that
        free = ray.get(ray.remote(num_cpus=0)(available_resources_per_node).remote())
    else:
        free = available_resources_per_node()
    return {node["NodeID"]: free.get(node["NodeID"], {}) for node in alive}


def needs_of_worker(cpus: float, gpus: float, others: Mapping[str, float]) -> dict[str, float]:
    """What each worker takes, by the names of the cluster's resources.

    Raises:
        ConfigError: An amount is below 0, or one of the others is no resource of the cluster's own.
    """
    for name, amount in {"cpus_per_worker": cpus, "gpus_per_worker": gpus, **others}.items():
        if not amount >= 0:
            raise ConfigError(f"{name}={amount}, expected a number of at least 0")
    for name in others:
        if name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ConfigError(
                f"resources_per_worker has {name!r}; expected names that `ray start --resources` has given (CPUs and "
                "GPUs: cpus_per_worker, gpus_per_worker)"
            )
    return {"CPU": cpus, "GPU": gpus, **others}


def as_options(takes: dict[str, float]) -> dict[str, Any]:
    """Resources as actors are given them."""
    others = {kind: amount for kind, amount in takes.items() if kind not in ("CPU", "GPU")}
    return {"num_cpus": takes.get("CPU", 0), "num_gpus": takes.get("GPU", 0), "resources": others}


def room_in(free: dict[str, float], needs: dict[str, float]) -> int:
    """How many workers fit into free resources."""
    return min((int((free.get(kind, 0.0) + 1e-6) // amount) for kind, amount in needs.items() if amount), default=1)
