"""What scripts log becomes one value of all workers, which does not depend on how many they are."""

import math

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.engine.logged import Logged, checked, mean_of_all


def test_values_that_are_alike_come_out_as_they_are():
    for workers in range(1, 9):
        assert mean_of_all([{"lr": [0.1]}] * workers) == {"lr": 0.1}


def test_a_mean_is_over_all_calls_whoever_made_them():
    values = [0.1, 0.7, 1e-9, 3e15]
    means = [
        mean_of_all([{"x": values}]),
        mean_of_all([{"x": values[2:]}, {}, {"x": values[:2]}]),
        mean_of_all([{"x": [value]} for value in reversed(values)]),
    ]
    assert means[0] == means[1] == means[2] == {"x": math.fsum(values) / 4}


def test_what_is_not_finite_stays_so():
    assert mean_of_all([{"x": [math.inf]}, {"x": [1.0]}]) == {"x": math.inf}
    assert math.isnan(mean_of_all([{"x": [math.inf]}, {"x": [-math.inf]}])["x"])


def test_what_was_logged_is_kept_until_a_step_is_committed():
    logged = Logged()
    logged.add("x", 1.0)
    logged.add("x", 2.0)
    assert logged.values == {"x": [1.0, 2.0]}
    logged.settle()
    assert logged.values == {}


def test_one_number_under_a_name_is_asked_for():
    assert checked("x", torch.tensor([3])) == ("x", 3.0)
    for name, value in [("x", torch.ones(2)), ("x", "much"), ("x", None), ("", 1.0), (7, 1.0)]:
        with pytest.raises(ConfigError, match=r"run\.log\(.* expected"):
            checked(name, value)
