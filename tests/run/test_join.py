"""How a process finds its fellow workers: alone, or around the segment that it has inherited."""

import os

import pytest

from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError
from evenstep.run import join as module
from evenstep.run.join import alone, join
from evenstep.transport.segment import Segment


@pytest.fixture(autouse=True)
def nobody_has_joined(monkeypatch):
    monkeypatch.setattr(module, "_joined", {})


@pytest.fixture
def segment_fd():
    """A segment for two workers, as the launcher hands it on."""
    fd = Segment.create(2).fd
    yield fd
    os.close(fd)


def test_alone_it_is_a_group_of_one_with_a_ledger_of_its_own():
    ledger = alone(Environment(), 5.0)
    assert (ledger.group.rank, ledger.group.num_workers, ledger.group.elastic) == (0, 1, False)
    assert ledger.done == 0
    ledger.group.close()


def test_several_runs_of_one_worker_go_on_in_one_ledger(segment_fd):
    env = Environment(1, 2, segment_fd=os.dup(segment_fd))
    first = join(env, 5.0)
    assert (first.group.rank, first.group.num_workers) == (1, 2)
    assert join(env, 7.0) is first
    assert first.group.timeout_s == 7.0
    first.group.close()


def test_a_worker_without_a_segment_is_told_how_to_start():
    with pytest.raises(ConfigError, match="EVENSTEP_SEGMENT_FD is not; start workers with `evenstep run`"):
        join(Environment(0, 2), 5.0)


def test_a_segment_for_others_is_refused(segment_fd):
    with pytest.raises(ConfigError, match="for 2 workers but the environment says 3"):
        join(Environment(0, 3, segment_fd=segment_fd), 5.0)
