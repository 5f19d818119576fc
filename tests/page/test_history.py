"""Curves keep their first and last point, however many steps there are."""

from itertools import pairwise

from evenstep.exchange.journal import Entry, Journal
from evenstep.page import history as history_module
from evenstep.page.history import History


def commit(journal, steps, first=0):
    for number in range(first, first + steps):
        value = [1.0 / (1 + number), {"hits": 0.5}, None, [], [], False]
        aside = {"samples": 8, "logged": {"lr": 0.1} if number % 2 else {}}
        journal.append(Entry(f"step {number}", value, aside=aside))


def test_all_steps_are_counted_and_some_hundreds_drawn(new_segment):
    segment = new_segment(1)
    journal, history = Journal(segment), History(segment)
    history.look()
    assert (history.last, history.samples, history.curves()) == (None, 0, {})
    commit(journal, 3)
    history.look()
    assert history.curves()["loss"] == [(1, 1.0), (2, 1 / 2), (3, 1 / 3)]
    assert history.curves()["lr"] == [(2, 0.1)]
    assert history.samples_per_s > 0
    commit(journal, 5000, first=3)
    history.look()
    points = history.curves()["loss"]
    assert 300 <= len(points) <= 600
    assert (points[0], points[-1]) == ((1, 1.0), (5003, 1 / 5003))
    assert all(a[0] < b[0] for a, b in pairwise(points))
    assert (history.last.step, history.samples) == (5003, 8 * 5003)


def test_samples_a_second_are_those_of_lately(new_segment, monkeypatch):
    segment = new_segment(1)
    journal, history, now = Journal(segment), History(segment), [100.0]
    monkeypatch.setattr(history_module, "monotonic", lambda: now[0])
    for seconds, steps, expected in ((0, 3, None), (1, 5, 40.0), (2, 5, 80 / 3), (5000, 5, None), (4, 1, 2.0)):
        now[0] += seconds
        commit(journal, steps, first=journal.committed)
        history.look()
        assert history.samples_per_s == expected


def test_another_run_of_the_script_begins_anew(new_segment):
    segment = new_segment(1)
    journal, history = Journal(segment), History(segment)
    for _ in range(2):
        journal.append(Entry("join", {}))
        commit(journal, 2)
        history.look()
    assert [step for step, _ in history.curves()["loss"]] == [1, 2]
    assert history.samples == 16
