"""The words that everyone may read: what a worker does, what the supervisor asks for."""

import time

from evenstep.exchange.board import Asks, Board, Doing


def test_a_worker_that_has_not_begun_does_nothing(new_segment):
    board = Board(new_segment(3))
    assert board.doing(1) == Doing(None, 0, None, waiting=False)


def test_what_a_worker_does_is_seen_by_all_and_ends(new_segment):
    board = Board(new_segment(3))
    board.begin(1, 7)
    board.computes(1, 0)
    board.waits(1, True)
    time.sleep(0.01)
    doing = board.doing(1)
    assert 0.01 <= doing.busy_s < 5.0
    assert (doing.step, doing.shard, doing.waiting) == (7, 0, True)
    board.waits(1, False)
    board.end(1)
    assert board.doing(1) == Doing(None, 7, None, waiting=False)
    assert board.doing(0) == board.doing(2) == Doing(None, 0, None, waiting=False)


def test_who_takes_a_place_begins_anew(new_segment):
    board = Board(new_segment(3))
    board.begin(2, 7)
    board.clear(2)
    assert board.doing(2) == Doing(None, 0, None, waiting=False)


def test_what_is_asked_for_and_what_is_committed_have_words_of_their_own(new_segment):
    board = Board(new_segment(3))
    board.committed = 12
    board.ask(Asks.STOP, 1)
    board.ask(Asks.REGROUP, 4)
    assert board.asked() == (4, 0, 1)
    assert board.committed == 12
