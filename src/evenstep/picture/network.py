"""A network and its partition as a value: the flow of data, which worker has which shards, who owns what.

`to_json` gives the node-link form that networkx loads: `networkx.node_link_graph(json.load(file), edges="edges")`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.plan.placement import balance, cut

__all__ = ["Network", "Node", "Parameter", "Partition", "partition"]

Span = tuple[int, int]


@dataclass(frozen=True)
class Parameter:
    """A parameter and its owner.

    Attributes:
        name: As `named_parameters` has it.
        shape: Its shape.
        num_bytes: Its size.
        owner: The worker that updates it; None if nothing does, because it is frozen.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    owner: int | None


@dataclass(frozen=True)
class Node:
    """One computation.

    Attributes:
        id: Unique in the network.
        label: The path of the module, or the name of the function.
        kind: The class of the module; "input", "output", "function", or "connector" before and after layers in parts.
        detail: The module's own description.
        shape: The shape of its output, if an example input was given.
        parameters: The names of the parameters it uses.
        meets: Whether all shards meet here, as in batch norm.
        worker: The worker that computes it for all shards, as a part of a partitioned layer; None: each shard's own.
    """

    id: str
    label: str
    kind: str
    detail: str = ""
    shape: tuple[int, ...] | None = None
    parameters: tuple[str, ...] = ()
    meets: bool = False
    worker: int | None = None


@dataclass(frozen=True)
class Partition:
    """Which worker has which shards, and who owns which parameter."""

    spans: tuple[Span, ...]
    parameters: tuple[Parameter, ...]

    @property
    def num_shards(self) -> int:
        """K."""
        return self.spans[-1][1]

    def owned(self, worker: int) -> list[Parameter]:
        """The parameters of a worker."""
        return [parameter for parameter in self.parameters if parameter.owner == worker]


def partition(
    parameters: Sequence[tuple[str, tuple[int, ...], int, bool]], num_shards: int, num_workers: int
) -> Partition:
    """Share out shards and parameters as a run with workers of equal speed does.

    Args:
        parameters: (name, shape, size in bytes, whether it is trained), in the order in which the optimizer has them.
        num_shards: K.
        num_workers: How many workers.

    Raises:
        ConfigError: There are more workers than shards.
    """
    if not 1 <= num_workers <= num_shards:
        raise ConfigError(
            f"{num_workers} workers and {num_shards} shards: every worker needs one; use from 1 to {num_shards} workers"
        )
    trained = [each for each in parameters if each[3]]
    owners = dict(zip((each[0] for each in trained), balance([each[2] for each in trained], num_workers), strict=True))
    found = tuple(Parameter(name, shape, size, owners.get(name)) for name, shape, size, _ in parameters)
    return Partition(tuple(cut(num_shards, num_workers)), found)


@dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
        name: The class of the model.
        nodes: In an order in which they can be computed.
        edges: (id, id): the output of the first is an input of the second.
        partition: Shards, workers and owners.
        source: How it was traced: "fx", "export" or "modules".
        note: What could not be traced, and why; empty if nothing.
    """

    name: str
    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]
    partition: Partition
    source: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The node-link form."""
        parameters = {parameter.name: asdict(parameter) for parameter in self.partition.parameters}
        workers = [
            {"worker": w, "shards": list(span), "owned_bytes": sum(p.num_bytes for p in self.partition.owned(w))}
            for w, span in enumerate(self.partition.spans)
        ]
        facts = {"name": self.name, "source": self.source, "note": self.note, "shards": self.partition.num_shards}
        return {
            "directed": True,
            "multigraph": False,
            "graph": {**facts, "workers": workers},
            "nodes": [{**asdict(n), "parameters": [parameters[name] for name in n.parameters]} for n in self.nodes],
            "edges": [{"source": source, "target": target} for source, target in self.edges],
        }
