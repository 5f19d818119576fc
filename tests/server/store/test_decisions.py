"""What made which version is remembered for servers that follow, as far back as anything can be in flight."""

from evenstep.server.store import decisions
from evenstep.server.store.decisions import Decisions


def test_a_follower_is_told_what_it_missed_in_order():
    found = Decisions()
    found.add(0, {"a": 1}, {"a": "life 1"})
    found.add(1, {"a": 2, "b": 1}, {"a": "life 1"})
    found.add(2, {}, {})  # changed by nobody's update: nothing to follow
    found.add(3, {"b": 2}, {})
    assert found.since(-1) == [(0, {"a": (1, "life 1")}), *found.since(0)]
    assert found.since(0) == [(1, {"a": (2, "life 1"), "b": (1, "")}), (3, {"b": (2, "")})]
    assert found.since(3) == []


def test_an_update_is_known_by_worker_and_number():
    found = Decisions()
    found.add(4, {"a": 2, "b": 7}, {})
    assert found.made_by("b", 7) == 4
    assert found.made_by("b", 2) is None
    assert found.made_by("c", 7) is None


def test_what_was_decided_before_a_restart_comes_back_and_can_be_forgotten():
    before = Decisions()
    before.add(4, {"a": 2}, {"a": "x"})
    after = Decisions()
    after.extend(before.since(-1))
    assert after.made_by("a", 2) == 4
    after.forget()
    assert after.since(-1) == []


def test_only_the_last_decisions_are_remembered():
    found = Decisions()
    for version in range(decisions._REMEMBERED + 5):
        found.add(version, {"a": version}, {})
    assert found.since(-1)[0][0] == 5
