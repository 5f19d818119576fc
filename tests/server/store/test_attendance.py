"""Waits end with what is waited for, or when it is no use: a lease, a stop, a store that cannot go on."""

import threading

import pytest

from evenstep.core.errors import RefusedError, ServerError
from evenstep.server.store import attendance as module
from evenstep.server.store.attendance import Attendance


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def attendance(clock):
    return Attendance(10.0, clock, lambda: 7)


def test_who_comes_and_goes_is_told_and_noticed(attendance, clock):
    gone = []
    attendance.on_gone = lambda: gone.append(dict(attendance.departed))
    with attendance.changed:
        attendance.register("a")
        attendance.register("a")
        attendance.register("b")
        clock.now = 105.0
        attendance.see("b")
        attendance.leave("a")
        attendance.leave("a")
        clock.now = 116.0
        attendance.expire()
        with pytest.raises(RefusedError, match="worker 'b' is not registered"):
            attendance.see("b")
    assert [text for _, text in attendance.events] == [
        "worker 'a' registered",
        "worker 'b' registered",
        "worker 'a' left",
        "worker 'b' was dropped: no sign of life for 10 s",
    ]
    assert gone == [{"a": (105.0, "left")}, {"a": (105.0, "left"), "b": (105.0, "dropped")}]
    assert attendance.num_dropped == 1


def test_one_that_comes_back_has_not_departed(attendance):
    with attendance.changed:
        attendance.register("a")
        attendance.leave("a")
        attendance.register("a")
    assert attendance.departed == {}


def test_only_the_last_that_departed_are_remembered(attendance, monkeypatch):
    monkeypatch.setattr(module, "_DEPARTED", 2)
    with attendance.changed:
        for name in "abc":
            attendance.register(name)
            attendance.leave(name)
    assert list(attendance.departed) == ["b", "c"]


def test_a_wait_ends_with_its_condition_or_its_time(attendance):
    with attendance.changed:
        assert attendance.wait(lambda: True, 0.0)
        assert not attendance.wait(lambda: False, 0.01)


def test_a_worker_that_waits_keeps_its_lease(attendance, clock):
    def look():
        clock.now += 50.0
        attendance.expire()
        return True

    with attendance.changed:
        attendance.register("a")
        assert attendance.wait(look, 5.0, worker="a")
        attendance.expire()
        attendance.see("a")
        clock.now += 11.0
        attendance.expire()
        with pytest.raises(RefusedError, match="worker 'a' is not registered"):
            attendance.see("a")


@pytest.mark.parametrize("how", ["hurry", "fail"])
def test_another_thread_can_end_all_waits(attendance, how):
    found = []

    def wait():
        try:
            with attendance.changed:
                found.append(attendance.wait(lambda: False, 30.0))
        except ServerError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    getattr(attendance, how)(True if how == "hurry" else "the disk is gone")
    thread.join(20.0)
    assert found == [False if how == "hurry" else "the server cannot continue: the disk is gone"]
