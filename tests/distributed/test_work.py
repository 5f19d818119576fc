"""An operation that another thread completes: everyone who waits learns how it ended, and when."""

import threading
from datetime import timedelta

import pytest
import torch

from evenstep.core.errors import ConfigError, PeerError, SilenceError
from evenstep.distributed.work import DONE, PendingWork


def test_it_is_over_only_when_it_is_completed():
    tensors = [torch.ones(2)]
    work = PendingWork("all_reduce", tensors)
    assert not work.is_completed()
    with pytest.raises(SilenceError, match=r"all_reduce is not over after wait\(timeout=0\.01 s\), and goes on"):
        work.wait(timedelta(seconds=0.01))
    threading.Timer(0.01, work.complete, kwargs={"source": 3}).start()
    assert work.wait()
    assert work.is_success()
    assert work.source_rank() == 3
    assert work.result() is tensors
    assert work.exception() is None


def test_an_error_is_raised_for_everyone_that_waits():
    work = PendingWork("all_reduce", [])
    work.complete(PeerError("rank 1 ended", 1))
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 ended"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(PeerError, match="rank 1 ended"):
        work.get_future().wait()


@pytest.mark.parametrize("early", [True, False])
def test_a_future_holds_the_tensors_whether_it_was_asked_for_before_or_after(early):
    tensors = [torch.ones(2)]
    work = PendingWork("all_reduce", tensors)
    if early:
        future = work.get_future()
        assert not future.done()
    work.complete()
    if not early:
        future = work.get_future()
    assert future.wait() == tensors
    assert work.get_future() is future


@pytest.mark.parametrize("fails", [True, False])
def test_a_job_makes_way_before_its_end_is_known(fails):
    work, order = PendingWork("all_reduce", []), []

    def job():
        order.append("job")
        if fails:
            raise ValueError("in the job")

    work.run(job, lambda: order.append(work.is_completed()))
    assert order == ["job", False]
    assert work.is_success() is not fails


def test_a_forked_copy_does_not_wait_for_a_thread_that_it_lacks(monkeypatch):
    work = PendingWork("all_reduce", [])
    monkeypatch.setattr(work, "_pid", 1)
    with pytest.raises(ConfigError, match=r"is a forked copy of a rank of torch\.distributed"):
        work.wait()
    work.complete()
    assert work.wait(), "what was over before the fork is over in the copy too"


def test_what_was_done_at_once_is_one_object():
    assert DONE.wait()
    assert DONE.is_completed()
    assert DONE.is_success()
