from evenstep.transport.silence import Silence


def looks(silence, begin, end):
    """Look as often as a bridge does; who was lost at the end."""
    lost = []
    for hundredth in range(int(begin * 100), int(end * 100) + 1, 5):
        lost = silence.lost(hundredth / 100)
    return lost


def test_a_machine_that_says_nothing_is_lost_after_the_bound_and_not_before():
    silence = Silence([1, 2], 2.0, now=0.0)
    assert looks(silence, 0.0, 1.0) == []
    silence.heard(2, 1.0)
    assert looks(silence, 1.0, 2.0) == []
    assert looks(silence, 2.0, 2.1) == [1]
    assert looks(silence, 2.1, 3.1) == [1, 2]


def test_a_beat_is_due_only_where_nothing_else_was_said():
    silence = Silence([1, 2], 2.0, now=0.0)
    assert silence.due(0.39) == []
    silence.said(1, 0.39)
    assert silence.due(0.4) == [2]
    silence.said(2, 0.4)
    assert silence.due(0.78) == []
    assert silence.due(0.79) == [1]


def test_who_was_stopped_itself_blames_nobody():
    silence = Silence([1], 2.0, now=0.0)
    assert looks(silence, 0.0, 1.0) == []
    assert silence.lost(60.0) == []
    assert looks(silence, 60.0, 62.0) == []
    assert looks(silence, 62.0, 62.1) == [1]
