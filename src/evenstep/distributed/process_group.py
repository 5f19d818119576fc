"""The process group that torch sees.

Each operation becomes one call of the ranks, in the order in which they were started. Tensors that are not contiguous
go through a contiguous copy. What torch's own functions check (ranks, lists of equal length) is not checked again.
"""

import functools
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import BarrierOptions, ProcessGroup, Work, _DistributedBackendOptions

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.distributed.errors import LostRankError, SilentRanksError
from evenstep.distributed.moving import Moving
from evenstep.distributed.ranks import meet
from evenstep.distributed.reducing import Reducing
from evenstep.distributed.team import ANY, Call
from evenstep.distributed.tensors import check_dense
from evenstep.distributed.work import begin_record
from evenstep.native import core

__all__ = ["EvenstepProcessGroup", "create_process_group", "monitored_barrier"]


class EvenstepProcessGroup(Reducing, Moving):
    """A process group over shared memory, for CPU tensors.

    Making one blocks until all its ranks have; see `create_process_group`.
    """

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Wait until all ranks have come here."""
        opts = opts or BarrierOptions()
        job = partial(self._meet, b"barrier", self._timeout(opts))
        return self._start("barrier", job, [], [], opts.asyncOp)

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come here.

        On rank 0 the error says, in torch's words, which ranks did not: all if `wait_all_ranks`, otherwise the first.

        Raises:
            SilenceError: A rank did not come within the timeout.
            PeerError: A rank ended or left the group.
        """
        given_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        timeout_s = self._timeout_s if given_s is None else given_s
        if timeout_s <= 0:
            raise SilentRanksError(f"Rank {self._rank} timed out in monitoredBarrier after 0 ms")
        job = partial(self._meet, b"monitored_barrier", timeout_s)
        try:
            self._start("monitored_barrier", job, [], [], asynchronous=False).wait()
        except (SilentRanksError, LostRankError) as error:
            self._explain(error, timeout_s, wait_all_ranks)
            raise

    def _explain(self, error: EvenstepError, timeout_s: float, wait_all_ranks: bool) -> None:
        """Put torch's words before the message."""
        found = error.ranks if isinstance(error, SilentRanksError) else ()
        if self._rank > 0:
            words = f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
            words += "send/recv from rank 0"
        elif wait_all_ranks and found:
            words = f"Ranks {', '.join(map(str, found))} failed to pass monitoredBarrier in {1e3 * timeout_s:g} ms"
        else:
            who = f"Rank {found[0]}" if found else "A rank"
            words = f"{who} failed to pass monitoredBarrier in {1e3 * timeout_s:g} ms"
        error.args = (f"{words}: {error}", *error.args[1:])

    def _meet(self, tag: bytes, timeout_s: float) -> None:
        self._ranks.call(Call(core.ES_BARRIER, tag), None, None, timeout_s)

    # ---- messages ----

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        """Send a tensor to a rank."""
        (tensor,) = tensors
        check_dense(tensor)
        self._progress.check_process()
        return self._ranks.send(tensor, target, tag, self._timeout_s, begin_record("send", tensors))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank."""
        return self._receive("recv", tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self._receive("recvAnySource", tensors, ANY, tag)

    def _receive(self, name: str, tensors: list[Tensor], source: int, tag: int) -> Work:
        (tensor,) = tensors
        check_dense(tensor)
        self._progress.check_process()
        return self._ranks.receive(tensor, source, tag, self._timeout_s, begin_record(name, tensors))

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: operations run in order, and each call is short."""

    def _end_coalescing(self, device: torch.device) -> Work:
        """Work that is done when everything started before it is."""
        return self._progress.start("coalesced operations", self._ranks.check, [], asynchronous=True)


def create_process_group(options: _DistributedBackendOptions, _: object = None) -> EvenstepProcessGroup:
    """Make a process group: what torch calls for `init_process_group("evenstep")` and `new_group`.

    Blocks until all ranks of the group have come.

    Raises:
        SilenceError: A rank did not come within the timeout.
        ConfigError: The ranks do not agree on who shares memory.
    """
    rank, size, timeout_s = options.group_rank, options.group_size, options.timeout.total_seconds()
    names = options.global_ranks_in_group or range(size)
    _teach_torch()
    return EvenstepProcessGroup(meet(options.store, rank, names, timeout_s), rank, size, timeout_s)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """As `torch.distributed.monitored_barrier`, for our groups.

    Raises:
        SilenceError: A rank did not come within the timeout.
        PeerError: A rank ended or left the group.
    """
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, EvenstepProcessGroup):
        raise ConfigError(f"monitored_barrier needs a process group of the evenstep backend, not {found!r}")
    found.monitored_barrier(timeout, wait_all_ranks)


@functools.cache
def _teach_torch() -> None:
    """Make torch's `monitored_barrier`, which accepts only gloo's groups, pass ours on to us.

    Done when the first of our groups is made, not on import: a process without one keeps torch unpatched.
    """
    theirs: Any = distributed.monitored_barrier

    @functools.wraps(theirs)
    def either(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        found = distributed.group.WORLD if group is None else group
        if isinstance(found, EvenstepProcessGroup):
            monitored_barrier(found, timeout, wait_all_ranks)
        else:
            theirs(group, timeout, wait_all_ranks)

    distributed.monitored_barrier = distributed.distributed_c10d.monitored_barrier = either
