"""Every collective against an oracle in one process, on bytes: on one machine and on what looks like several."""

from collections.abc import Callable

import pytest
import torch
from ranks import reduced, run_ranks, same, values
from torch import distributed as dist

pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning")  # the names before torch 2.13

PLACES = {
    "1 rank": (1, None),
    "2 ranks": (2, None),
    "3 ranks": (3, None),
    "1 + 1 ranks": (2, lambda rank: rank),
    "3 + 2 ranks": (5, lambda rank: rank // 3),
    "2 + 2 ranks in turns": (4, lambda rank: rank % 2),
}
SHAPES = [(), (0,), (1,), (3, 5), (20_000,), (300_001,)]
"""Nothing, something, more than goes in one step, more than a slot."""


@pytest.fixture(params=PLACES.values(), ids=PLACES.keys())
def ranks(request) -> Callable[[Callable[[int], None]], None]:
    num_ranks, machine_of = request.param
    return lambda body: run_ranks(num_ranks, lambda rank: body(rank, num_ranks), machine_of=machine_of)


def parts_of(num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [values(shape, dtype, seed) for seed in range(num_ranks)]


def test_all_reduce_and_reduce_of_every_shape(ranks):
    def body(rank, num_ranks):
        for shape in SHAPES:
            parts = parts_of(num_ranks, shape)
            mine = parts[rank].clone()
            dist.all_reduce(mine)
            assert same(mine, reduced("SUM", parts)), shape
            mine, root = parts[rank].clone(), num_ranks - 1
            dist.reduce(mine, root)
            assert same(mine, reduced("SUM", parts) if rank == root else parts[rank]), shape

    ranks(body)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_second_of_two_like_operations_is_written_another_way_and_arrives_too(num_ranks):
    def body(rank):
        for time in range(4):
            parts = [values((70_001,), torch.float32, 10 * time + other) for other in range(num_ranks)]
            mine, found = parts[rank].clone(), [torch.empty(70_001) for _ in parts]
            dist.all_reduce(mine)
            assert same(mine, reduced("SUM", parts)), time
            dist.all_gather(found, parts[rank])
            assert all(same(a, b) for a, b in zip(found, parts, strict=True)), time
            dist.reduce_scatter(mine, [part.roll(rank) for part in parts])
            assert same(mine, reduced("SUM", [parts[rank].roll(other) for other in range(num_ranks)])), time
            dist.broadcast(mine := parts[rank].clone(), 0)
            assert same(mine, parts[0]), time

    run_ranks(num_ranks, body)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.bool, torch.complex64, torch.complex128], ids=str)
def test_all_reduce_of_every_dtype_with_every_operation(dtype):
    ops = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]
    if dtype.is_complex:
        ops = ["SUM", "AVG"]
    elif dtype.is_floating_point:
        ops = ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]
    elif dtype == torch.bool:
        ops.remove("AVG")

    def body(rank):
        for op in ops:
            for shape in [(7,), (40_000,)]:
                parts = parts_of(3, shape, dtype)
                mine = parts[rank].clone()
                dist.all_reduce(mine, getattr(dist.ReduceOp, op))
                assert same(mine, reduced(op, parts)), (op, shape)

    run_ranks(3, body)


def test_sparse_tensors_are_added_wherever_their_values_are(ranks):
    def body(rank, num_ranks):
        for seed, shape, dense in [(0, (6, 7), 0), (10, (5, 4, 3), 1), (20, (9,), 0)]:
            parts = [torch.relu(values(shape, torch.float32, seed + other) - 0.5) for other in range(num_ranks)]
            parts[-1].zero_()  # it has none
            mine = parts[rank].to_sparse(len(shape) - dense)
            dist.all_reduce(mine)
            assert mine.is_coalesced()
            assert torch.equal(mine.to_dense(), reduced("SUM", parts)), (shape, dense)
            work = dist.all_reduce(mine, async_op=True)
            work.wait()
            assert torch.equal(mine.to_dense(), reduced("SUM", [reduced("SUM", parts)] * num_ranks))

    ranks(body)


