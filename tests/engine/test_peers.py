"""Sums over several sites are those of one site, to the bit, on every one of them."""

from itertools import chain

import pytest
import torch
from fakes import together

from evenstep.engine.delivery import Local
from evenstep.engine.flat import FlatGradients
from evenstep.engine.peers import connect
from evenstep.plan.summing import plan_summing

LIKE = [torch.zeros(3, 4).t(), torch.zeros(50), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(()), torch.zeros(0)]
NAMES = ["a", "b", "c", "d", "e"]
SPANS = {"1": [(0, 8)], "2": [(0, 3), (3, 8)], "3": [(0, 3), (3, 6), (6, 8)], "idle": [(0, 1), (1, 1), (1, 8)]}


def leaf(i, shard):
    generator = torch.Generator().manual_seed(50 * i + shard)
    return torch.randn(LIKE[i].shape, generator=generator, dtype=LIKE[i].dtype)


def sums(group, spans, gives):
    plan = plan_summing([t.nbytes for t in LIKE], spans, group.rank)
    gradients = FlatGradients(NAMES, LIKE, lambda plan, like: connect(group, torch.device("cpu"), plan, like))
    gradients.lay_out(plan, Local(plan))
    found = []
    for step in range(2):  # what the first leaves in the windows is nothing to the second
        gradients.begin(1 + step, range(len(spans)), range(*spans[group.rank]))
        for k in range(*spans[group.rank]):
            gradients.take(k, [leaf(i, k + step) if gives(i, k) else None for i in range(len(LIKE))])
        gradients.end_backward()
        found.append([None if t is None else t.clone() for t in gradients.finish().values()])
    gradients.close()
    return found


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize(
    "gives",
    [lambda i, k: True, lambda i, k: i != 1, lambda i, k: k != 4 or i != 1, lambda i, k: (i + k) % 3 != 0],
    ids=["all", "one never", "one shard without", "now and then"],
)
def test_every_site_has_the_sums_of_one_site(groups_of, spans, gives):
    (expected,) = together(groups_of(1), lambda group: sums(group, SPANS["1"], gives))
    for found in together(groups_of(len(spans)), lambda group: sums(group, spans, gives)):
        for mine, theirs in zip(chain(*expected), chain(*found), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
