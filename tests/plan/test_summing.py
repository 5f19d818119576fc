"""The plan of sums is complete: every parameter and every shard once, and its programs are the tree."""

import pytest

from evenstep.plan import tree
from evenstep.plan.summing import BUCKET_BYTES, Leaves, plan_nodes, plan_summing

SPANS = [[(0, 8)], [(0, 4), (4, 8)], [(0, 3), (3, 6), (6, 8)], [(0, 1), (1, 7), (7, 8)]]


def evaluate(program, items):
    stack = []
    for item, merges in zip(items, program, strict=True):
        stack.append(item)
        for _ in range(merges):
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
    return stack


@pytest.mark.parametrize("spans", SPANS)
def test_leaves_then_nodes_make_the_whole_tree(spans):
    nodes = []
    for rank, span in enumerate(spans):
        leaves = Leaves.of(span, 8)
        mine = evaluate(leaves.merges, [str(k) for k in leaves.shards])
        assert len(mine) == len(leaves.nodes)
        assert sorted(leaves.completes.values()) == list(range(len(leaves.nodes)))
        nodes += mine
        plan = plan_summing([4] * 5, spans, rank)
        assert plan.leaves == leaves
    assert evaluate(plan.program, nodes) == [tree.reduce([str(k) for k in range(8)], lambda a, b: f"({a}+{b})")]


@pytest.mark.parametrize("spans", SPANS)
def test_every_parameter_has_one_owner_and_one_bucket_of_that_owner(spans):
    sizes = [10, BUCKET_BYTES, 7, BUCKET_BYTES // 2, BUCKET_BYTES // 2, 1]
    plans = [plan_summing(sizes, spans, rank) for rank in range(len(spans))]
    assert sorted(i for plan in plans for i in plan.owned) == list(range(len(sizes)))
    for plan in plans:
        assert plan.owners == plans[0].owners
        assert plan.buckets == plans[0].buckets
        for b, bucket in enumerate(plan.buckets):
            assert {plan.owners[i] for i in bucket} == {plan.owners[bucket[0]]}
            assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= BUCKET_BYTES
            assert all(plan.bucket_of[i] == b for i in bucket)


def test_backward_reaches_the_last_parameters_first():
    assert plan_summing([4, 4, 4], [(0, 1)], 0).buckets == ((2, 1, 0),)


def test_parts_that_are_given_are_the_buckets():
    plan = plan_summing([4] * 4, [(0, 1), (1, 2)], 0, [[3, 2], [], [1, 0]])
    assert plan.buckets == ((3, 2), (1, 0))
    assert plan.owners == (1, 1, 0, 0)


def test_a_worker_that_is_alone_with_some_shards_adds_its_nodes_from_left_to_right():
    plan = plan_nodes([4, 4], (1, 7), 8, add=True)
    assert plan.leaves.nodes == ((1, 2), (2, 4), (4, 6), (6, 7))
    assert evaluate(plan.program, "abcd") == ["(((a+b)+c)+d)"]
    assert plan.owned == [0, 1]
    assert plan_nodes([4, 4], (1, 7), 8, add=False).owned_buckets == []
