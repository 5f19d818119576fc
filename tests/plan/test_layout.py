"""A layout moves partial sums around; what it adds, and in which order, is the plain tree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusters import topologies
from evenstep.core.errors import ConfigError
from evenstep.plan import tree
from evenstep.plan.layout import Layout
from evenstep.plan.placement import cut
from evenstep.plan.planner import in_order, lay


def reduced(layout: Layout, leaves: np.ndarray) -> np.ndarray:
    """Do what a layout says: every device has what it computed or was sent, and nothing else."""
    num_shards = layout.num_shards
    held: dict[int, dict[tuple[int, int], np.ndarray]] = {device: {} for device in layout.order}
    for device, (first, end) in zip(layout.order, layout.spans, strict=True):
        held[device] = {(k, k + 1): leaves[k] for k in range(first, end)}
    width = 1
    for moves in layout.rounds():
        for move in moves:
            held[move.target][move.node] = held[move.source].pop(move.node)
        for first in range(0, num_shards, 2 * width):
            left = (first, min(first + width, num_shards))
            right = (left[1], min(left[1] + width, num_shards))
            mine = held[layout.holder(first)]
            value = mine.pop(left)
            mine[left[0], right[1]] = value + mine.pop(right) if right[0] < right[1] else value
        width *= 2
    return held[layout.order[0]][0, num_shards]


@pytest.mark.long
@settings(max_examples=60)
@given(topologies(), st.integers(0, 30), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_however_the_tree_lies_over_whatever_machines_the_sum_has_the_same_bits(topology, extra, seed, random):
    num_shards = topology.num_devices + extra
    leaves = np.random.default_rng(seed).normal(0, 1e3, (num_shards, 5)).astype(np.float32)
    plain = tree.reduce(list(leaves), lambda a, b: a + b)
    shuffled = list(range(topology.num_devices))
    random.shuffle(shuffled)
    some = shuffled[: random.randint(1, len(shuffled))]
    layouts = (
        lay(topology, num_shards),
        lay(topology, num_shards, some),
        in_order(topology, num_shards),
        in_order(topology, num_shards, shuffled),
    )
    for layout in layouts:
        assert reduced(layout, leaves).tobytes() == plain.tobytes()


def test_another_order_of_additions_has_other_bits():
    leaves = np.random.default_rng(0).normal(0, 1e3, (9, 50)).astype(np.float32)
    plain = tree.reduce(list(leaves), lambda a, b: a + b)
    assert plain.tobytes() != tree.reduce(list(leaves[::-1]), lambda a, b: a + b).tobytes(), "else nothing is proved"


@settings(max_examples=100)
@given(st.integers(1, 60), st.data())
def test_a_device_is_left_with_as_many_nodes_as_cover_its_span(num_shards, data):
    layout = _cut(num_shards, data.draw(st.integers(1, num_shards)))
    for place, span in enumerate(layout.spans):
        assert layout.num_nodes(place) == len(tree.cover(span, num_shards))


def _cut(num_shards: int, num_devices: int) -> Layout:
    return Layout(tuple(range(num_devices)), tuple(cut(num_shards, num_devices)))


def test_eight_shards_on_four_devices_move_three_sums_up():
    rounds = [[(m.node, m.source, m.target) for m in moves] for moves in _cut(8, 4).rounds()]
    assert rounds == [[], [((2, 4), 1, 0), ((6, 8), 3, 2)], [((4, 8), 2, 0)]]


@pytest.mark.parametrize("spans", [((0, 2),), ((0, 2), (2, 2)), ((0, 2), (3, 4)), ((1, 2), (2, 3))])
def test_spans_that_are_no_neighbours_are_refused(spans):
    with pytest.raises(ConfigError, match="expected neighbouring spans from 0 on"):
        Layout((0, 1), spans)
