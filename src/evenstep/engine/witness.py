"""Records a computation of some shards, so that another computation of them can be compared with it.

The record of a shard is a *trail* (`plan/verdict.py`): digests of its samples, of what it offered to other shards, and
of its loss, metrics, gradients and buffers. Copies of the recorded tensors are kept where they are, as far as there is
room, to show the very element that differs. Digests are only read at the end, so that a GPU is not waited for.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.core.checksum import launch_checksums
from evenstep.engine.lanes import Crew
from evenstep.engine.results import ShardResult
from evenstep.plan.verdict import Trail

__all__ = ["Witness"]

_KEPT_BYTES = 1 << 28
_Stage = list[tuple[str, int]]


class Witness:
    """The record of the shards that one worker computes in one pass.

    Args:
        shards: Which ones.
        wanted: Items, by shard and name, of which copies are always kept; of others only as far as there is room.
    """

    def __init__(self, shards: Sequence[int], wanted: Collection[tuple[int, str]] = ()) -> None:
        self._shards, self._wanted = list(shards), wanted
        self._room = _KEPT_BYTES
        self._last: dict[int, _Stage] = {shard: [] for shard in self._shards}
        self._stages: dict[int, list[_Stage]] = {shard: [] for shard in self._shards}
        self._launched: list[tuple[_Stage, list[str], Tensor]] = []  # digests, and where they belong
        self._copies: dict[tuple[int, str], Tensor] = {}

    # ---- what is noted ----

    def samples(self, shard: int, part: object) -> None:
        """Record the samples of a shard."""
        tensors = [leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor)]
        self._begin_stage(shard, {f"samples[{n}]": leaf for n, leaf in enumerate(tensors)})

    def around(self, crew: Crew, prefix: str) -> Crew:
        """A crew that records what the shards here offer to others.

        Nothing is recorded where there are no others, nor what a CUDA graph offers, which cannot be seen.

        Args:
            crew: The crew.
            prefix: The beginning of the tags of the step's exchanges.
        """
        if crew.alone or crew.in_queue:
            return crew

        def gather(tag: str, rows: Tensor) -> Tensor:
            for shard, row in zip(self._shards, rows, strict=True):
                self._begin_stage(shard, {f"statistics of '{tag.removeprefix(prefix)}'": row})
            return crew.gather(tag, rows)

        def swap(tag: str, mine: Tensor) -> Sequence[Tensor]:
            for shard in self._shards:
                self._begin_stage(shard, {f"what '{tag.removeprefix(prefix)}' sends": mine})
            return crew.swap(tag, mine)

        return replace(crew, gather=gather, swap=swap)

    def gradient(self, shard: int, name: str, gradient: Tensor) -> None:
        """Record a gradient of a shard before it is added to any other; in any order."""
        self._record(shard, {f"gradient of '{name}'": gradient}, self._last[shard])

    def gradients(self, shard: int, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Record all gradients of a shard at once."""
        found = {f"gradient of '{name}'": t for name, t in zip(names, gradients, strict=True) if t is not None}
        self._record(shard, found, self._last[shard])

    def buffers(self, shard: int, buffers: Mapping[str, Tensor]) -> None:
        """Record the buffers that a shard's forward has left."""
        self._record(shard, {f"buffer '{name}'": buffer for name, buffer in buffers.items()}, self._last[shard])

    def carried(self, shard: int, name: str, tensor: Tensor) -> None:
        """Record what a shard hands on to the next step."""
        self._record(shard, {name: tensor}, self._last[shard])

    def results(self, results: Mapping[int, ShardResult]) -> None:
        """Record the results of the step function."""
        for shard, result in results.items():
            means = {"loss": result.loss, **{f"metric '{name}'": mean for name, mean in result.metrics.items()}}
            numbers = {name: torch.tensor([m.total, float(m.weight)], dtype=torch.float64) for name, m in means.items()}
            self._record(shard, numbers, self._last[shard])
            self._last[shard] += [(f"note '{name}'", _hash(text)) for name, text in result.notes.items()]

    def _begin_stage(self, shard: int, named: Mapping[str, Tensor]) -> None:
        self._stages[shard].append([])
        self._record(shard, named, self._stages[shard][-1])

    def _record(self, shard: int, named: Mapping[str, Tensor], stage: _Stage) -> None:
        for name, tensor in named.items():
            if tensor.nbytes <= self._room or (shard, name) in self._wanted:
                self._room -= tensor.nbytes
                self._copies[shard, name] = tensor.detach().clone()
        for device in {tensor.device for tensor in named.values()}:
            names = [name for name, tensor in named.items() if tensor.device == device]
            self._launched.append((stage, names, launch_checksums([named[name] for name in names])))

    # ---- what it came to ----

    def trails(self) -> dict[int, Trail]:
        """The trail of every shard. Gradients come in any order, so the last stage is sorted."""
        for stage, names, digests in self._launched:
            stage += zip(names, digests.tolist(), strict=True)
        self._launched = []
        return {
            shard: (*(tuple(stage) for stage in stages), tuple(sorted(self._last[shard])))
            for shard, stages in self._stages.items()
        }

    def digests(self) -> dict[int, int]:
        """One number for the trail of every shard."""
        return {shard: _hash(repr(trail)) for shard, trail in self.trails().items()}

    def copy(self, shard: int, item: str) -> Tensor | None:
        """An item as it was, if it was kept."""
        return self._copies.get((shard, item))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
