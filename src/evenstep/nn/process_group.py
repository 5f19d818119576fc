"""A `torch.distributed` process group as surroundings: every rank is one participant.

The calls are not chained for backward. On one rank autograd runs the nodes in an order that the graph alone fixes, and
every exchange is matched by its tag, so ranks whose graphs differ get an error instead of a mixture.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from evenstep.core.errors import EvenstepError, MismatchError, SilenceError, UnsupportedError
from evenstep.nn.tokenless import Tokenless

__all__ = ["GroupHandle", "ProcessGroup", "around"]

_TAG_BYTES = 256
_REPORT_S = 2.0  # how long the remaining ranks may take to report after a failed exchange
_STORE_S = 2 * _REPORT_S  # how long the store may take to say who has

_LOST = "lost"


class GroupHandle:
    """Holds a process group in a module that may be copied or pickled: a copy has the same group, a pickle has none."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupHandle":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return GroupHandle, (None if self.group is None else _LOST,)


class ProcessGroup(Tokenless):
    """The ranks of a process group, each a participant."""

    def __init__(self, group: Any) -> None:
        self._group = group  # None is the default group

    def meet(self, tag: str, value: Any, lead: Callable[[list[Any]], Any]) -> Any:
        """See `Surroundings`: a rank has no other local participants."""
        return lead([value])[0]

    def call_number(self, layer: object) -> int:
        """See `Surroundings`. Ranks are matched by how often they have called the layer since the group was made."""
        calls = _calls.setdefault(self._group or distributed.group.WORLD, WeakKeyDictionary())
        number = calls.get(layer, 0)
        calls[layer] = number + 1
        return number

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        """See `Surroundings`.

        Raises:
            MismatchError: A rank is at another layer or another call of it.
            SilenceError: A rank did not come within the group's timeout, or was lost.
        """
        device = self._device(rows.device)
        number = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=6).digest(), "little")
        # A rank at another layer may come with another size, on which backends give garbage or hang: so a message of
        # fixed size goes first.
        heads = self._all_gather(tag, torch.tensor([number, rows.shape[1]], dtype=torch.int64, device=device))
        if any(not torch.equal(head, heads[0]) for head in heads):
            raise self._mismatch(tag, device)
        return torch.stack(self._all_gather(tag, rows[0].to(device).contiguous())).to(rows.device)

    def _device(self, wanted: torch.device) -> torch.device:
        """The input's device if the backend can send from there, otherwise one that it can send from."""
        if distributed.get_backend(self._group) == "gloo":  # it would only copy to the host itself
            return torch.device("cpu")
        able = [device.type for device in (self._group or distributed.group.WORLD)._device_types]  # type: ignore[union-attr]  # torch has no public way
        return wanted if wanted.type in able else torch.device(able[0])

    def _all_gather(self, tag: str, row: Tensor) -> list[Tensor]:
        found = [torch.empty_like(row) for _ in range(distributed.get_world_size(self._group))]
        try:
            distributed.all_gather(found, row, group=self._group)
        except EvenstepError:  # our own backend's, which say who it was
            raise
        except RuntimeError as error:
            raise SilenceError(self._blame(tag, error)) from error
        return found

    def _mismatch(self, tag: str, device: torch.device) -> MismatchError:
        """The error for a mismatch. All ranks see it, so all come here and tell each other where they are."""
        text = tag.encode()[:_TAG_BYTES].ljust(_TAG_BYTES, b" ")
        tags = self._all_gather(tag, torch.tensor(list(text), dtype=torch.uint8, device=device))
        members = self._members()
        places = ", ".join(
            f"rank {r} is at '{bytes(t.tolist()).decode(errors='replace').strip()}'"
            for r, t in zip(members, tags, strict=True)
        )
        return MismatchError(
            f"the ranks reached different layers: {places}; all must call the same layers in the same order"
        )

    def _members(self) -> list[int]:
        return distributed.get_process_group_ranks(self._group or distributed.group.WORLD)

    def _blame(self, tag: str, error: RuntimeError) -> str:
        """Find out who is missing: ranks that are still there report in the store."""
        rank = distributed.get_rank()
        answers: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        # In a thread: a store whose host has stopped never answers.
        threading.Thread(
            target=_ask_store, args=(tag, rank, self._members(), answers), name="evenstep-blame", daemon=True
        ).start()
        try:
            missing = answers.get(timeout=_STORE_S)
        except queue.Empty:
            missing = []
        if missing:
            who = f"rank {', '.join(map(str, missing))} did not come"
        else:
            who = "a rank (perhaps 0, which keeps the store) did not come or failed on the way"
        return f"{who} to '{tag}', where rank {rank} waits: {error}"


def _ask_store(tag: str, rank: int, members: list[int], answers: "queue.SimpleQueue[list[int]]") -> None:
    missing = members
    try:
        store = distributed.distributed_c10d._get_default_store()  # torch has no public way
        store.set(f"evenstep/failed/{tag}/{rank}", "here")
        end = time.monotonic() + _REPORT_S
        while missing and time.monotonic() < end:
            missing = [r for r in missing if not store.check([f"evenstep/failed/{tag}/{r}"])]
            time.sleep(0.02)
    except RuntimeError:  # the store is gone with the process that hosted it
        missing = []
    answers.put(missing)


_calls: WeakKeyDictionary[Any, WeakKeyDictionary[Any, int]] = WeakKeyDictionary()  # of each group, of each layer


def around(group: Any) -> ProcessGroup | None:
    """The surroundings of a process group; None if there is none or this rank is not in it.

    Raises:
        UnsupportedError: The layer had a group of its own before it was pickled.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    if group == _LOST:
        raise UnsupportedError(
            "a synchronized batch norm had a process group of its own before it was pickled, and a pickle cannot hold "
            "one; say which group it is to span: convert_sync_batchnorm(model, process_group=...)"
        )
    if group is distributed.GroupMember.NON_GROUP_MEMBER or distributed.get_world_size(group) < 2:
        return None
    return ProcessGroup(group)
