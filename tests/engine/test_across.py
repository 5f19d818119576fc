"""Gradients over machines of one process: the sums are those of plain torch in tree order, whoever gives what when."""

import ctypes
import mmap

import pytest
import torch

from evenstep.core.config import MAX_SHARDS
from evenstep.engine.across import AcrossMachines
from evenstep.engine.delivery import Local, SharedAreas
from evenstep.exchange.bridged import EVERYONE
from evenstep.native import core
from evenstep.plan import tree
from evenstep.plan.across import most_pieces, plan_across
from evenstep.plan.machines import share_machines
from evenstep.plan.summing import Leaves
from evenstep.transport.segment import SEGMENT_BYTES, Segment

SHARDS = 8
LIKE = [torch.empty(300, 3), torch.empty(7, dtype=torch.float64), torch.empty(900_000), torch.empty(0), torch.empty(50)]


class FakePuts:
    """Copies from one machine's segment to another's, when it is told to."""

    def __init__(self, memory, whole, mine):
        self.memory, self.whole, self.mine = memory, whole, mine
        self.held = []

    def put(self, machine, data, word, value):
        for target in range(len(self.whole)) if machine == EVERYONE else [machine]:
            if target != self.mine:
                self.held.append((target, data, word, value))

    def flush(self):
        assert not self.held, "in these tests everything arrives before the next step"

    def release(self):
        held, self.held = self.held, []
        for target, data, word, value in held:
            if data is not None:
                size = data.numel() * data.element_size()
                ctypes.memmove(self.whole[target] + self.memory.locate(data), data.data_ptr(), size)
            core.store(self.whole[target] + self.memory.locate(word), value)


def sizes():
    return [t.numel() * t.element_size() for t in LIKE]


class Machines:
    """Machines with so many workers each, all in this process; a context manager that gives the workers' deliveries."""

    def __init__(self, counts):
        self.counts = counts
        self.segments = [Segment.create(4) for _ in counts]
        self.maps = [mmap.mmap(segment.fd, SEGMENT_BYTES) for segment in self.segments]

    def __enter__(self):
        whole = [torch.frombuffer(each, dtype=torch.uint8, count=1).data_ptr() for each in self.maps]
        of_rank = [machine for machine, count in enumerate(self.counts) for _ in range(count)]
        spans = share_machines(SHARDS, [1.0] * len(of_rank), of_rank)
        found = []
        for rank, m in enumerate(of_rank):
            memory = Segment(self.segments[m].fd).memory
            words = memory.words(most_pieces(sizes()) * (MAX_SHARDS + 1)).view(-1, MAX_SHARDS + 1)
            ready = memory.words(4 * len(LIKE)).view(4, -1)
            plan = plan_across(sizes(), spans, rank, of_rank)
            leaves = [Leaves.of(spans[other], SHARDS) for other in plan.workers]
            inside = Local(plan.local)
            if self.counts[m] > 1:
                inside = SharedAreas(plan.local, memory, LIKE, ready, leaves)
            puts = FakePuts(memory, whole, m)
            found.append((plan, AcrossMachines(plan, inside, memory, LIKE, words, puts), puts))
        return found, spans

    def __exit__(self, *_):
        for segment in self.segments:
            segment.close()


def gradients(present):
    """A gradient for each shard and parameter, or None."""
    generator = torch.Generator().manual_seed(3)
    every = [[torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in LIKE] for _ in range(SHARDS)]
    return [[g if present(k, i) else None for i, g in enumerate(of_shard)] for k, of_shard in enumerate(every)]


def expected(every, i):
    def add(a, b):
        return b if a is None else a if b is None else a + b

    return tree.reduce([of_shard[i] for of_shard in every], add)


def step(found, spans, every, token):
    """One step: everyone gives what it has, and then all that was put arrives, until nothing moves."""
    active = [
        rank
        for rank, (first, end) in enumerate(spans)
        if any(any(g is not None for g in every[k]) for k in range(first, end))
    ]
    for _, delivery, _ in found:
        delivery.begin(token, active)
    for (plan, delivery, _), (first, end) in zip(found, spans, strict=True):
        for bucket, parameters in enumerate(plan.local.buckets):
            nodes = []
            for i in parameters:
                stack = []
                for a, b in tree.cover((first, end), SHARDS):
                    part = [every[k][i] if a <= k < b else None for k in range(SHARDS)]
                    total = expected([[g] for g in part], 0)
                    place = delivery.place(i, len(stack))
                    if total is not None:
                        total = total.clone() if place is None else place.copy_(total)
                    stack.append(total)
                nodes.append(stack)
            delivery.give(bucket, nodes)
    for _ in range(4):
        for _, delivery, puts in found:
            for bucket in delivery._owned:
                delivery.ready(bucket)
            puts.release()


@pytest.mark.parametrize("counts", [[1, 1], [2, 1], [1, 3], [1, 1, 2]], ids=str)
def test_every_owner_on_every_machine_gets_the_tree_sum(counts):
    with Machines(counts) as (found, spans):
        check_all_kinds(found, spans)


def check_all_kinds(found, spans):
    kinds = [
        lambda k, i: True,
        lambda k, i: i != 1,  # nobody has it
        lambda k, i: (k + i) % 3 != 0,
        lambda k, i: k < 2,  # only the first machine, or a part of it, has samples
        lambda k, i: not (i == 2 and k >= 4),  # the large one is not everywhere
    ]
    for token, present in enumerate(kinds, start=1):
        every = gradients(present)
        step(found, spans, every, token)
        for plan, delivery, _ in found:
            for bucket in plan.local.owned_buckets:
                assert delivery.ready(bucket)
                for i in plan.local.buckets[bucket]:
                    (total,) = delivery.nodes(i)
                    want = expected(every, i)
                    assert (total is None) == (want is None)
                    if want is not None:
                        assert total.contiguous().numpy().tobytes() == want.numpy().tobytes(), (token, i)
            delivery.end()


def test_nothing_is_ready_before_what_others_put_has_arrived():
    with Machines([1, 1]) as (found, spans):
        for _, _, puts in found:
            puts.release = lambda: None
        step(found, spans, gradients(lambda k, i: True), 1)
        assert not any(delivery.ready(bucket) for plan, delivery, _ in found for bucket in plan.local.owned_buckets)


def test_what_moves_is_as_much_as_a_ring_would_move():
    with Machines([1, 1]) as (found, spans):
        moved = []
        for _, _, puts in found:
            real = puts.put

            def put(machine, data, word, value, real=real):
                moved.append(0 if data is None else data.numel() * data.element_size())
                real(machine, data, word, value)

            puts.put = put
        step(found, spans, gradients(lambda k, i: True), 1)
    assert sum(moved) <= 1.05 * 2 * sum(sizes()), "2 (M - 1) / M of the gradients for each of two machines"
