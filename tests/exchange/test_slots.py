"""Slots of a segment: what each wait ends with, and what it says. Deaths of real processes are in `test_group.py`."""

import os
import time

import pytest
import torch

from evenstep.core.errors import ConfigError, MismatchError, PeerError, SilenceError
from evenstep.exchange.board import Board
from evenstep.exchange.slots import Slots
from evenstep.native import core

ONE = 1 << 32


def post(slots, seq, tag):
    data = torch.zeros(1)
    slots.post(seq, tag, data.data_ptr(), data.nbytes, [0, 1])


def collect(slots, worker, seq, tag, timeout_s=0.1):
    out = torch.empty(1)
    slots.collect(worker, seq, tag, out.data_ptr(), out.nbytes, time.monotonic() + timeout_s)


def test_a_mismatch_names_both_sides_and_what_they_bring(new_segment):
    segment = new_segment(2)
    mine, theirs = Slots(segment, 0, 1.0), Slots(segment, 1, 1.0)
    post(theirs, ONE, "layer 2")
    with pytest.raises(MismatchError) as caught:
        collect(mine, 1, ONE, "layer 1")
    assert "worker 0 is at 'layer 1' with 4 bytes but worker 1 is at 'layer 2' with 4 bytes" in str(caught.value)


def test_without_a_supervisor_silence_is_an_error_of_the_one_who_waits(new_segment):
    segment = new_segment(2)
    mine, theirs = Slots(segment, 0, 0.1), Slots(segment, 1, 0.1)
    post(theirs, ONE, "step 3")
    with pytest.raises(SilenceError) as caught:
        collect(mine, 1, 2 * ONE, "step 4")
    text = str(caught.value)
    assert f"worker 1 (pid {os.getpid()}) said nothing for 0.1 s: worker 0 waits for it at 'step 4'" in text
    assert "its last exchange was 'step 3'" in text
    assert core.aborted(segment.base) is None


def test_with_a_supervisor_silence_is_reported_and_everyone_stops_waiting(new_segment):
    segment = new_segment(2)
    told = []
    mine = Slots(segment, 0, 0.1, told.append)
    with pytest.raises(PeerError):
        collect(mine, 1, ONE, "step 4")
    assert [event["silent"] for event in told] == [1]
    assert "worker 1 (which has not joined yet) said nothing" in told[0]["text"]
    assert core.aborted(segment.base)[0] == 1


def test_a_peer_whose_process_has_ended_is_gone(new_segment):
    segment = new_segment(2)
    mine = Slots(segment, 0, 30.0)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    core.set_pid(segment.base, 1, pid)
    os.waitpid(pid, 0)
    with pytest.raises(PeerError, match=f"worker 1 .pid {pid}. ended while worker 0 waited for it"):
        collect(mine, 1, ONE, "step 4", timeout_s=30.0)


def test_whoever_waits_says_so_on_the_board_and_counts_the_time(new_segment):
    segment = new_segment(2)
    mine, board, seen = Slots(segment, 0, 0.2), Board(segment), []
    mine._check_alive = lambda worker: seen.append(board.doing(0).waiting)
    begin = time.monotonic()
    with pytest.raises(SilenceError):
        collect(mine, 1, ONE, "a")
    assert 0.1 <= mine.waited_s <= time.monotonic() - begin
    assert set(seen) == {True}
    assert not board.doing(0).waiting


def test_a_worker_that_has_failed_is_met_by_nobody_any_more(new_segment):
    segment = new_segment(2)
    mine = Slots(segment, 0, 1.0)
    mine.fail("a bad day")
    with pytest.raises(PeerError, match="a bad day"):
        post(mine, ONE, "a")
    with pytest.raises(PeerError, match="a bad day"):
        mine.leave()
    data = torch.zeros(1)
    mine.post(ONE, "alone", data.data_ptr(), data.nbytes, [0])  # which harms nobody


def test_a_forked_copy_is_told_so_and_harms_nobody(new_segment):
    segment = new_segment(2)
    mine = Slots(segment, 0, 1.0)
    pid = os.fork()
    if pid == 0:
        try:
            mine.fail("of a copy")
            with pytest.raises(ConfigError, match="is a forked copy of worker 0"):
                mine.check_process()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert core.aborted(segment.base) is None


def test_of_a_very_long_failure_the_end_is_kept(new_segment):
    segment = new_segment(2)
    Slots(segment, 0, 1.0).fail("Traceback:\n" + "  é line\n" * 50_000 + "RuntimeError: this is the cause")
    _, text = core.aborted(segment.base)
    assert text.startswith("Traceback:")
    assert text.endswith("RuntimeError: this is the cause")
