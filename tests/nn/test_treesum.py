"""Items are added in the order of the tree over shards, as they come, to the same bits as all at once."""

import pytest
import torch

from evenstep.nn.treesum import TreeSum
from evenstep.plan import tree


def items(count):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(50, generator=generator) * 10.0 ** (n % 5) for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 13])
def test_the_sum_is_that_of_the_tree_to_the_bit(count):
    total = TreeSum(tree.leaf_program(count))
    for item in items(count):
        total.push(item.clone())
    assert torch.equal(total.result, tree.reduce(items(count), torch.add))


@pytest.mark.parametrize("missing", [{0}, {3}, {0, 1}, {1, 2, 4}, set(range(5))])
def test_an_item_that_is_not_there_leaves_its_neighbour_as_it_is(missing):
    total = TreeSum(tree.leaf_program(5))
    for n, item in enumerate(items(5)):
        total.push(None if n in missing else item)
    expected = tree.reduce(
        [None if n in missing else item for n, item in enumerate(items(5))],
        lambda a, b: a + b if a is not None and b is not None else b if a is None else a,
    )
    assert (total.result is None) if expected is None else torch.equal(total.result, expected)


def test_few_items_are_kept_at_a_time():
    total, most = TreeSum(tree.leaf_program(64)), 0
    for item in items(64):
        total.push(item)
        most = max(most, len(total._stack))
    assert most <= 7
