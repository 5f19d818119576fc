"""A failure reaches all machines through torch's store, once, and nobody waits long for a store that is gone."""

import threading
import time

import pytest
from torch.distributed import HashStore

from evenstep.core.errors import MismatchError, PeerError, SilenceError
from evenstep.distributed.errors import group_error
from evenstep.distributed.failures import Failures, Word


class Team:
    """The ranks of one machine: the first failure stays."""

    index = 0

    def __init__(self):
        self.failure = None

    def fail(self, kind, culprit, text):
        self.failure = self.failure or (kind.__name__, text, culprit)

    def raise_failure(self):
        kind, text, culprit = self.failure
        raise group_error(kind, text, culprit, [culprit])


class GoneStore:
    """A store whose host has ended."""

    def check(self, keys):
        raise RuntimeError("connection reset")

    def compare_set(self, *_):
        raise RuntimeError("connection reset")


class StuckStore:
    """A store whose host is stopped: it never answers, until the test is over."""

    def __init__(self):
        self.over = threading.Event()

    def check(self, keys):
        self.over.wait()
        return False

    def compare_set(self, *_):
        self.over.wait()


def heard(failures, seconds=5.0):
    """Listen until something is heard, which is raised."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        failures.hear()
        time.sleep(0.001)


@pytest.mark.parametrize("kind", [MismatchError, SilenceError, PeerError])
def test_what_one_machine_tells_the_others_raise_too(kind):
    store = HashStore()
    here, there = Failures(Word(store), Team()), Failures(Word(store), Team())
    with pytest.raises(kind, match="rank 3 ended"), here.telling():
        here.fail(kind, "rank 3 ended\nand so on")
    with pytest.raises(kind, match="rank 3 ended\nand so on"):
        heard(there)


def test_nothing_is_heard_while_all_is_well():
    failures = Failures(Word(HashStore()), Team())
    with failures.telling():
        heard(failures, seconds=0.05)
    heard(failures, seconds=0.05)


def test_only_the_first_failure_counts():
    store = HashStore()
    for text in ("first", "second"):
        failures = Failures(Word(store), Team())
        with pytest.raises(PeerError, match=text), failures.telling():
            failures.fail(PeerError, text)
    with pytest.raises(PeerError, match="first"):
        heard(Failures(Word(store), Team()))


def test_a_mistake_that_is_not_ours_is_not_told():
    store = HashStore()
    with pytest.raises(ZeroDivisionError), Failures(Word(store), Team()).telling():
        _ = 1 / 0
    heard(Failures(Word(store), Team()), seconds=0.05)


def test_a_broken_connection_is_explained_by_what_another_machine_says():
    store = HashStore()
    there = Failures(Word(store), Team())
    with pytest.raises(SilenceError), there.telling():
        there.fail(SilenceError, "rank 5 said nothing")
    with pytest.raises(SilenceError, match="rank 5 said nothing"):
        Failures(Word(store), Team()).lose("a connection broke")


def test_a_broken_connection_without_an_explanation_is_one_after_a_while(monkeypatch):
    monkeypatch.setattr(Failures, "report_s", 0.1)
    begin = time.monotonic()
    with pytest.raises(PeerError, match="a connection broke"):
        Failures(Word(HashStore()), Team()).lose("a connection broke")
    assert time.monotonic() - begin >= 0.1


def test_a_store_that_is_gone_is_not_waited_for():
    word = Word(GoneStore())
    word.leave("PeerError\nrank 1 ended")
    assert word.lost
    begin = time.monotonic()
    with pytest.raises(PeerError, match="a connection broke"):
        Failures(word, Team()).lose("a connection broke")
    assert time.monotonic() - begin < Failures.report_s / 2


def test_a_store_that_never_answers_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("evenstep.distributed.failures._TELLING_S", 0.05)
    store = StuckStore()
    word = Word(store)
    try:
        word.leave("PeerError\nrank 1 ended")
        assert [word.found() for _ in range(3)] == [None] * 3
        asking = [thread for thread in threading.enumerate() if thread.name == "evenstep-word"]
        assert len(asking) == 2, "one tells, and one asks however often it is wanted"
    finally:
        store.over.set()
        for thread in threading.enumerate():
            if thread.name == "evenstep-word":
                thread.join()
