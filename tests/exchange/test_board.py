"""The words that everyone may read: what a worker does, what the supervisor asks for."""

import time

from evenstep.exchange.board import Asks, Board, Doing, Spent


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


def test_where_time_goes_adds_up_and_shards_are_seen_by_all(new_segment):
    board = Board(new_segment(3))
    board.has(1, range(3, 200))
    for _ in range(2):
        board.spend(1, Spent(0.5, 0.25, 0.125, 1.0))
    assert board.spent(1) == Spent(1.0, 0.5, 0.25, 2.0)
    assert (board.shards(1), board.shards(2)) == (range(3, 200), range(0))
    board.clear(1)
    assert (board.spent(1), board.shards(1)) == (Spent(0, 0, 0, 0), range(0))


def test_a_fingerprint_is_asked_for_by_counting(new_segment):
    board = Board(new_segment(1))
    board.committed = 5
    board.ask_fingerprint()
    board.ask_fingerprint()
    assert (board.fingerprints_asked, board.committed, board.asked()) == (2, 5, (0, 0, 0))