@pytest.mark.filterwarnings("ignore:.torch.distributed.all_gather_coalesced:FutureWarning")
def test_tensors_of_different_sizes_are_gathered_together(ranks):
    def body(rank, num_ranks):
        shapes = [(3,), (0,), (2, 5), (70_000,)]
        parts = [
            [values(shape, torch.float32, 10 * other + n) for n, shape in enumerate(shapes)]
            for other in range(num_ranks)
        ]
        found = [[torch.empty(shape) for shape in shapes] for _ in range(num_ranks)]
        dist.all_gather_coalesced(found, parts[rank])
        assert all(
            same(a, b) for mine, theirs in zip(found, parts, strict=True) for a, b in zip(mine, theirs, strict=True)
        )

    ranks(body)


def test_premul_sum_multiplies_what_each_rank_gives():
    def body(rank):
        parts = parts_of(2, (1000,))
        mine = parts[rank].clone()
        dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5 + rank))
        assert same(mine, parts[0] * 0.5 + parts[1] * 1.5)

    run_ranks(2, body)


def test_a_nan_reaches_everyone_through_min_and_max():
    def body(rank):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            for culprit in (0, 1):
                mine = torch.tensor([1.0, float("nan") if rank == culprit else 2.0])
                dist.all_reduce(mine, op)
                assert mine[0] == 1
                assert mine[1].isnan()

    run_ranks(2, body)


def test_broadcast_gather_scatter_and_all_gather_of_every_shape(ranks):
    def body(rank, num_ranks):
        for shape in SHAPES:
            parts, root = parts_of(num_ranks, shape, torch.int64), num_ranks // 2
            mine = parts[rank].clone()
            dist.broadcast(mine, root)
            assert same(mine, parts[root]), shape
            found = [torch.empty_like(mine) for _ in parts]
            dist.all_gather(found, parts[rank])
            assert all(map(same, found, parts)), shape
            found = [torch.empty_like(mine) for _ in parts] if rank == root else None
            dist.gather(parts[rank], found, root)
            assert rank != root or all(map(same, found, parts)), shape
            mine = torch.empty_like(mine)
            dist.scatter(mine, parts if rank == root else None, root)
            assert same(mine, parts[rank]), shape

    ranks(body)


def test_all_gather_into_tensor_and_reduce_scatter_of_every_shape(ranks):
    def body(rank, num_ranks):
        for shape in SHAPES[1:]:
            parts = parts_of(num_ranks, shape)
            stacked = torch.empty(num_ranks, *shape)
            dist.all_gather_into_tensor(stacked, parts[rank])
            assert same(stacked, torch.stack(parts)), shape
            # rank r gives part p + r to rank p
            given = [part + rank for part in parts]
            expected = reduced("SUM", [parts[rank] + other for other in range(num_ranks)])
            mine = torch.empty(shape)
            dist.reduce_scatter(mine, given)
            assert same(mine, expected), shape
            mine = torch.empty(shape)
            dist.reduce_scatter_tensor(mine, torch.cat(given))
            assert same(mine, expected), shape

    ranks(body)


def test_all_to_all_in_lists_in_parts_and_uneven(ranks):
    def body(rank, num_ranks):
        for shape in SHAPES[1:]:
            parts = parts_of(num_ranks, shape)
            found = [torch.empty(shape) for _ in parts]
            dist.all_to_all(found, [parts[rank] + to for to in range(num_ranks)])
            assert all(same(found[source], parts[source] + rank) for source in range(num_ranks)), shape
        # rank r gives (r + p) % 3 * 5000 rows to rank p
        sizes = [[(source + to) % 3 * 5000 for to in range(num_ranks)] for source in range(num_ranks)]
        given = [values((sum(sizes[source]), 3), torch.int32, source) for source in range(num_ranks)]
        expected = torch.cat([given[source].split(sizes[source])[rank] for source in range(num_ranks)])
        found = torch.empty_like(expected)
        dist.all_to_all_single(found, given[rank], [sizes[source][rank] for source in range(num_ranks)], sizes[rank])
        assert same(found, expected)
        even = values((2 * num_ranks, 2), torch.float32, rank)
        found = torch.empty_like(even)
        dist.all_to_all_single(found, even)
        everyone = [values((2 * num_ranks, 2), torch.float32, source) for source in range(num_ranks)]
        assert same(found, torch.cat([each[2 * rank : 2 * rank + 2] for each in everyone]))

    ranks(body)


