"""A forked copy of a worker is told apart from it by its process id."""

import os

import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.identity import check_not_a_copy, last_core


def test_the_process_itself_may_go_on_and_no_other():
    check_not_a_copy(os.getpid(), "worker 3")
    with pytest.raises(
        ConfigError, match=rf"process {os.getpid()} is a forked copy of worker 3 \(process 1\).*os\._exit"
    ):
        check_not_a_copy(1, "worker 3")


def test_the_core_is_one_that_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    os.sched_setaffinity(0, {one})
    try:
        assert last_core() == one
    finally:
        os.sched_setaffinity(0, allowed)
