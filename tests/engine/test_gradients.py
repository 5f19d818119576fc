"""Gradients of shards become tree sums at their owners, to the bit, whoever computes which shard."""

import pytest
import torch
from memories import FakeMemory

from evenstep.core.errors import UnsupportedError
from evenstep.engine.delivery import Local, SharedAreas
from evenstep.engine.gradients import Gradients
from evenstep.plan import tree
from evenstep.plan.summing import Leaves, plan_summing

LIKE = [torch.zeros(7), torch.zeros(3, 2), torch.zeros(400_000), torch.zeros(1)]
NAMES = ["a", "b", "c", "d"]
K = 6


def workers_of(spans):
    memory, made = FakeMemory(), []
    for rank in range(len(spans)):
        mine = memory if rank == 0 else memory.another()
        gradients = Gradients(NAMES)
        plan = gradients.plan = plan_summing([t.nbytes for t in LIKE], spans, rank)
        words = mine.words(len(spans) * len(LIKE)).view(len(spans), len(LIKE))
        leaves = [Leaves.of(span, K) for span in spans]
        gradients.delivery = Local(plan) if len(spans) == 1 else SharedAreas(plan, mine, LIKE, words, leaves)
        made.append(gradients)
    return made


def leaf(i, shard):
    return torch.randn(LIKE[i].shape, generator=torch.Generator().manual_seed(100 * i + shard))


def gives(i, shard):
    return i != 3 and (i, shard) not in ((0, 2), (1, 5))  # d has no gradient at all


def expected(i):
    present = [leaf(i, k) if gives(i, k) else None for k in range(K)]

    def add(a, b):
        return a + b if a is not None and b is not None else a if b is None else b

    return tree.reduce(present, add)


def step(workers, spans, token):
    for gradients, span in zip(workers, spans, strict=True):
        gradients.begin(token, range(len(workers)), range(*span))
    for gradients, span in zip(workers, spans, strict=True):
        for i in reversed(range(len(LIKE))):
            for k in reversed(range(*span)):
                if gives(i, k):
                    gradients.arrive(i, k, leaf(i, k))
    for gradients in workers:
        gradients.end_backward()
    sums = {}
    for gradients in workers:
        found = gradients.finish()
        assert found.keys() == set(gradients.plan.owned)
        sums |= found
    return sums


@pytest.mark.parametrize(
    "spans", [[(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 5), (5, 6)], [(k, k + 1) for k in range(6)]]
)
def test_the_sums_are_those_of_the_tree(spans):
    workers = workers_of(spans)
    for token in (1, 2):
        sums = step(workers, spans, token)
        assert sorted(sums) == list(range(len(LIKE)))
        for i, total in sums.items():
            wanted = expected(i)
            assert (total is None) == (wanted is None)
            assert total is None or torch.equal(total, wanted)
        for gradients in workers:
            gradients.clear()


def test_who_wants_to_know_hears_of_every_bucket_once_while_gradients_still_come():
    (gradients,) = workers_of([(0, 6)])
    heard = []
    gradients.reduced = lambda bucket, _: heard.append(bucket)
    gradients.begin(1, [0], range(6))
    first = gradients.plan.buckets[0]
    for i in first:
        for k in range(6):
            gradients.arrive(i, k, leaf(i, k))
    assert heard == [0]
    gradients.end_backward()
    assert heard == list(range(len(gradients.plan.buckets)))


def test_nodes_can_be_had_instead_of_sums():
    workers = workers_of([(0, 3), (3, 6)])
    step(workers, [(0, 3), (3, 6)], 1)
    nodes = dict(workers[0].nodes())
    assert list(nodes) == [(0, 2), (2, 3)]
    assert torch.equal(nodes[0, 2][1], leaf(1, 0) + leaf(1, 1))
    assert sorted(nodes[2, 3]) == [1, 2]


def test_a_sparse_gradient_is_refused_by_name():
    (gradients,) = workers_of([(0, 6)])
    gradients.begin(1, [0], range(6))
    with pytest.raises(UnsupportedError, match="parameter 'a' got a sparse gradient"):
        gradients.arrive(0, 0, torch.zeros(7).to_sparse())


def test_a_gradient_that_nobody_expects_can_be_refused():
    (gradients,) = workers_of([(0, 6)])

    def refuse(i):
        raise LookupError(NAMES[i])

    gradients.expects = refuse
    gradients.begin(1, [0], range(6))
    with pytest.raises(LookupError, match="b"):
        gradients.arrive(1, 0, leaf(1, 0))
