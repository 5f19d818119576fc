"""Shards to the workers of several machines: all of them once, in nodes of the tree where that costs little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.plan import tree
from evenstep.plan.machines import machine_spans, share_machines
from evenstep.plan.placement import share


def of_machines(size, counts, weights=None):
    machines = [machine for machine, count in enumerate(counts) for _ in range(count)]
    return share_machines(size, weights or [1.0] * len(machines), machines), machines


@given(st.integers(1, 64), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_every_worker_gets_neighbouring_shards_and_together_all(size, counts, data):
    workers = sum(counts)
    if workers > size:
        size = workers
    weights = data.draw(st.lists(st.floats(0.1, 10.0), min_size=workers, max_size=workers))
    spans, machines = of_machines(size, counts, weights)
    assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == size
    assert all(first < end for first, end in spans)
    assert machine_spans(spans, machines)[-1][1] == size


@pytest.mark.parametrize(
    ("size", "counts", "expected"),
    [
        (8, [1, 1], [(0, 4), (4, 8)]),
        (8, [2, 2], [(0, 4), (4, 8)]),
        (8, [1, 1, 1], [(0, 4), (4, 6), (6, 8)]),
        (8, [1, 1, 1, 1], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (12, [1, 1, 1], [(0, 4), (4, 8), (8, 12)]),
        (8, [3, 3], [(0, 4), (4, 8)]),
        (256, [4] * 64, [(4 * m, 4 * m + 4) for m in range(64)]),
    ],
)
def test_a_machine_has_one_node_of_the_tree(size, counts, expected):
    spans, machines = of_machines(size, counts)
    assert machine_spans(spans, machines) == expected
    assert all(span in tree.tree_nodes(size) for span in expected)


def test_a_machine_that_is_much_faster_has_more_shards_even_if_they_are_no_node():
    spans, _ = of_machines(8, [1, 1], [3.0, 1.0])
    assert spans == [(0, 6), (6, 8)]
    spans, machines = of_machines(8, [3, 1])
    assert machine_spans(spans, machines) == [(0, 6), (6, 8)]


def test_more_workers_than_a_node_has_shards_get_what_there_is():
    spans, _ = of_machines(8, [5, 1])
    assert spans == share(8, [1.0] * 6)


def test_one_machine_is_as_ever():
    assert of_machines(8, [3])[0] == share(8, [1.0] * 3)
