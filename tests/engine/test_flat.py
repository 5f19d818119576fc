"""Flat gradients are the same sums as those that are added parameter by parameter, to the bit."""

import pytest
import torch

from evenstep.core.errors import UnsupportedError
from evenstep.engine.delivery import Local
from evenstep.engine.flat import FlatGradients, ShardGradients
from evenstep.engine.gradients import Gradients
from evenstep.plan.summing import plan_summing

LIKE = [torch.zeros(3, 4).t(), torch.zeros(5), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(())]
NAMES = ["a", "b", "c", "d"]


def nobody(plan, like):
    raise AssertionError("there is one site")


def leaf(i, shard):
    generator = torch.Generator().manual_seed(50 * i + shard)
    return torch.randn(LIKE[i].shape, generator=generator, dtype=LIKE[i].dtype)


def both(num_shards, shards, gives):
    plan = plan_summing([t.nbytes for t in LIKE], [(0, num_shards)], 0)
    one, other = Gradients(NAMES), FlatGradients(NAMES, LIKE, nobody)
    one.plan = other.plan = plan
    one.delivery = Local(plan)
    for gradients in (one, other):
        gradients.begin(1, [0], shards)
    for k in shards:
        found = [leaf(i, k) if gives(i, k) else None for i in range(len(LIKE))]
        for i, gradient in enumerate(found):
            if gradient is not None:
                one.arrive(i, k, gradient.clone())
        other.take(k, found)
    for gradients in (one, other):
        gradients.end_backward()
    return one.finish(), other.finish(), other


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "gives",
    [lambda i, k: True, lambda i, k: i != 1, lambda i, k: (i + k) % 3 != 0, lambda i, k: k > 1 or i == 0],
    ids=["all", "one never", "now and then", "late"],
)
def test_the_sums_are_those_of_gradients_that_come_one_by_one(num_shards, gives):
    for shards in (range(num_shards), [k for k in range(num_shards) if k != 1], [num_shards - 1]):
        expected, found, _ = both(num_shards, list(shards), gives)
        for i in range(len(LIKE)):
            assert (expected[i] is None) == (found[i] is None)
            assert expected[i] is None or torch.equal(expected[i], found[i])


def test_few_buffers_are_made_and_used_again():
    _, _, gradients = both(8, list(range(8)), lambda i, k: True)
    gradients.clear()
    assert len(gradients._free) <= 4
    gradients.begin(2, [0], range(8))
    for k in range(8):
        gradients.take(k, [leaf(i, k) for i in range(len(LIKE))])
    gradients.clear()
    assert len(gradients._free) <= 4


def test_views_are_laid_out_as_their_parameters():
    _, found, _ = both(2, [0, 1], lambda i, k: True)
    assert [found[i].stride() for i in range(len(LIKE))] == [t.stride() for t in LIKE]


def test_what_is_given_is_left_alone():
    given = [leaf(i, 0) for i in range(len(LIKE))]
    kept = [g.clone() for g in given]
    gradients = FlatGradients(NAMES, LIKE, nobody)
    gradients.plan = plan_summing([t.nbytes for t in LIKE], [(0, 2)], 0)
    gradients.begin(1, [0], [0, 1])
    gradients.take(0, given)
    gradients.take(1, given)
    assert all(map(torch.equal, given, kept))


def test_what_a_graph_gives_again_at_the_same_place_is_looked_at_once_and_added_as_it_is_then():
    given = ShardGradients(leaf(i, 0) if i else None for i in range(len(LIKE)))
    gradients = FlatGradients(NAMES, LIKE, nobody)
    gradients.plan = plan_summing([t.nbytes for t in LIKE], [(0, 2)], 0)
    for step in range(2):
        gradients.begin(step + 1, [0], [0, 1])
        expected = [None if g is None else torch.zeros_like(g) for g in given]
        for shard in range(2):
            for i, gradient in enumerate(given):
                if gradient is not None:
                    gradient.copy_(leaf(i, 10 * step + shard))
                    expected[i] += gradient
            gradients.take(shard, given)
        found = gradients.finish()
        assert found[0] is None
        assert all(torch.equal(found[i], expected[i]) for i in range(1, len(LIKE)))


def test_a_sparse_gradient_is_refused_by_name():
    gradients = FlatGradients(NAMES, LIKE, nobody)
    gradients.plan = plan_summing([t.nbytes for t in LIKE], [(0, 1)], 0)
    gradients.begin(1, [0], [0])
    with pytest.raises(UnsupportedError, match="parameter 'b' got a sparse gradient"):
        gradients.take(0, [None, torch.zeros(5).to_sparse(), None, None])
