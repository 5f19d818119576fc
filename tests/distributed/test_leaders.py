"""An operation of the leaders ends with its result, or as soon as a failure is known, or after the timeout."""

from datetime import timedelta

import pytest
import torch

from evenstep.core.errors import MismatchError, PeerError, SilenceError
from evenstep.distributed.errors import group_error
from evenstep.distributed.failures import Failures
from evenstep.distributed.leaders import Leaders


class Operation:
    """An operation of gloo that takes some looks, or never ends, or breaks."""

    def __init__(self, looks=0, error=None, done=lambda: None):
        self._looks, self._error, self._done = looks, error, done

    def is_completed(self):
        self._looks -= 1
        return self._looks < 0

    def wait(self):
        if self._error is not None:
            raise self._error
        self._done()


class Group:
    """The process group of three leaders, of which this is number 1."""

    def __init__(self, looks=0, error=None):
        self.looks, self.error, self.options = looks, error, None

    def allgather(self, found, mine, options):
        def done():
            for number, place in enumerate(found[0]):
                place.copy_(mine[0] + number - 1)

        self.options = options
        return Operation(self.looks, self.error, done)

    def broadcast(self, data, options):
        self.options = options
        return Operation(self.looks, self.error, lambda: data[0].fill_(options.rootRank))


class Heard(Failures):
    """What is heard of failures, without a store."""

    report_s = 0.05

    def __init__(self, heard=None):
        self.heard, self.listened = heard, 0

    def fail(self, kind, text):
        raise group_error(kind.__name__, text, 0, [0])

    def hear(self):
        self.listened += 1
        if self.heard is not None:
            self.fail(*self.heard)

    def lose(self, text):
        self.fail(PeerError, text)


def leaders(group, failures=None, check=lambda: None):
    return Leaders(group, 3, "rank 0, rank 4", failures or Heard(), check)


@pytest.mark.parametrize("looks", [0, 3])
def test_everyone_gets_what_all_give(looks):
    group = Group(looks)
    found = leaders(group).gather(torch.tensor([5, 6]), "all_gather, operation 1", 10.0)
    assert torch.equal(torch.stack(found), torch.tensor([[4, 5], [5, 6], [6, 7]]))
    assert group.options.timeout == timedelta(seconds=10.1), "gloo ends too, but later than we do"


def test_everyone_gets_what_the_root_has():
    data = torch.zeros(2)
    leaders(Group(2)).broadcast(data, 2, "broadcast, operation 1", 10.0)
    assert data.tolist() == [2, 2]


def test_a_failure_on_another_machine_ends_a_wait():
    failures = Heard((MismatchError, "rank 0 is at another operation"))
    with pytest.raises(MismatchError, match="rank 0 is at another operation"):
        leaders(Group(10**6), failures).gather(torch.zeros(1), "all_reduce", 60.0)
    assert failures.listened == 1


def test_a_failure_on_this_machine_ends_a_wait_at_once():
    def check():
        raise group_error("PeerError", "rank 3 ended", 3, [3])

    failures = Heard()
    with pytest.raises(PeerError, match="rank 3 ended"):
        leaders(Group(10**6), failures, check).gather(torch.zeros(1), "all_reduce", 60.0)
    assert failures.listened == 0


def test_silence_ends_a_wait_after_the_timeout():
    with pytest.raises(SilenceError, match=r"one of rank 0, rank 4 said nothing for 0\.01 s: Timed out in all_reduce"):
        leaders(Group(10**6)).gather(torch.zeros(1), "all_reduce", 0.01)


@pytest.mark.parametrize("looks", [0, 2])
def test_a_connection_that_breaks_is_a_lost_leader(looks):
    group = Group(looks, RuntimeError("connection reset"))
    with pytest.raises(PeerError, match="one of rank 0, rank 4 was lost in all_reduce: connection reset"):
        leaders(group).gather(torch.zeros(1), "all_reduce", 60.0)
