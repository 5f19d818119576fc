"""Values of one site reach all others as they are, however many pieces that takes."""

import pytest
import torch
from fakes import together

from evenstep.engine import spreading
from evenstep.engine.spreading import ThroughHost
from evenstep.plan.sites import Sites

PLACES = {"each alone": [0, 1, 2], "two around one memory": [0, 1, 1], "all around one": [0, 0, 0]}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("source", [0, 2])
def test_every_site_has_the_values_of_the_source(groups_of, monkeypatch, places, source):
    monkeypatch.setattr(spreading, "_CHUNK_BYTES", 64)
    memories = [[torch.full((5, 7), float(s)), torch.tensor([s]), torch.empty(0)] for s in range(3)]
    expected = [t.clone() for t in memories[places[source]]]

    def worker(group):
        tensors = memories[places[group.rank]]
        ThroughHost(group).spread("values", tensors, source, Sites.of(group.rank, places))
        return all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))

    assert together(groups_of(3), worker) == [True] * 3


def test_memory_that_is_not_in_order_of_its_dimensions_is_spread_too(groups_of):
    memories = [torch.arange(6.0).view(2, 3).t() * (1 - s) for s in range(2)]

    def worker(group):
        ThroughHost(group).spread("values", [memories[group.rank]], 0, Sites.of(group.rank, [0, 1]))

    together(groups_of(2), worker)
    assert torch.equal(memories[1], torch.arange(6.0).view(2, 3).t())
