"""What the operations of a process group have in common: who the ranks are, tags, timeouts, and how each is started."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from evenstep.distributed.progress import Jobs
from evenstep.distributed.ranks import Ranks
from evenstep.distributed.reductions import Reduction, reduction
from evenstep.distributed.tensors import check_dense, copy_back
from evenstep.distributed.work import begin_record

__all__ = ["Operations"]

_MOST_KNOWN = 4096
_Base: Any = ProcessGroup  # its methods have several signatures each; ours have the one that torch's functions call


class Operations(_Base):  # type: ignore[misc]  # see _Base
    """A process group without operations.

    Args:
        ranks: The ranks of the group.
        rank: The number of this rank.
        size: How many there are.
        timeout_s: How long an operation waits for a rank.
    """

    def __init__(self, ranks: Ranks, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(rank, size)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, None)
        self._ranks = ranks
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._names = ("", "")
        self._progress = Jobs("evenstep-collectives", ranks.in_background)
        self._tags: dict[tuple[object, ...], bytes] = {}
        self._end = weakref.finalize(self, _end, self._progress, ranks)
        self._end.atexit = False  # the process may end without waiting for what is still open

    def rank(self) -> int:
        """The number of this rank in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    def name(self) -> str:
        """The name of the backend."""
        return "evenstep"

    def getBackendName(self) -> str:  # torch's C++ side looks for this name
        """The name of the backend."""
        return "evenstep"

    _get_backend_name = getBackendName

    # torch's C++ side keeps names in its own backends, of which this group has none, and looks for these methods.

    def getGroupName(self) -> str:
        """The name that torch gave to the group."""
        return self._names[0]

    def setGroupName(self, name: str) -> None:
        """Give the group its name."""
        self._names = (name, self._names[1])

    def getGroupDesc(self) -> str:
        """The user's description of the group."""
        return self._names[1]

    def setGroupDesc(self, desc: str) -> None:
        """Set the description of the group."""
        self._names = (self._names[0], desc)

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations from now on wait for a rank."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End what was started for this group; ranks that wait for this one get an error. torch calls this."""
        self._end()

    def abort(self) -> None:
        """As `shutdown`, but open operations fail on all ranks instead of being waited for."""
        self._ranks.abort()
        self._end()

    # ---- for the operations ----

    def _start(
        self, name: str, job: Callable[[], None], inputs: Sequence[Tensor], result: list[Any], asynchronous: bool
    ) -> Work:
        """Start an operation; see `Jobs.start`. Its inputs are what a profiler shows of it."""
        return self._progress.start(name, job, result, asynchronous, begin_record(name, inputs))

    def _timeout(self, opts: Any) -> float:
        seconds: float = opts.timeout.total_seconds()
        return seconds if seconds > 0 else self._timeout_s

    def _reduction(self, name: str, op: Any, tensor: Tensor, root: int | None = None) -> tuple[Reduction, bytes]:
        how = reduction(op.op, tensor.dtype)
        return how, self._tag(name, how.name, tensor, root)

    def _tag(self, name: str, op: str, tensor: Tensor, root: int | None) -> bytes:
        """An operation in words, which must be equal on all ranks."""
        check_dense(tensor)
        key = (name, op, tensor.dtype, tensor.shape, root)
        tag = self._tags.get(key)
        if tag is None:
            if len(self._tags) >= _MOST_KNOWN:  # the sizes may never repeat
                self._tags.clear()
            words = [op] if op else []
            words += [str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))]
            words += [f"root {root}"] if root is not None else []
            tag = self._tags[key] = f"{name}({', '.join(words)})".encode()
        return tag

    def _finish(self, how: Reduction, tensor: Tensor, target: Tensor) -> None:
        if how.average:
            numbers = torch.view_as_real(target.detach()) if target.is_complex() else target.detach()
            numbers.div_(self._size, rounding_mode=None if numbers.is_floating_point() else "trunc")
        copy_back(tensor, target)


def _end(progress: Jobs, ranks: Ranks) -> None:
    progress.close()
    ranks.close()


def one_after_the_other(jobs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Several jobs as one."""
    if len(jobs) == 1:
        return jobs[0]

    def job() -> None:
        for each in jobs:
            each()

    return job
