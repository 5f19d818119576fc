"""One contract for every way in which nodes reach who adds them up."""

import pytest
import torch
from memories import FakeMemory

from evenstep.engine.delivery import Local, SharedAreas
from evenstep.plan.summing import Leaves, plan_summing

LIKE = [torch.zeros(3), torch.zeros(2, 2), torch.zeros(5)]


def shared_areas(spans):
    first = FakeMemory()
    made = []
    for rank in range(len(spans)):
        memory = first if rank == 0 else first.another()
        plan = plan_summing([t.nbytes for t in LIKE], spans, rank)
        words = memory.words(len(spans) * len(LIKE)).view(len(spans), len(LIKE))
        made.append((plan, SharedAreas(plan, memory, LIKE, words, [Leaves.of(span, spans[-1][1]) for span in spans])))
    return made


def local(spans):
    plan = plan_summing([t.nbytes for t in LIKE], spans, 0)
    return [(plan, Local(plan))]


CASES = [(local, [(0, 4)]), (shared_areas, [(0, 2), (2, 4)]), (shared_areas, [(0, 1), (1, 4), (4, 6)])]


def nodes_of(plan, delivery, bucket, *, absent=()):
    """What a worker would have, in the places that the delivery wants."""
    found = []
    for i in plan.buckets[bucket]:
        row = []
        for node, span in enumerate(plan.leaves.nodes):
            place = delivery.place(i, node)
            value = torch.full_like(LIKE[i], 100.0 * i + span[0])
            row.append(None if (i, span[0]) in absent else value if place is None else place.copy_(value))
        found.append(row)
    return found


@pytest.mark.parametrize(("make", "spans"), CASES)
def test_every_owner_gets_the_nodes_of_all_from_left_to_right(make, spans):
    workers = make(spans)
    for token in (1, 2):
        for _, delivery in workers:
            delivery.begin(token, range(len(workers)))
        for bucket in range(len(workers[0][0].buckets)):
            for number, (plan, delivery) in enumerate(workers):
                assert not any(d.ready(bucket) for _, d in workers[:1]) or number == len(workers)
                delivery.give(bucket, nodes_of(plan, delivery, bucket, absent={(1, 0)}))
        for plan, delivery in workers:
            for bucket in plan.owned_buckets:
                assert delivery.ready(bucket)
                for i in plan.buckets[bucket]:
                    starts = [start for p, _ in workers for start, _ in p.leaves.nodes]
                    found = [None if node is None else node.unique().tolist() for node in delivery.nodes(i)]
                    assert found == [None if (i, s) == (1, 0) else [100.0 * i + s] for s in starts]
        for _, delivery in workers:
            delivery.end()


def test_a_bucket_is_not_ready_before_everyone_who_is_active_has_given():
    (first, one), (second, other) = shared_areas([(0, 2), (2, 4)])
    bucket = first.owned_buckets[0]
    one.begin(5, [0, 1])
    other.begin(5, [0, 1])
    one.give(bucket, nodes_of(first, one, bucket))
    assert not one.ready(bucket)
    other.give(bucket, nodes_of(second, other, bucket))
    assert one.ready(bucket)


def test_what_an_earlier_attempt_has_left_does_not_count():
    (first, one), (second, other) = shared_areas([(0, 2), (2, 4)])
    bucket = first.owned_buckets[0]
    other.begin(5, [0, 1])
    other.give(bucket, nodes_of(second, other, bucket))
    one.begin(6, [0, 1])
    one.give(bucket, nodes_of(first, one, bucket))
    assert not one.ready(bucket)


def test_nobody_waits_for_a_worker_without_samples_nor_reads_what_it_left():
    (first, one), (second, other) = shared_areas([(0, 2), (2, 4)])
    bucket = first.owned_buckets[0]
    other.begin(5, [0, 1])
    other.give(bucket, nodes_of(second, other, bucket))
    one.begin(6, [0])
    one.give(bucket, nodes_of(first, one, bucket))
    assert one.ready(bucket)
    assert one.nodes(first.buckets[bucket][0])[-1] is None