def test_objects_and_barriers(ranks):
    def body(rank, num_ranks):
        found = [None] * num_ranks
        dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
        assert found == [{"rank": other, "text": "x" * 1000 * other} for other in range(num_ranks)]
        objects = [rank, "of rank", rank]
        dist.broadcast_object_list(objects, num_ranks - 1)
        assert objects == [num_ranks - 1, "of rank", num_ranks - 1]
        mine = [None]
        dist.scatter_object_list(mine, [f"for {other}" for other in range(num_ranks)] if rank == 0 else None, 0)
        assert mine == [f"for {rank}"]
        dist.barrier()
        dist.group.WORLD.monitored_barrier()

    ranks(body)


def test_tensors_that_are_not_contiguous_are_read_and_written_where_they_are():
    def body(rank):
        parts = parts_of(2, (40, 30))
        mine = parts[rank].clone().t()
        dist.all_reduce(mine)
        assert same(mine, reduced("SUM", parts).t())
        frame = torch.zeros(40, 60)
        frame[:, ::2] = parts[rank]
        dist.broadcast(frame[:, ::2], 1)
        assert same(frame[:, ::2], parts[1])
        assert not frame[:, 1::2].any()
        found = [torch.empty(30, 40).t() for _ in range(2)]
        dist.all_gather(found, parts[rank])
        assert all(map(same, found, parts))
        received = torch.zeros(80, 30)[::2]
        if rank == 0:
            dist.send(parts[0].t().contiguous().t(), 1)
        else:
            dist.recv(received, 0)
            assert same(received, parts[0])

    run_ranks(2, body)


def test_parameters_that_require_a_gradient_are_taken_as_they_are():
    def body(rank):
        weight = torch.nn.Parameter(torch.full((3, 4), float(rank)))
        with torch.no_grad():
            dist.all_reduce(weight)
            dist.broadcast(weight.t(), 0)
        assert weight.requires_grad
        assert same(weight, torch.ones(3, 4))

    run_ranks(2, body)


def test_coalesced_operations():
    def body(rank):
        parts = [parts_of(2, shape) for shape in [(3,), (20_000,)]]
        mine = [both[rank].clone() for both in parts]
        with dist._coalescing_manager(device=torch.device("cpu")):
            for tensor in mine:
                dist.all_reduce(tensor)
        assert all(same(tensor, reduced("SUM", both)) for tensor, both in zip(mine, parts, strict=True))
        found = [torch.empty(2, *both[0].shape) for both in parts]
        with dist._coalescing_manager(device=torch.device("cpu")):
            for whole, both in zip(found, parts, strict=True):
                dist.all_gather_into_tensor(whole, both[rank])
        assert all(same(whole, torch.stack(both)) for whole, both in zip(found, parts, strict=True))

    run_ranks(2, body)


def test_functional_collectives():
    def body(rank):
        from torch.distributed import _functional_collectives as functional

        parts = parts_of(2, (6, 2))
        group = dist.group.WORLD
        assert same(functional.all_reduce(parts[rank], "sum", group) + 0, reduced("SUM", parts))
        assert same(functional.all_gather_tensor(parts[rank], 0, group) + 0, torch.cat(parts))
        half = functional.reduce_scatter_tensor(parts[rank], "sum", 0, group) + 0
        assert same(half, reduced("SUM", parts).chunk(2)[rank])

    run_ranks(2, body)


def test_sums_have_the_same_bits_on_all_ranks_and_in_every_repetition():
    def body(rank):
        found = []
        for _ in range(3):
            mine = values((100_003,), torch.float32, rank)
            dist.all_reduce(mine)
            found.append(mine.numpy().tobytes())
        return found

    (first, *_), *others = found = run_ranks(3, body)
    assert all(each == first for everyone in found for each in everyone)
    assert others
