"""A layer that spans shards reaches exactly the workers that compute some, and gets rows of zeros for the others."""

import pytest
import torch
from fakes import together

from evenstep.core import points
from evenstep.engine.context import Context
from evenstep.engine.randomness import derive

SPANS = [(0, 2), (2, 3), (3, 6)]


def contexts(groups):
    made = [Context(group, seed=9) for group in groups]
    for context in made:
        context.spans = SPANS[: len(made)]
    return made


def row(shard):
    return torch.tensor([shard + 1.0, shard / 7])


@pytest.mark.parametrize("sizes", [[3, 3, 2, 2, 2, 2], [3, 3, 0, 2, 2, 0], [0, 1, 0, 0, 0, 1], [0, 0, 5, 0, 0, 0]])
def test_every_worker_with_samples_gets_the_rows_of_all_shards_in_order(groups_of, sizes):
    made = contexts(groups_of(3))
    taking_part = [c for c, (first, end) in zip(made, SPANS, strict=True) if any(sizes[first:end])]

    def body(context):
        mine = [k for k in range(*SPANS[made.index(context)]) if sizes[k]]
        crew = context.crew(sizes)
        assert crew.shards[crew.me] == mine
        assert crew.num_shards == 6
        assert crew.is_whole
        return crew.gather("norm", torch.stack([row(k) for k in mine])), crew.alone

    for found, alone in together(taking_part, body):
        assert torch.equal(found, torch.stack([row(k) if sizes[k] else torch.zeros(2) for k in range(6)]))
        assert alone == (len(taking_part) == 1)


def test_what_is_swapped_comes_from_each_in_order(groups_of):
    made = contexts(groups_of(2))

    def body(context):
        return context.crew([1, 1, 1]).swap("weights", torch.full((2 + context.worker,), float(context.worker)))

    for found in together(made, body):
        assert [t.tolist() for t in found] == [[0.0, 0.0], [1.0, 1.0, 1.0]]


def test_shards_that_others_train_elsewhere_are_missing(groups_of):
    (context,) = (Context(group, seed=9) for group in groups_of(1))
    context.spans = [(2, 4)]
    assert not context.crew([1, 1, 1, 1, 1, 1]).is_whole


def test_random_numbers_depend_on_seed_step_and_shard_alone(groups_of):
    first, second = contexts(groups_of(2))
    assert first.seed_of(5, 3) == second.seed_of(5, 3) == derive("step", 9, 5, 3)
    assert len({first.seed_of(step, shard) for step in range(9) for shard in range(9)}) == 81


def test_who_looks_on_sees_which_shard_is_computed(groups_of):
    (context,) = (Context(group, seed=9) for group in groups_of(1))
    seen = []
    points.arm(seen.append)
    try:
        context.begins(3)
    finally:
        points.arm(None)
    assert seen == ["forward"]
    assert context.worker == 0
