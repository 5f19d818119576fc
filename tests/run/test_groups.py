"""Means over several groups are means over their samples."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.plan.groups import Standing
from evenstep.run.groups import Groups, merge_means


def test_groups_count_by_their_samples_and_those_without_any_do_not():
    reports = [[3, {"a": (0.5).hex()}], [1, {"a": (2.5).hex()}], [0, {}]]
    assert merge_means(reports) == {"a": pytest.approx(1.0)}


def test_different_metrics_are_an_error():
    with pytest.raises(ConfigError, match="groups give different metrics"):
        merge_means([[1, {"a": "0x0p0"}], [1, {"b": "0x0p0"}]])


def test_before_a_model_is_prepared_there_is_nobody_to_wait_for(holdings_of):
    (holdings,) = holdings_of()
    groups = Groups(holdings, Standing.__new__(Standing))
    groups.collect()
    groups.level("evaluate")
    assert groups.merge("evaluate", {"loss": 0.1}, 3) == {"loss": 0.1}
    assert groups.tensors() == {}
    groups.stop_if_asked()
