"""The collectives of a process group that only move data, in torch's names, on tensors."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
    Work,
)

from evenstep.core.errors import UnsupportedError
from evenstep.distributed.operations import Operations, one_after_the_other
from evenstep.distributed.team import Call
from evenstep.distributed.tensors import check_same_size, contiguous, copy_back, num_bytes, parts, split
from evenstep.native import core

__all__ = ["Moving"]


class Moving(Operations):
    """A process group that moves data."""

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

        return self._start("broadcast", job, tensors, tensors, opts.asyncOp)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """Give every rank the tensors of all: for each input, a list with one for each rank."""
        opts = opts or AllgatherOptions()
        jobs = [
            self._gather("all_gather", core.ES_ALL_GATHER, input, pieces, None, self._timeout(opts))
            for pieces, input in zip(outputs, inputs, strict=True)
        ]
        return self._start("all_gather", one_after_the_other(jobs), inputs, outputs, opts.asyncOp)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        """Give every rank the tensors of all, of any sizes: for each rank, a list with one for each input."""
        if any(len(pieces) != len(inputs) for pieces in outputs):
            found = [len(pieces) for pieces in outputs]
            raise UnsupportedError(f"all_gather_coalesced got lists of {found} for {len(inputs)} tensors of each rank")
        return self.allgather([list(pieces) for pieces in zip(*outputs, strict=True)], inputs, opts)

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
        jobs = [
            self._gather(name, core.ES_ALL_GATHER, input, parts(output, input, self._size), None, self._timeout(opts))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._start(name, one_after_the_other(jobs), inputs, outputs, opts.asyncOp)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions | None = None) -> Work:
        """Give the root the tensors of all, as a list."""
        opts = opts or GatherOptions()
        pieces = outputs[0] if opts.rootRank == self._rank else None
        job = self._gather("gather", core.ES_GATHER, inputs[0], pieces, opts.rootRank, self._timeout(opts))
        return self._start("gather", job, inputs, outputs, opts.asyncOp)

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

        return self._start("scatter", job, pieces or [], outputs, opts.asyncOp)

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

        return self._start("all_to_all", job, inputs, result, opts.asyncOp)
