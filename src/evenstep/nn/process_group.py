"""A `torch.distributed` process group as surroundings: every rank is one participant."""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from evenstep.core.errors import MismatchError, SilenceError

__all__ = ["ProcessGroup", "around"]

_TAG_BYTES = 256


class ProcessGroup:
    """The ranks of a process group, each a participant. A rank that is not in the group is alone."""

    def __init__(self, group: Any) -> None:
        self.token: Tensor | None = None
        self._group = group
        self._calls: dict[int, int] = {}

    def meet(self, tag: str, value: Any, lead: Callable[[list[Any]], Any]) -> Any:
        """See `Surroundings`: a rank has no other local participants."""
        return lead([value])[0]

    def call_number(self, layer: object) -> int:
        """See `Surroundings`. Ranks are matched by how often they have called the layer since the group was made."""
        number = self._calls.get(id(layer), 0)
        self._calls[id(layer)] = number + 1
        return number

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        """See `Surroundings`.

        Raises:
            MismatchError: A rank is at another layer or another call of it.
            SilenceError: A rank did not come within the group's timeout, or was lost.
        """
        device = rows.device if distributed.get_backend(self._group) == "nccl" else torch.device("cpu")
        number = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=6).digest(), "little")
        # A rank at another layer may come with another size, which backends answer with garbage or a hang: so a message
        # of fixed size goes first.
        heads = self._all_gather(tag, torch.tensor([number, rows.shape[1]], dtype=torch.int64, device=device))
        if any(not torch.equal(head, heads[0]) for head in heads):
            raise self._mismatch(tag, device)
        return torch.stack(self._all_gather(tag, rows[0].to(device).contiguous())).to(rows.device)

    def _all_gather(self, tag: str, row: Tensor) -> list[Tensor]:
        found = [torch.empty_like(row) for _ in range(distributed.get_world_size(self._group))]
        try:
            distributed.all_gather(found, row, group=self._group)
        except RuntimeError as error:
            raise SilenceError(self._blame(tag, error)) from error
        return found

    def _mismatch(self, tag: str, device: torch.device) -> MismatchError:
        """All ranks see the mismatch, so all come here and tell each other where they are."""
        text = tag.encode()[:_TAG_BYTES].ljust(_TAG_BYTES, b" ")
        mine = torch.tensor(list(text), dtype=torch.uint8, device=device)
        tags = [torch.empty_like(mine) for _ in range(distributed.get_world_size(self._group))]
        distributed.all_gather(tags, mine, group=self._group)
        places = ", ".join(f"rank {r} is at '{bytes(t.tolist()).decode(errors='replace').strip()}'" for r, t in enumerate(tags))
        return MismatchError(f"the ranks reached different layers: {places}; all must call the same layers in the same order")

    def _blame(self, tag: str, error: RuntimeError) -> str:
        """Whoever is still there says so in the store; the others are missing."""
        rank = distributed.get_rank()
        members = distributed.get_process_group_ranks(self._group or distributed.group.WORLD)
        missing = members
        try:
            store = distributed.distributed_c10d._get_default_store()  # type: ignore[attr-defined]  # torch has no public way
            store.set(f"evenstep/failed/{tag}/{rank}", "here")
            end = time.monotonic() + 2.0
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not store.check([f"evenstep/failed/{tag}/{r}"])]
                time.sleep(0.02)
            who = f"rank {', '.join(map(str, missing))}" if missing else "no rank is missing, but the exchange failed; one"
        except RuntimeError:  # the store went with rank 0
            who = "rank 0, which holds the store, or another one"
        return f"{who} did not come to '{tag}', where rank {rank} waits: {error}"


_groups: dict[Any, ProcessGroup] = {}


def around(group: Any) -> ProcessGroup | None:
    """The surroundings that the process group gives, or None where there is none or this rank is not in it."""
    if not distributed.is_available() or not distributed.is_initialized():
        _groups.clear()
        return None
    if group is distributed.GroupMember.NON_GROUP_MEMBER or distributed.get_world_size(group) < 2:
        return None
    key = group if group is not None else distributed.group.WORLD
    if key not in _groups:
        _groups[key] = ProcessGroup(group)
    return _groups[key]
