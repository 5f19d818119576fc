"""What a computation of shards knows of the run around it: random numbers, the other workers, the tracer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.core import points
from evenstep.engine.lanes import Crew
from evenstep.engine.randomness import derive
from evenstep.exchange.group import Group
from evenstep.exchange.meetings import Meetings, can_meet

__all__ = ["Context"]


class Context:
    """The shards of a run, from the view of a worker that computes some of them.

    Args:
        group: The workers.
        seed: The run's seed.

    Attributes:
        spans: The shards of each worker.
        meetings: How GPUs meet without their hosts, if they can in this generation.
        tracer: Records what this worker does when.
    """

    def __init__(self, group: Group, seed: int) -> None:
        self._group, self._seed, self.tracer = group, seed, group.tracer
        self.spans: Sequence[tuple[int, int]] = ()
        self.meetings: Meetings | None = None

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self._group.worker

    def seed_of(self, number: int, shard: int) -> int:
        """The seed of a shard's random numbers in a step, by the step's number."""
        return derive("step", self._seed, number, shard)

    def begins(self, shard: int) -> None:
        """Note that a shard is computed from now on."""
        torch.clear_autocast_cache()  # it holds casts of old weights: a script may keep autocast open over many steps
        self._group.board.computes(self._group.worker, shard)
        points.reach("forward")

    def regroup(self, device: torch.device) -> None:
        """Begin a generation. All workers must call this alike, and exchange something afterwards."""
        self.close()
        self.meetings = Meetings(self._group, device) if can_meet(self._group, device) else None

    def close(self) -> None:
        """Close the meetings of the device."""
        if self.meetings is not None:
            self.meetings.close()
            self.meetings = None

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device reaches an event, as long as it still can."""
        if self.meetings is None:
            event.synchronize()
        else:
            self.meetings.wait(event)

    def check(self) -> None:
        """Check that the device's meetings with others went well, before anything is changed."""
        if self.meetings is not None:
            self.meetings.check()

    def agree(self, sizes: Sequence[int], tag: str, mine: bool) -> bool:
        """Whether all workers that compute something say yes. They must call this alike."""
        active = [int(any(sizes[first:end])) for first, end in self.spans]
        if sum(active) == 1:
            return mine
        return bool(self._group.gather(tag, torch.tensor([[int(mine)]]), active).min())

    def crew(self, sizes: Sequence[int]) -> Crew:
        """How a layer reaches the other workers: only those with samples take part; other shards are rows of zeros."""
        shards = [[k for k in range(first, end) if sizes[k]] for first, end in self.spans]
        shares = [len(theirs) for theirs in shards]
        present = [k for theirs in shards for k in theirs]  # in the order of the workers
        active = [rank for rank, theirs in enumerate(shards) if theirs]
        order = sorted(range(len(active)), key=lambda n: shards[active[n]])  # in that of their shards
        alone = sum(map(bool, shares)) == 1

        def gather(tag: str, rows: Tensor) -> Tensor:
            if alone and rows.device.type != "cpu":  # nobody else: no need to wait for the device
                found = rows
            elif self.meetings is not None and self.meetings.takes(rows, shares):
                found = self.meetings.gather(tag, rows, shares)
            else:
                found = self._group.gather(tag, rows.cpu(), shares).to(rows.device)
            if present == list(range(len(sizes))):
                return found
            place, nothing = {k: n for n, k in enumerate(present)}, found.new_zeros(found.shape[1])
            return torch.stack([found[place[k]] if k in place else nothing for k in range(len(sizes))])

        def swap(tag: str, mine: Tensor) -> list[Tensor]:
            found = self._group.gather_blobs(tag, mine, [bool(share) for share in shares])
            return [found[n] for n in order]

        crew = [active[n] for n in order]
        me = crew.index(self._group.rank) if self._group.rank in crew else 0
        is_whole = len(present) == sum(map(bool, sizes))
        in_queue = alone or (self.meetings is not None and self.meetings.open)
        return Crew(gather, swap, [shards[rank] for rank in crew], me, len(sizes), is_whole, in_queue)
