from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.data.order import Order

sizes = st.integers(1, 300)
orders = st.builds(
    lambda samples, batch, shards, seed, shuffle: Order(samples, batch, shards, seed, shuffle, drop_last=False),
    sizes,
    st.integers(1, 90),
    st.integers(1, 20),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)


def flat(order: Order, epoch: int, first: int = 0) -> list[list[int]]:
    return [[index for shard in request.shards for index in shard] for request in order.requests(epoch, first)]


@settings(max_examples=60)
@given(orders, st.integers(0, 5))
def test_every_epoch_has_every_sample_exactly_once(order, epoch):
    batches = flat(order, epoch)
    assert sorted(index for batch in batches for index in batch) == list(range(order.num_samples))
    assert len(batches) == order.num_batches
    assert all(len(batch) == order.batch_size for batch in batches[:-1])


@settings(max_examples=60)
@given(orders)
def test_every_batch_is_cut_by_position_into_nearly_equal_shards(order):
    for number, request in enumerate(order.requests(3)):
        assert (request.position.epoch, request.position.number) == (3, number)
        assert len(request.shards) == order.num_shards
        assert request.sizes == [len(shard) for shard in request.shards]
        assert max(request.sizes) - min(request.sizes) <= 1
        assert request.sizes[0] > 0, "the first shard always has samples"


@settings(max_examples=60)
@given(orders, st.data())
def test_the_order_does_not_depend_on_the_shards_nor_on_where_one_begins(order, data):
    other = Order(order.num_samples, order.batch_size, data.draw(st.integers(1, 20)), order.seed, order.shuffle, False)
    first = data.draw(st.integers(0, order.num_batches))
    assert flat(other, 2) == flat(order, 2)
    assert flat(order, 2, first) == flat(order, 2)[first:]


@settings(max_examples=60)
@given(sizes, st.integers(1, 90))
def test_drop_last_leaves_out_exactly_the_short_batch(num_samples, batch_size):
    whole = Order(num_samples, batch_size, 4, 0, True, False)
    if num_samples < batch_size:
        with pytest.raises(ConfigError, match="leaves no batch at all"):
            Order(num_samples, batch_size, 4, 0, True, True)
        return
    dropping = Order(num_samples, batch_size, 4, 0, True, True)
    assert flat(dropping, 1) == [batch for batch in flat(whole, 1) if len(batch) == batch_size]
    assert dropping.num_batches == num_samples // batch_size


def test_the_order_is_another_for_every_epoch_and_seed_and_the_same_again():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(index for batch in flat(Order(50, 10, 4, seed, True, False), epoch) for index in batch)

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
    assert order(1, 2) == order(1, 2)


def dealt(order: Order) -> list[list[list[int]]]:
    return [[shard.tolist() for shard in request.shards] for request in order.requests(0)]


@pytest.mark.parametrize("most", [2**27, 9], ids=["drawn here", "drawn by torch"])
def test_the_order_of_a_given_seed_never_changes(monkeypatch, most):
    monkeypatch.setattr("evenstep.data.order._MOST_BY_32_BITS", most)
    order = Order(10, 4, 2, seed=0, shuffle=True, drop_last=False)
    assert dealt(order) == [[[6, 2], [9, 5]], [[1, 3], [8, 4]], [[7], [0]]]


def test_dealt_in_turn_sample_r_goes_to_shard_r_mod_k():
    order = Order(11, 8, 3, seed=0, shuffle=False, drop_last=False, deal="round-robin")
    assert dealt(order) == [[[0, 3, 6], [1, 4, 7], [2, 5]], [[8], [9], [10]]]


@settings(max_examples=60)
@given(orders)
def test_either_deal_gives_every_shard_as_many_of_the_same_batch(order):
    for by_position, in_turn in zip(order.requests(1), replace(order, deal="round-robin").requests(1), strict=True):
        assert in_turn.sizes == by_position.sizes
        assert sorted(i for s in in_turn.shards for i in s) == sorted(i for s in by_position.shards for i in s)


def test_without_shuffling_samples_come_as_they_are():
    assert flat(Order(7, 3, 2, 0, False, False), 4) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_samples": 0}, "the data set is empty; expected at least one sample"),
        ({"batch_size": 0}, "batch_size=0, expected a whole number above 0"),
        ({"batch_size": -4}, "batch_size=-4, expected a whole number above 0"),
        ({"deal": "cards"}, "deal='cards', expected 'position' or 'round-robin'"),
        ({"batch_size": 2.5}, "batch_size=2.5, expected a whole number above 0"),
    ],
    ids=str,
)
def test_a_plan_that_makes_no_sense_is_refused(changes, sentence):
    usual = {"num_samples": 10, "batch_size": 4, "num_shards": 2, "seed": 0, "shuffle": True, "drop_last": False}
    with pytest.raises(ConfigError) as caught:
        Order(**{**usual, **changes})
    assert str(caught.value) == sentence


def test_samples_to_compare_are_spread_over_the_batch():
    order = Order(num_samples=10, batch_size=7, num_shards=3, seed=0, shuffle=False, drop_last=False)
    first, last = order.requests(0)
    assert first.probes(3).tolist() == [0, 3, 6]
    assert last.probes(64).tolist() == [7, 8, 9]
