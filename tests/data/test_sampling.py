"""A sampler decides which samples there are; (seed, epoch) decides what it draws, whoever asks and whenever."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from evenstep.core.errors import ConfigError
from evenstep.data.order import Order
from evenstep.data.sampling import Sampling


def order(sampler, batch_size=4, seed=3, num_samples=20, **more):
    return Order(num_samples, batch_size, 2, seed, False, False, sampler=Sampling(sampler, num_samples, seed), **more)


def drawn(order, epoch=0):
    return [[i for shard in request.shards for i in shard] for request in order.requests(epoch)]


def flat(batches):
    return [index for batch in batches for index in batch]


class ByPython:
    def __iter__(self):
        return iter([random.randrange(20), int(np.random.randint(20))] * 3)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 5 + [3.0] * 15, 12),
    "with a generator": lambda: RandomSampler(range(20), num_samples=12, generator=torch.Generator().manual_seed(1)),
    "subset": lambda: SubsetRandomSampler(range(5, 12)),
    "nested": lambda: BatchSampler(RandomSampler(range(20), generator=torch.Generator()), 3, drop_last=False),
    "python and numpy": ByPython,
    "function": lambda: lambda epoch: torch.randperm(20)[: 10 + epoch],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_drawn_depends_on_seed_and_epoch_alone(name):
    size = None if name == "nested" else 4
    one, again = (order(SAMPLERS[name](), size) for _ in range(2))
    state = torch.get_rng_state()
    third = drawn(one, 2)
    torch.manual_seed(99)
    random.seed(99)
    drawn(again, 7)
    assert drawn(again, 2) == third
    assert drawn(again, 3) != third
    assert drawn(order(SAMPLERS[name](), size, seed=4), 2) != third
    torch.set_rng_state(state)
    drawn(one, 0)
    assert torch.equal(torch.get_rng_state(), state), "the script's own random numbers stay as they were"


def test_a_list_is_the_same_in_every_epoch():
    found = order([3, 1, np.int64(4), torch.tensor(1), 5], batch_size=2)
    assert drawn(found, 0) == drawn(found, 9) == [[3, 1], [4, 1], [5]]
    assert (found.num_batches, found.count(), found.count(1)) == (3, 3, 2)
    assert drawn(order([3, 1, 4, 1, 5], batch_size=2, group=1, groups=2)) == [[4, 1]]


def test_lists_of_indices_are_whole_batches():
    found = order([[0, 1, 2], [7], range(3, 8)], batch_size=None)
    assert drawn(found) == [[0, 1, 2], [7], [3, 4, 5, 6, 7]]
    assert found.num_batches == 3
    last = list(found.requests(0))[-1]
    assert last.position.is_last
    assert last.position.after == {"epoch": 1, "batch": 0}


def test_a_sampler_may_be_told_the_epoch():
    class Told:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch, self.epoch + 1])

    assert drawn(order(Told(), 1), 5) == [[5], [6]]


def test_orders_that_differ_have_different_names():
    names = {next(order(sampler).requests(0)).name for sampler in ([1, 2, 3], [1, 2, 4], [2, 1, 3])}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: order(DistributedSampler(range(20), 2, 0)), r"DistributedSampler, which deals samples to ranks"),
        (lambda: order(iter([1, 2])), r"list_iterator, which is exhausted after one epoch"),
        (lambda: order(3), r"sampler is a int; expected indices"),
        (lambda: drawn(order([1, 20])), r"gave sample 20 of a data set with 20; expected 0 to 19"),
        (lambda: drawn(order([-1])), r"gave sample -1"),
        (lambda: drawn(order([[1, 2]])), r"gives whole batches, such as \[1, 2\]; leave batch_size out"),
        (lambda: drawn(order([1, 2], batch_size=None)), r"gives single samples, such as 1; say batch_size"),
        (lambda: drawn(order([])), r"gave no batch at all"),
        (lambda: drawn(order([1, 2], group=2, groups=3)), r"3 groups but only 1 batches of 4"),
        (lambda: Order(20, 4, 2, 0, True, False, sampler=Sampling([1], 20, 0)), r"shuffle=True and a sampler"),
        (lambda: Order(20, None, 2, 0, False, True, sampler=Sampling([[1]], 20, 0)), r"drop_last=True and a sampler"),
        (lambda: order([[1]], None).times(2), r"batch_per_worker=True needs a batch_size"),
        (lambda: Order(20, None, 2, 0, False, False), r"batch_size=None, expected a whole number"),
    ],
)
def test_what_makes_no_sense_is_said(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_sampler_without_a_length_has_none():
    with pytest.raises(TypeError, match="no len"):
        len(Sampling(ByPython(), 20, 0))
