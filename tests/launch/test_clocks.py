"""Clocks of machines: found from beats, to within half of the quickest way there and back."""

import random

from evenstep.launch import clocks
from evenstep.launch.clocks import Clock


class Time:
    """What the clock of one machine says: true time, and by how much it is ahead."""

    now_ns = 0

    def __init__(self, ahead_ns):
        self.ahead_ns = ahead_ns

    def monotonic_ns(self):
        return Time.now_ns + self.ahead_ns


def test_clocks_that_differ_by_hours_are_aligned_to_half_of_the_quickest_way(monkeypatch):
    draws, ahead_ns = random.Random(3), 5 * 3600 * 10**9
    times, ends = (Time(0), Time(ahead_ns)), (Clock(), Clock())

    def at(end, act):
        monkeypatch.setattr(clocks, "time", times[end])
        return act()

    quickest_ns = 10**12
    for _ in range(40):
        there_ns, back_ns = draws.randrange(100_000, 9_000_000), draws.randrange(100_000, 9_000_000)
        quickest_ns = min(quickest_ns, there_ns + back_ns)
        for sender, way_ns in ((0, there_ns), (1, back_ns)):
            beat = at(sender, ends[sender].beat)
            Time.now_ns += way_ns
            at(1 - sender, lambda beat=beat, sender=sender: ends[1 - sender].heard(beat))
            Time.now_ns += draws.randrange(10**6, 4 * 10**8)
    assert abs(ends[0].ahead_ns - ahead_ns) <= quickest_ns / 2 + 1
    assert abs(ends[1].ahead_ns + ahead_ns) <= 10**7, "and seen from the other end it is behind"


def test_what_is_no_beat_of_ours_says_nothing():
    clock = Clock()
    for beat in (True, None, [], ["x"], [1, 2], [1.5], {"a": 1}):
        clock.heard(beat)
    assert clock.ahead_ns == 0
    assert len(clock.beat()) == 1
