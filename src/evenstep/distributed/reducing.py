"""The reductions of a process group, in torch's names, on tensors."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp, ReduceOptions, ReduceScatterOptions, Work
from torch.nn import Parameter

from evenstep.core.errors import UnsupportedError
from evenstep.distributed.operations import Operations, one_after_the_other
from evenstep.distributed.reductions import Reduction
from evenstep.distributed.team import Call, Team
from evenstep.distributed.tensors import check_same_size, contiguous, num_bytes, parts
from evenstep.distributed.work import DONE, is_recording
from evenstep.native import core
from evenstep.plan import tree

__all__ = ["Reducing"]

_SUM: Any = ReduceOp.SUM


class Reducing(Operations):
    """A process group that reduces."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = _sums(self._ranks.team, self._progress.turn)
        self._sum_at_once: Callable[[list[Tensor], Any], Work | None] = self._sums.all_reduce if self._sums else _never
        self.set_timeout(timedelta(seconds=self._timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations from now on wait for a rank."""
        super().set_timeout(timeout)
        if self._sums:
            self._sums.timeout_s = self._timeout_s

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions | None = None) -> Work:
        """Reduce a tensor over all ranks, in place."""
        return self._sum_at_once(tensors, opts) or self._reduce_for_all(tensors, opts or AllreduceOptions())

    def _reduce_for_all(self, tensors: list[Tensor], opts: AllreduceOptions) -> Work:
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._all_reduce_sparse(tensors[0], opts)
        if self._sums and len(tensors) == 1 and opts.reduceOp == _SUM and not opts.asyncOp:
            (tensor,) = tensors
            how, tag = self._reduction("all_reduce", opts.reduceOp, tensor)
            self._sums.learn(tensor, tag, how.dtype, how.op, tensor.numel() * how.width)
        return self._all_reduce("all_reduce", tensors, opts)

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

        return self._start(name, job, tensors, tensors, opts.asyncOp)

    def _all_reduce_sparse(self, tensor: Tensor, opts: AllreduceOptions) -> Work:
        """Sum a sparse tensor over all ranks, in place. The ranks may have values at different places."""
        if opts.reduceOp != _SUM or not tensor.is_cpu:
            raise UnsupportedError("of sparse tensors, only those on the CPU are reduced, and only by SUM")
        timeout_s = self._timeout(opts)
        shape, kinds = list(tensor.shape), (tensor.sparse_dim(), tensor.dense_dim())
        tag = f"all_reduce(SUM, sparse {tensor.dtype}, {shape}, dimensions {kinds})".encode()

        def job() -> None:
            mine = tensor.detach().coalesce()
            counts = self._gather_all(tag, torch.tensor([mine._nnz()]), timeout_s)
            most = int(torch.stack(counts).max())
            indices = _padded(mine.indices().t(), most)
            of_all = zip(
                counts,
                self._gather_all(tag, indices, timeout_s),
                self._gather_all(tag, _padded(mine.values(), most), timeout_s),
                strict=True,
            )
            terms = [
                torch.sparse_coo_tensor(
                    places[: int(count)].t(), values[: int(count)], tensor.shape, check_invariants=False
                )
                for count, places, values in of_all
            ]
            with torch.no_grad():  # detaching a sparse tensor would not share its memory
                tensor.copy_(tree.reduce(terms, torch.add).coalesce())

        return self._start("all_reduce", job, [tensor], [tensor], opts.asyncOp)

    def _gather_all(self, tag: bytes, mine: Tensor, timeout_s: float) -> list[Tensor]:
        """What all ranks give; all the same size."""
        mine, found = mine.contiguous(), [torch.empty_like(mine) for _ in range(self._size)]
        call = Call(core.ES_ALL_GATHER, tag, num_items=num_bytes(mine))
        self._ranks.call(call, mine.data_ptr(), tuple(each.data_ptr() for each in found), timeout_s)
        return found

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

        return self._start("reduce", job, tensors, tensors, opts.asyncOp)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce a list of tensors, one for each rank, over all ranks; each rank gets its own."""
        opts = opts or ReduceScatterOptions()
        (output,), (pieces,) = outputs, inputs
        job = self._reduce_scatter("reduce_scatter", output, pieces, opts)
        return self._start("reduce_scatter", job, pieces, outputs, opts.asyncOp)

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
        jobs = [
            self._reduce_scatter(name, output, parts(input, output, self._size), opts)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._start(name, one_after_the_other(jobs), inputs, outputs, opts.asyncOp)

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


def _sums(team: Team | None, turn: core.Turn) -> core.Sums | None:
    """A shortcut in C for sums that the caller waits for: checking their arguments in Python would take longer."""
    if team is None:
        return None
    usual = (_SUM, AllreduceOptions().timeout)
    return core.Sums(team.core, turn, is_recording, usual, (Tensor, Parameter), DONE, team.sum_failed)


def _never(tensors: list[Tensor], opts: Any) -> None:
    """There is no shortcut where ranks share no memory."""


def _premultiplied(tensor: Tensor, op: Any, how: Reduction) -> Tensor:
    return (tensor.detach() * op.factor).to(tensor.dtype) if how.name == "PREMUL_SUM" else tensor


def _padded(rows: Tensor, count: int) -> Tensor:
    """These rows, padded to `count` of them."""
    whole = rows.new_zeros((count, *rows.shape[1:]))
    whole[: len(rows)] = rows
    return whole
