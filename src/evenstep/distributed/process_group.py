"""The process group that torch sees: its collectives, in torch's names, on tensors.

Each operation becomes one call of the ranks, in the order in which it was started. Tensors that are not contiguous go
through a copy that is. What torch's own functions check (ranks, lists of equal length) is not checked again.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
    _DistributedBackendOptions,
)

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.distributed.progress import Progress
from evenstep.distributed.ranks import Ranks, meet
from evenstep.distributed.reductions import Reduction, reduction
from evenstep.distributed.team import ANY, Call
from evenstep.distributed.tensors import check_dense, check_same_size, contiguous, copy_back, num_bytes, parts, split
from evenstep.distributed.work import DONE
from evenstep.native import core

__all__ = ["EvenstepProcessGroup", "create_process_group", "monitored_barrier"]

_SUM: Any = ReduceOp.SUM
_UNSET = AllreduceOptions().timeout
_MOST_KNOWN = 4096
_Base: Any = ProcessGroup  # its methods have several signatures each; ours have the one that torch's functions call


class EvenstepProcessGroup(_Base):  # type: ignore[misc]  # see _Base
    """A process group over shared memory, for CPU tensors.

    Making one blocks until all its ranks have; see `create_process_group`.

    Args:
        ranks: The ranks of the group.
        rank: The number of this one.
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
        self._progress = Progress("evenstep-collectives", ranks.in_background)
        self._tags: dict[tuple[object, ...], bytes] = {}
        self._sums: dict[tuple[torch.dtype, torch.Size], Call] = {}
        self._end = weakref.finalize(self, _end, self._progress, ranks)
        self._end.atexit = False  # the end of the process ends it all, without waiting for what is still open

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
        """What the user says that the group is for."""
        return self._names[1]

    def setGroupDesc(self, desc: str) -> None:
        """Say what the group is for."""
        self._names = (self._names[0], desc)

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations from now on wait for a rank."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """End what was started for this group; whoever waits for this rank gets an error. torch calls this."""
        self._end()

    def abort(self) -> None:
        """As `shutdown`, but what is open fails, on all ranks, instead of being waited for."""
        self._ranks.abort()
        self._end()

    # ---- reductions ----

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions | None = None) -> Work:
        """Reduce a tensor over all ranks, in place."""
        opts = AllreduceOptions() if opts is None else opts
        # A small sum that is waited for takes a few microseconds, most of which are Python's: so it has a short way.
        if not opts.asyncOp and len(tensors) == 1 and opts.reduceOp == _SUM:
            tensor = tensors[0]
            known = self._sums.get((tensor.dtype, tensor.shape))
            if known is None:
                self._learn_sum(opts.reduceOp, tensor)
            elif tensor.is_cpu and tensor.is_contiguous() and opts.timeout == _UNSET and self._progress.enter():
                address = tensor.data_ptr()
                try:
                    self._ranks.call(known, address, address, self._timeout_s)
                finally:
                    self._progress.leave()
                return DONE
        return self._all_reduce("all_reduce", tensors, opts)

    def _learn_sum(self, op: Any, tensor: Tensor) -> None:
        how, tag = self._reduction("all_reduce", op, tensor)
        count = tensor.numel() * how.width
        self._sums[tensor.dtype, tensor.shape] = Call(core.ES_ALL_REDUCE, tag, how.dtype, how.op, num_items=count)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: AllreduceOptions | None = None) -> Work:
        """Reduce several tensors over all ranks, in place."""
        opts = opts or AllreduceOptions()
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> Work:
        op, timeout_s = opts.reduceOp, self._timeout(opts)
        calls = [(*self._reduction(name, op, tensor), tensor) for tensor in tensors]

        def job() -> None:
            for how, tag, tensor in calls:
                source, target = contiguous(_premultiplied(tensor, op, how)), contiguous(tensor)
                call = Call(core.ES_ALL_REDUCE, tag, how.dtype, how.op, num_items=target.numel() * how.width)
                self._ranks.call(call, source.data_ptr(), target.data_ptr(), timeout_s)
                self._finish(how, tensor, target)

        return self._progress.start(name, job, tensors, opts.asyncOp)

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions | None = None) -> Work:
        """Reduce a tensor over all ranks, to the root."""
        opts = opts or ReduceOptions()
        (tensor,) = tensors
        root, op, timeout_s = opts.rootRank, opts.reduceOp, self._timeout(opts)
        how, tag = self._reduction("reduce", op, tensor, root)

        def job() -> None:
            source, target = contiguous(_premultiplied(tensor, op, how)), contiguous(tensor)
            out = target.data_ptr() if root == self._rank else None
            call = Call(core.ES_REDUCE, tag, how.dtype, how.op, root, target.numel() * how.width)
            self._ranks.call(call, source.data_ptr(), out, timeout_s)
            if out is not None:
                self._finish(how, tensor, target)

        return self._progress.start("reduce", job, tensors, opts.asyncOp)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce a list of tensors, one for each rank, over all ranks; each rank gets its own."""
        opts = opts or ReduceScatterOptions()
        (output,), (pieces,) = outputs, inputs
        calls = [self._reduce_scatter("reduce_scatter", output, pieces, opts)]
        return self._progress.start("reduce_scatter", _all(calls), outputs, opts.asyncOp)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: ReduceScatterOptions | None = None) -> Work:
        """Reduce a tensor that has a part for each rank; each rank gets its own part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """As `reduce_scatter_single`, for several tensors."""
        opts = opts or ReduceScatterOptions()
        name = "reduce_scatter_tensor"
        calls = [
            self._reduce_scatter(name, output, parts(input, output, self._size), opts)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._progress.start(name, _all(calls), outputs, opts.asyncOp)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, name: str, output: Tensor, pieces: Sequence[Tensor], opts: ReduceScatterOptions
    ) -> Callable[[], None]:
        op, timeout_s = opts.reduceOp, self._timeout(opts)
        how, tag = self._reduction(name, op, output)
        check_same_size(name, output, pieces)

        def job() -> None:
            sources = [contiguous(_premultiplied(piece, op, how)) for piece in pieces]
            target = contiguous(output)
            ins = tuple(source.data_ptr() for source in sources)
            call = Call(core.ES_REDUCE_SCATTER, tag, how.dtype, how.op, num_items=target.numel() * how.width)
            self._ranks.call(call, ins, target.data_ptr(), timeout_s)
            self._finish(how, output, target)

        return job

    # ---- moving ----

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions | None = None) -> Work:
        """Give every rank the tensor of the root."""
        opts = opts or BroadcastOptions()
        (tensor,) = tensors
        root, timeout_s = opts.rootRank, self._timeout(opts)
        tag = self._tag("broadcast", "", tensor, root)

        def job() -> None:
            target = contiguous(tensor)
            address, is_root = target.data_ptr(), root == self._rank
            ins, outs = (address, None) if is_root else (None, address)
            call = Call(core.ES_BROADCAST, tag, root=root, num_items=num_bytes(target))
            self._ranks.call(call, ins, outs, timeout_s)
            if not is_root:
                copy_back(tensor, target)

        return self._progress.start("broadcast", job, tensors, opts.asyncOp)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """Give every rank the tensors of all, as a list."""
        return self.allgather_coalesced(outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """As `allgather`, for several tensors."""
        opts = opts or AllgatherOptions()
        calls = [
            self._gather("all_gather", core.ES_ALL_GATHER, input, pieces, None, self._timeout(opts))
            for pieces, input in zip(outputs, inputs, strict=True)
        ]
        return self._progress.start("all_gather", _all(calls), outputs, opts.asyncOp)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None) -> Work:
        """Give every rank the tensors of all, as one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """As `all_gather_single`, for several tensors."""
        opts = opts or AllgatherOptions()
        name = "all_gather_into_tensor"
        calls = [
            self._gather(name, core.ES_ALL_GATHER, input, parts(output, input, self._size), None, self._timeout(opts))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._progress.start(name, _all(calls), outputs, opts.asyncOp)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions | None = None) -> Work:
        """Give the root the tensors of all, as a list."""
        opts = opts or GatherOptions()
        pieces = outputs[0] if opts.rootRank == self._rank else None
        call = self._gather("gather", core.ES_GATHER, inputs[0], pieces, opts.rootRank, self._timeout(opts))
        return self._progress.start("gather", call, outputs, opts.asyncOp)

    def _gather(
        self, name: str, kind: int, input: Tensor, pieces: Sequence[Tensor] | None, root: int | None, timeout_s: float
    ) -> Callable[[], None]:
        tag = self._tag(name, "", input, root)
        check_same_size(name, input, pieces or ())

        def job() -> None:
            source = contiguous(input)
            targets = None if pieces is None else [contiguous(piece) for piece in pieces]
            outs = None if targets is None else tuple(target.data_ptr() for target in targets)
            call = Call(kind, tag, root=root or 0, num_items=num_bytes(source))
            self._ranks.call(call, source.data_ptr(), outs, timeout_s)
            for piece, target in zip(pieces or (), targets or (), strict=True):
                copy_back(piece, target)

        return job

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ScatterOptions | None = None) -> Work:
        """Give every rank its tensor from the list of the root."""
        opts = opts or ScatterOptions()
        (output,), root, timeout_s = outputs, opts.rootRank, self._timeout(opts)
        pieces = inputs[0] if root == self._rank else None
        tag = self._tag("scatter", "", output, root)
        check_same_size("scatter", output, pieces or ())

        def job() -> None:
            sources = None if pieces is None else [contiguous(piece) for piece in pieces]
            ins = None if sources is None else tuple(source.data_ptr() for source in sources)
            target = contiguous(output)
            call = Call(core.ES_SCATTER, tag, root=root, num_items=num_bytes(target))
            self._ranks.call(call, ins, target.data_ptr(), timeout_s)
            copy_back(output, target)

        return self._progress.start("scatter", job, outputs, opts.asyncOp)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: AllToAllOptions | None = None) -> Work:
        """Give each rank a tensor and get one from each."""
        return self._all_to_all("all_to_all", outputs, inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        """Give each rank a part of a tensor, along the first dimension, and get one from each."""
        outputs = split(output, output_split_sizes, self._size)
        inputs = split(input, input_split_sizes, self._size)
        return self._all_to_all("all_to_all_single", outputs, inputs, [output], opts)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        name: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        result: list[Tensor],
        opts: AllToAllOptions | None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        timeout_s = self._timeout(opts)
        dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
        if len(dtypes) > 1:
            raise UnsupportedError(f"{name} got tensors of {dtypes}, expected one dtype")
        tag = f"{name}({', '.join(map(str, dtypes))})".encode()

        def job() -> None:
            sources = [contiguous(input) for input in inputs]
            targets = [contiguous(output) for output in outputs]
            self._ranks.all_to_all(
                tag,
                tuple(source.data_ptr() for source in sources),
                tuple(map(num_bytes, sources)),
                tuple(target.data_ptr() for target in targets),
                tuple(map(num_bytes, targets)),
                timeout_s,
            )
            for output, target in zip(outputs, targets, strict=True):
                copy_back(output, target)

        return self._progress.start(name, job, result, opts.asyncOp)

    # ---- meeting, and messages ----

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        """Wait until all ranks have come here."""
        opts = opts or BarrierOptions()
        timeout_s = self._timeout(opts)
        return self._progress.start("barrier", partial(self._meet, b"barrier", timeout_s), [], opts.asyncOp)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come here; the error names all who did not, with or without `wait_all_ranks`."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        job = partial(self._meet, b"monitored_barrier", timeout_s)
        self._progress.start("monitored_barrier", job, [], asynchronous=False).wait()

    def _meet(self, tag: bytes, timeout_s: float) -> None:
        self._ranks.call(Call(core.ES_BARRIER, tag), None, None, timeout_s)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        """Send a tensor to a rank."""
        (tensor,) = tensors
        check_dense(tensor)
        self._progress.check_process()
        return self._ranks.send(tensor, target, tag, self._timeout_s)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """Receive a tensor from a rank."""
        (tensor,) = tensors
        check_dense(tensor)
        self._progress.check_process()
        return self._ranks.receive(tensor, source, tag, self._timeout_s)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self.recv(tensors, ANY, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: operations run in their order, and their calls are short."""

    def _end_coalescing(self, device: torch.device) -> Work:
        """What is over when all that was started before is over."""
        return self._progress.start("coalesced operations", self._ranks.check, [], asynchronous=True)

    # ---- what they share ----

    def _timeout(self, opts: Any) -> float:
        seconds: float = opts.timeout.total_seconds()
        return seconds if seconds > 0 else self._timeout_s

    def _reduction(self, name: str, op: Any, tensor: Tensor, root: int | None = None) -> tuple[Reduction, bytes]:
        how = reduction(op.op, tensor.dtype)
        return how, self._tag(name, how.name, tensor, root)

    def _tag(self, name: str, op: str, tensor: Tensor, root: int | None) -> bytes:
        """What an operation is, in words: equal on all ranks, or they do not fit together."""
        check_dense(tensor)
        key = (name, op, tensor.dtype, tensor.shape, root)
        tag = self._tags.get(key)
        if tag is None:
            if len(self._tags) >= _MOST_KNOWN:  # sizes that are never the same twice
                self._tags.clear()
                self._sums.clear()
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


def _end(progress: Progress, ranks: Ranks) -> None:
    progress.close()
    ranks.close()


def _all(jobs: Sequence[Callable[[], None]]) -> Callable[[], None]:
    if len(jobs) == 1:
        return jobs[0]

    def job() -> None:
        for each in jobs:
            each()

    return job


def _premultiplied(tensor: Tensor, op: Any, how: Reduction) -> Tensor:
    return (tensor.detach() * op.factor).to(tensor.dtype) if how.name == "PREMUL_SUM" else tensor


def create_process_group(options: _DistributedBackendOptions, _: object = None) -> EvenstepProcessGroup:
    """Make a process group: what torch calls for `init_process_group("evenstep")` and `new_group`.

    Blocks until all ranks of the group have come.

    Raises:
        SilenceError: A rank did not come within the timeout.
        ConfigError: The ranks do not agree on who shares memory.
    """
    rank, size, timeout_s = options.group_rank, options.group_size, options.timeout.total_seconds()
    names = options.global_ranks_in_group or range(size)
    return EvenstepProcessGroup(meet(options.store, rank, names, timeout_s), rank, size, timeout_s)


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks have come here; the error on all of them names those who did not.

    `torch.distributed.monitored_barrier` takes gloo's groups only, by their name; this one is for ours.

    Raises:
        SilenceError: A rank did not come within the timeout.
        PeerError: A rank ended or left the group.
    """
    found = distributed.group.WORLD if group is None else group
    if not isinstance(found, EvenstepProcessGroup):
        raise ConfigError(f"monitored_barrier wants a process group of the evenstep backend, not {found!r}")
    found.monitored_barrier(timeout, wait_all_ranks)
