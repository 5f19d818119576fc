"""Results of shards become one, in tree order, to the bit."""

import math

import numpy as np
import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.engine.loss import Loss, split
from evenstep.engine.results import Mean, Note, ShardResult, add, merge


def result(value, rows, **metrics):
    loss, found = split((value, metrics))
    return ShardResult.of(loss, found, rows)


def test_means_are_weighted_by_rows():
    merged = merge({0: result(torch.tensor(1.0), 3, hit=0.5), 2: result(torch.tensor(4.0), 1, hit=1)}, [3, 0, 1])
    assert merged.loss == 7 / 4
    assert merged.metrics == {"hit": 2.5 / 4}
    assert merged.scale is None


def test_a_weighted_loss_is_a_mean_over_its_weights_and_says_how_to_scale():
    shards = {0: result(Loss(torch.tensor(2.0), weight=3), 1), 1: result(Loss(torch.tensor(math.nan), weight=0), 1)}
    merged = merge(shards, [1, 1])
    assert merged.loss == 2.0
    assert merged.scale == 2 / 3
    sums = {0: torch.tensor([3.0, 6.0]), 1: None}
    merged.scale_gradients(sums)
    assert sums[0].tolist() == [2.0, 4.0]
    assert sums[1] is None


def test_nothing_at_all_is_not_a_number_and_leaves_no_gradients():
    merged = merge({0: result(Loss(total=torch.tensor(0.0), weight=0), 4)}, [4])
    assert math.isnan(merged.loss)
    assert merged.scale == 0
    sums = {0: torch.tensor([math.nan])}
    merged.scale_gradients(sums)
    assert sums == {0: None}


def test_sums_are_in_tree_order():
    values = [0.1, 0.2, 0.3, 0.7]
    total = add({k: Mean(value, 1) for k, value in enumerate(values)}, 4)
    assert total.total == (values[0] + values[1]) + (values[2] + values[3])


def test_whatever_the_numbers_are_packing_keeps_their_bits():
    for loss in (0.1, -0.0, math.inf, 5e-324):
        packed = result(torch.tensor(loss, dtype=torch.float64), 3, a=0.1, b=torch.tensor([1.0, 2.0, 4.0]))
        assert ShardResult.unpack(packed.pack()) == packed
        assert math.copysign(1, ShardResult.unpack(packed.pack()).loss.total) == math.copysign(1, loss)


def test_shards_with_other_metrics_are_named():
    with pytest.raises(ConfigError, match=r"\['b'\] in shard 1 but \['a'\] in shard 0"):
        merge({0: result(torch.tensor(1.0), 1, a=1), 1: result(torch.tensor(1.0), 1, b=1)}, [1, 1])


def test_a_metric_with_another_number_of_values_is_refused():
    with pytest.raises(ConfigError, match="'a' has 2 values for a part of 3 samples"):
        result(torch.tensor(1.0), 3, a=torch.ones(2))


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan, torch.tensor(-0.5)])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ConfigError, match=r"Loss\(weight=.*expected a finite number of at least 0"):
        result(Loss(torch.ones(()), weight=weight), 1)


def test_a_shard_without_a_mean_is_found_where_others_have_one():
    number, none = torch.tensor(1.0), torch.tensor(math.nan)
    assert merge({0: result(number, 1), 1: result(none, 1), 2: result(none, 1)}, [1, 1, 1]).without_mean == 1
    assert merge({0: result(none, 1), 1: result(none, 1)}, [1, 1]).without_mean is None, "all went astray"
    assert merge({0: result(number, 1), 1: result(torch.tensor(math.inf), 1)}, [1, 1]).without_mean is None
    weighted = {0: result(Loss(number, weight=1), 1), 1: result(Loss(none, weight=2), 1)}
    assert merge(weighted, [1, 1]).without_mean is None, "it has said how many"


def test_a_metric_may_be_an_array_or_a_number_of_numpys():
    for value in (np.array([1.0, 2.0, 3.0]), np.array([1, 2, 3]), np.float32(2), np.array(2.0)):
        assert Mean.of("m", value, 3) == Mean(6.0, 3)
    assert Mean.of("m", np.array([True, False]), 2) == Mean(1.0, 2)


@pytest.mark.parametrize("value", ["2", None, [1.0, 2.0], Note(1), np.array(["a"])])
def test_a_metric_that_is_no_number_is_named(value):
    with pytest.raises(ConfigError, match=rf"metric 'm' is a {type(value).__name__}; expected a tensor with one value"):
        Mean.of("m", value, 2)
