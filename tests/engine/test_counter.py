"""The binary counter gives the tree's own sums, in whatever order gradients come, and leaves out what is absent."""

import itertools
import random

import pytest
import torch

from evenstep.engine.counter import Counter
from evenstep.plan import tree
from evenstep.plan.summing import Leaves


def anywhere(i, node):
    return None


def expected(values, span, num_shards):
    """The sums over a worker's nodes, by plain recursion over the tree."""

    def over(first, end):
        if end - first == 1:
            return values.get(first)
        middle = max(stop for start, stop in tree.tree_nodes(num_shards) if start == first and stop < end)
        left, right = over(first, middle), over(middle, end)
        return left + right if left is not None and right is not None else left if right is None else right

    return [over(*node) for node in tree.cover(span, num_shards)]


def same(found, wanted):
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8])
def test_any_span_in_any_order_with_any_shards_absent(num_shards):
    rng = random.Random(num_shards)
    for first, end in itertools.combinations(range(num_shards + 1), 2):
        values = {k: torch.randn(3) for k in range(first, end) if rng.random() < 0.8}
        counter = Counter(Leaves.of((first, end), num_shards), 1, range(first, end), anywhere)
        order = list(values)
        rng.shuffle(order)
        completed = [counter.arrive(0, k, values[k].clone()) for k in order]
        completed.append(counter.advance(0, over=True))
        assert completed.count(True) == 1
        assert same(counter.nodes(0), expected(values, (first, end), num_shards))


def test_a_shard_without_samples_is_not_waited_for():
    counter = Counter(Leaves.of((0, 4), 4), 1, [1, 3], anywhere)
    assert not counter.advance(0)
    assert not counter.arrive(0, 3, torch.tensor([3.0]))
    assert counter.arrive(0, 1, torch.tensor([1.0]))
    assert counter.nodes(0)[0].tolist() == [4.0]


def test_a_finished_node_lies_where_it_shall():
    places = {}

    def place(i, node):
        return places.setdefault((i, node), torch.zeros(2))

    counter = Counter(Leaves.of((0, 3), 4), 1, range(3), place)
    for k in range(3):
        counter.arrive(0, k, torch.full((2,), float(k + 1)))
    assert [node.tolist() for node in counter.nodes(0)] == [[3.0, 3.0], [3.0, 3.0]]
    assert all(counter.nodes(0)[node] is places[0, node] for node in range(2))
