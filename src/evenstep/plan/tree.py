"""The fixed binary tree over shard numbers, and the stack programs that evaluate parts of it.

The tree pairs neighbours, level by level, and carries an odd one up: ((0+1)+(2+3))+(4+5) for six leaves. It depends on
the number of shards alone, so every evaluation of any part of it gives the same bits.

A *stack program* evaluates it from left to right: push an item, then add the two topmost entries `merges` times.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

__all__ = ["cover", "leaf_program", "merge_program", "present_program", "reduce", "tree_nodes"]

T = TypeVar("T")
Span = tuple[int, int]


@lru_cache(maxsize=1024)
def tree_nodes(num_leaves: int) -> frozenset[Span]:
    """All nodes of the tree as spans [first, last + 1), leaves and root included."""
    level = [(i, i + 1) for i in range(num_leaves)]
    nodes = set(level)
    while len(level) > 1:
        pairs = [(a[0], b[1]) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
        nodes.update(level)
    return frozenset(nodes)


@lru_cache(maxsize=1024)
def cover(span: Span, num_leaves: int) -> tuple[Span, ...]:
    """The fewest tree nodes that make up `span`, from left to right. Empty for an empty span."""
    first, end = span
    found: list[Span] = []
    while first < end:
        last = max(stop for start, stop in tree_nodes(num_leaves) if start == first and stop <= end)
        found.append((first, last))
        first = last
    return tuple(found)


@lru_cache(maxsize=1024)
def merge_program(items: tuple[Span, ...], num_leaves: int) -> bytes:
    """How many merges follow the push of each item, for items that are neighbouring tree nodes from left to right."""
    program, starts = [], set()
    for first, end in items:
        starts.add(first)
        program.append(
            sum(1 for start, stop in tree_nodes(num_leaves) if stop == end and start < first and start in starts)
        )
    return bytes(program)


@lru_cache(maxsize=1024)
def leaf_program(num_leaves: int) -> bytes:
    """The merges after each leaf of a whole tree."""
    return merge_program(tuple((i, i + 1) for i in range(num_leaves)), num_leaves)


@lru_cache(maxsize=4096)
def present_program(program: bytes, present: tuple[bool, ...]) -> bytes:
    """The program for only the items that are present: an absent one leaves its sibling as it is."""
    counts: list[int] = []
    stack: list[bool] = []
    for merges, here in zip(program, present, strict=True):
        stack.append(here)
        if here:
            counts.append(0)
        for _ in range(merges):
            right, left = stack.pop(), stack.pop()
            counts[-1:] = [counts[-1] + 1] if left and right else counts[-1:]
            stack.append(left or right)
    return bytes(counts)


def reduce(items: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Combine one item per leaf in tree order."""
    stack: list[T] = []
    for item, merges in zip(items, leaf_program(len(items)), strict=True):
        stack.append(item)
        for _ in range(merges):
            right = stack.pop()
            stack.append(combine(stack.pop(), right))
    (total,) = stack
    return total
