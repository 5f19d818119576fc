"""Random collectives of random sizes on random sub-groups, checked against one process that does them all."""

import random

import torch
from ranks import reduced, run_ranks, same, values
from torch import distributed as dist

OPERATIONS = 600
NUM_RANKS = 4
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8]
KINDS = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send"]


def one_operation(  # noqa: C901  # one branch for each collective
    draw: random.Random, rank: int, ranks: tuple[int, ...], group: dist.ProcessGroup | None
) -> list:
    """Start an operation; what it leaves is (a tensor, what it must be)."""
    kind, dtype, seed = draw.choice(KINDS), draw.choice(DTYPES), draw.randrange(1 << 30)
    count = draw.choice([0, 1, 7, 1000, 9000, draw.randrange(1, 200_000), draw.randrange(1, 600_000)])
    op, root, asynchronous = draw.choice(["SUM", "MAX", "MIN"]), draw.choice(ranks), draw.random() < 0.5
    if rank not in ranks:
        return []
    parts = {other: values((count,), dtype, seed + other) for other in ranks}
    mine, everyone, place = parts[rank].clone(), list(parts.values()), ranks.index(rank)
    how = {"group": group, "async_op": asynchronous}
    reduce_op = getattr(dist.ReduceOp, op)
    if kind == "all_reduce":
        return [dist.all_reduce(mine, reduce_op, **how), (mine, reduced(op, everyone))]
    if kind == "reduce":
        work = dist.reduce(mine, root, reduce_op, **how)
        return [work, (mine, reduced(op, everyone) if rank == root else parts[rank])]
    if kind == "broadcast":
        return [dist.broadcast(mine, root, **how), (mine, parts[root])]
    found = [torch.empty_like(mine) for _ in ranks]
    if kind == "all_gather":
        return [dist.all_gather(found, mine, **how), *zip(found, everyone, strict=True)]
    if kind == "gather":
        work = dist.gather(mine, found if rank == root else None, root, **how)
        return [work, *(zip(found, everyone, strict=True) if rank == root else ())]
    if kind == "scatter":
        return [dist.scatter(found[0], everyone if rank == root else None, root, **how), (found[0], parts[rank])]
    if kind == "reduce_scatter":
        work = dist.reduce_scatter(found[0], [part.roll(place) for part in everyone], reduce_op, **how)
        return [work, (found[0], reduced(op, [parts[rank].roll(other) for other in range(len(ranks))]))]
    if kind == "all_to_all":
        work = dist.all_to_all(found, [mine.roll(other) for other in range(len(ranks))], **how)
        return [work, *((found[other], everyone[other].roll(place)) for other in range(len(ranks)))]
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    if len(ranks) == 1:
        return []
    work = dist.isend(mine, after, group=group, tag=seed)
    dist.recv(found[0], before, group=group, tag=seed)
    return [work, (found[0], parts[before])]


def stress(rank: int, seed: int, operations: int, groups: dict) -> None:
    draw = random.Random(seed)
    for done in range(0, operations, 20):
        pending = []
        for _ in range(20):
            ranks = draw.choice(list(groups))
            work, *pairs = one_operation(draw, rank, ranks, groups[ranks]) or [None]
            pending.append((work, pairs))
        for work, pairs in pending:
            if work is not None:
                work.wait()
            assert all(same(found, expected) for found, expected in pairs), (seed, done)


def test_random_operations_on_random_groups():
    def body(rank):
        members = [(0, 1, 2, 3), (0, 1), (1, 3), (0, 2, 3), (2,), (1, 2, 3)]
        groups = {ranks: None if len(ranks) == NUM_RANKS else dist.new_group(ranks) for ranks in members}
        stress(rank, 20261, OPERATIONS, groups)

    run_ranks(NUM_RANKS, body)


def test_random_operations_on_two_machines():
    def body(rank):
        members = [(0, 1, 2, 3), (0, 1), (1, 3), (0, 2, 3)]
        groups = {ranks: None if len(ranks) == NUM_RANKS else dist.new_group(ranks) for ranks in members}
        stress(rank, 20262, OPERATIONS // 2, groups)

    run_ranks(NUM_RANKS, body, machine_of=lambda rank: rank % 2)
