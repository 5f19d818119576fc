"""Adding up what workers send for one synchronous update, in an order that does not depend on arrival.

Two kinds of contributions, never mixed in a round:

- *tree nodes*: sums of gradients over aligned ranges of the K shards of a run, already weighted by sample counts. They
  are added in the fixed tree over shard numbers, as the engine's owners do, to the same bits.
- *means*: one gradient (or delta) for each worker, over its samples. They are weighted here and added in a tree
  over the workers in the order of their names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.exchange.group import tree_sum
from evenstep.plan import tree
from evenstep.server.store.hyperparameters import Hyperparameters

__all__ = ["Contribution", "Round", "Tensors"]

Span = tuple[int, int]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Contribution:
    """One worker's part of an update.

    Attributes:
        tensors: A mean over the worker's samples, by parameter; for tree nodes empty.
        samples: How many samples it is a mean over: its weight among the others.
        nodes: Or the tree nodes: their spans, and what each holds (parameters without a gradient are absent).
        num_shards: K, if these are tree nodes.
        buffers: New values of what the optimizer does not train.
        note: Anything as JSON, which all contributors of the round get back.
        options: The optimizer's options from now on; None: unchanged.
        form: Two contributions with the same form have the same names, dtypes and shapes. None: unknown.
    """

    tensors: Tensors = field(default_factory=dict)
    samples: int = 1
    nodes: Sequence[tuple[Span, Tensors]] = ()
    num_shards: int | None = None
    buffers: Tensors = field(default_factory=dict)
    note: Any = None
    options: Hyperparameters | None = None
    form: object = None


class Round:
    """The contributions to one update so far."""

    def __init__(self) -> None:
        self.parts: dict[str, Contribution] = {}
        self.kind: str | None = None

    def check(self, worker: str, kind: str, part: Contribution) -> None:
        """Check that a contribution fits those already here.

        Raises:
            RefusedError: It is of another kind or for another number of shards, or its shards are already here.
        """
        if self.kind is not None and kind != self.kind:
            raise RefusedError(f"worker '{worker}' sends a {kind} but this update is made of {self.kind}s", 409)
        for other in self.parts.values():
            if other.num_shards != part.num_shards:
                raise RefusedError(
                    f"worker '{worker}' sends {_describe(part)} but this update is made of {_describe(other)}; all "
                    "workers must send the same",
                    409,
                )
        told = [other.options for other in self.parts.values() if other.options is not None]
        if told and part.options is not None and part.options != told[0]:
            raise RefusedError(f"worker '{worker}' sends other options for the optimizer than the others", 409)
        taken = {span for other in self.parts.values() for span, _ in other.nodes}
        for first, end in (span for span, _ in part.nodes):
            if any(first < stop and start < end for start, stop in taken):
                raise RefusedError(
                    f"worker '{worker}' sends shards {first} to {end - 1}, of which some are here already; every "
                    "shard belongs to one worker",
                    409,
                )
        if not part.nodes and part.num_shards is None and part.samples < 1:
            raise RefusedError(f"worker '{worker}' sends a mean over {part.samples} samples, expected at least 1")

    def add(self, worker: str, kind: str, part: Contribution) -> None:
        """Take in a contribution that was checked."""
        self.kind = kind
        self.parts[worker] = part

    def covers_all_shards(self) -> bool | None:
        """Whether every shard is here; None if these are not tree nodes."""
        first = next(iter(self.parts.values()))
        if first.num_shards is None:
            return None
        return sum(end - start for part in self.parts.values() for (start, end), _ in part.nodes) == first.num_shards

    def total(self) -> dict[str, Tensor]:
        """The sum, by parameter; overwrites the contributions."""
        first = next(iter(self.parts.values()))
        return self._total_of_nodes(first.num_shards) if first.num_shards is not None else self._total_of_means()

    def _total_of_nodes(self, num_shards: int) -> dict[str, Tensor]:
        nodes = sorted(((span, held) for part in self.parts.values() for span, held in part.nodes), key=lambda n: n[0])
        program = tree.merge_program(tuple(span for span, _ in nodes), num_shards)
        names = {name: None for _, held in nodes for name in held}
        total = {}
        for name in names:
            present = tuple(name in held for _, held in nodes)
            inputs = [held[name] for _, held in nodes if name in held]
            if len(inputs) > 1:
                tree_sum(inputs, tree.present_program(program, present), inputs[0])
            total[name] = inputs[0]
        return total

    def _total_of_means(self) -> dict[str, Tensor]:
        workers = sorted(self.parts)
        num_samples = sum(self.parts[worker].samples for worker in workers)
        names = {name: None for worker in workers for name in self.parts[worker].tensors}
        total = {}
        for name in names:
            there = [worker for worker in workers if name in self.parts[worker].tensors]
            weighted = [
                self.parts[worker].tensors[name].mul_(self.parts[worker].samples / num_samples)
                if len(workers) > 1
                else self.parts[worker].tensors[name]
                for worker in there
            ]
            total[name] = tree.reduce(weighted, lambda a, b: a.add_(b))
        return total

    def buffers(self) -> dict[str, Tensor]:
        """New values of what the optimizer does not train."""
        return {name: value for part in self.parts.values() for name, value in part.buffers.items()}

    def options(self) -> Hyperparameters | None:
        """The optimizer's options from now on, if any contribution brings some."""
        return next((part.options for part in self.parts.values() if part.options is not None), None)

    def notes(self) -> list[Any]:
        """The notes of the contributors, in the order of their shards or names."""
        order = sorted(self.parts, key=lambda worker: ([span for span, _ in self.parts[worker].nodes], worker))
        return [self.parts[worker].note for worker in order]


def _describe(part: Contribution) -> str:
    return "means" if part.num_shards is None else f"nodes of a tree over {part.num_shards} shards"
