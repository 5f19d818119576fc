"""The tree, evaluated symbolically: every partition of the leaves must give one and the same expression."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.plan import tree

GOLDEN = {
    1: ("0", [0]),
    2: ("(0+1)", [0, 1]),
    3: ("((0+1)+2)", [0, 1, 1]),
    5: ("(((0+1)+(2+3))+4)", [0, 1, 0, 2, 1]),
    6: ("(((0+1)+(2+3))+(4+5))", [0, 1, 0, 2, 0, 2]),
    7: ("(((0+1)+(2+3))+((4+5)+6))", [0, 1, 0, 2, 0, 1, 2]),
    8: ("(((0+1)+(2+3))+((4+5)+(6+7)))", [0, 1, 0, 2, 0, 1, 0, 3]),
    9: ("((((0+1)+(2+3))+((4+5)+(6+7)))+8)", [0, 1, 0, 2, 0, 1, 0, 3, 1]),
}


def plain(leaves: Sequence[str]) -> str:
    """The tree as its definition says it: pair neighbours, level by level, and carry an odd one up."""
    level = list(leaves)
    while len(level) > 1:
        pairs = [f"({a}+{b})" for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def evaluate(items: Sequence[str], program: bytes) -> list[str]:
    stack: list[str] = []
    for item, merges in zip(items, program, strict=True):
        stack.append(item)
        for _ in range(merges):
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
    return stack


def node(first: int, end: int, num_leaves: int) -> str:
    """A node's own expression, made by the worker that holds the leaves [first, end)."""
    leaves = tuple((k, k + 1) for k in range(first, end))
    (text,) = evaluate([str(k) for k in range(first, end)], tree.merge_program(leaves, num_leaves))
    return text


def over_workers(ends: Sequence[int], num_leaves: int) -> str:
    """Each worker adds its leaves as far as the tree allows; then the nodes of all are added."""
    nodes = [n for span in pairwise([0, *ends, num_leaves]) for n in tree.cover(span, num_leaves)]
    (text,) = evaluate([node(*n, num_leaves) for n in nodes], tree.merge_program(tuple(nodes), num_leaves))
    return text


@pytest.mark.parametrize("num_leaves", GOLDEN)
def test_the_tree_is_the_one_that_is_written_down(num_leaves):
    expression, program = GOLDEN[num_leaves]
    leaves = tuple((k, k + 1) for k in range(num_leaves))
    assert tree.reduce([str(k) for k in range(num_leaves)], lambda a, b: f"({a}+{b})") == expression
    assert list(tree.merge_program(leaves, num_leaves)) == program


def test_the_program_is_the_plain_tree_for_every_number_of_leaves():
    for num_leaves in range(1, 257):
        leaves = [str(k) for k in range(num_leaves)]
        assert tree.reduce(leaves, lambda a, b: f"({a}+{b})") == plain(leaves)


def test_every_partition_of_few_leaves_gives_the_plain_tree():
    for num_leaves in range(1, 9):
        for marks in range(1 << (num_leaves - 1)):
            ends = [k for k in range(1, num_leaves) if marks >> (k - 1) & 1]
            assert over_workers(ends, num_leaves) == plain([str(k) for k in range(num_leaves)])


@settings(max_examples=200)
@given(st.data())
def test_any_partition_of_up_to_forty_leaves_gives_the_plain_tree(data):
    num_leaves = data.draw(st.integers(1, 40))
    ends = sorted(data.draw(st.lists(st.integers(0, num_leaves), max_size=12)))  # with workers that hold nothing
    assert over_workers(ends, num_leaves) == plain([str(k) for k in range(num_leaves)])


@settings(max_examples=100)
@given(st.integers(1, 40).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k), st.integers(0, k))))
def test_a_cover_is_made_of_the_fewest_neighbouring_nodes(case):
    num_leaves, first, end = case[0], min(case[1:]), max(case[1:])
    cover = tree.cover((first, end), num_leaves)
    assert [k for span in cover for k in range(*span)] == list(range(first, end))
    assert set(cover) <= tree.tree_nodes(num_leaves)
    for (a, _), (_, b) in pairwise(cover):
        assert (a, b) not in tree.tree_nodes(num_leaves), "two neighbours that make a node should be that node"


@settings(max_examples=300)
@given(st.integers(1, 40).flatmap(lambda k: st.lists(st.booleans(), min_size=k, max_size=k)))
def test_an_absent_item_leaves_its_sibling_as_it_is(present):
    num_leaves = len(present)
    program = tree.merge_program(tuple((k, k + 1) for k in range(num_leaves)), num_leaves)

    def skipping(a: str | None, b: str | None) -> str | None:
        return (b if a is None else a) if a is None or b is None else f"({a}+{b})"

    model = tree.reduce([str(k) if here else None for k, here in enumerate(present)], skipping)
    items = [str(k) for k, here in enumerate(present) if here]
    found = evaluate(items, tree.present_program(program, tuple(present)))
    assert found == ([] if model is None else [model])


def test_the_deepest_stack_of_any_run_fits_into_the_core():
    for num_leaves in range(1, 257):
        depth = deepest = 0
        for merges in tree.merge_program(tuple((k, k + 1) for k in range(num_leaves)), num_leaves):
            depth += 1
            deepest = max(deepest, depth)
            depth -= merges
        assert deepest <= 16
