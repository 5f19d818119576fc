"""Who gets how many workers: decided without any process."""

import pytest

from evenstep.agents.shares import limits, share_out
from evenstep.core.errors import ConfigError


def test_a_number_is_the_least_and_the_most():
    assert limits(3) == (3, 3)
    assert limits((2, 8)) == (2, 8)


@pytest.mark.parametrize("workers", [0, -1, True, 2.0, "2", (3, 2), (0, 2), (1, 2, 3), None])
def test_what_is_no_number_of_workers_is_refused(workers):
    with pytest.raises(ConfigError, match=r"workers=.*, expected a whole number above 0, or a pair"):
        limits(workers)


def test_workers_go_to_as_few_nodes_as_possible():
    assert share_out([2, 4, 1], 1, 5) == [1, 4, 0]
    assert share_out([1, 1, 1], 2, 3) == [1, 1, 1]
    assert share_out([1, 1], 1, 8) == [1, 1]
    assert share_out([], 0, 8) == []
    with pytest.raises(ConfigError, match="there is room for 2 workers, expected at least 3"):
        share_out([1, 1], 3, 8)
