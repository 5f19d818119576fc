"""Who may stay connected, decided without a socket."""

from evenstep.server.transports.door import Door


def test_strangers_have_half_of_the_places_and_the_oldest_goes_first():
    door = Door(4, greeting_s=10.0)
    assert [door.enter(who, now) for now, who in enumerate("abcd")] == [None, None, "a", "b"]
    door.admit("c")
    assert door.enter("e", 5) is None
    assert door.enter("f", 6) == "d"


def test_who_was_admitted_never_goes_for_a_stranger():
    door = Door(3, greeting_s=10.0)
    for who in "abc":
        door.enter(who, 0)
        door.admit(who)
    assert door.enter("d", 1) == "d", "all places are taken by those who are known"
    door.leave("b")
    assert door.enter("d", 2) is None
    assert door.enter("e", 3) == "d"


def test_a_stranger_has_so_long_and_no_longer():
    door = Door(8, greeting_s=10.0)
    assert door.next_end_s() is None
    for now, who in enumerate("abc"):
        door.enter(who, now)
    door.admit("b")
    assert door.next_end_s() == 10
    assert door.overdue(9.9) == []
    assert door.overdue(12.0) == ["a", "c"]
    assert door.next_end_s() is None


def test_one_place_is_enough_for_one():
    door = Door(1, greeting_s=1.0)
    assert door.enter("a", 0) is None
    assert door.enter("b", 0) == "a"
    door.admit("b")
    assert door.enter("c", 0) == "c"
    door.admit("a")  # it was sent away meanwhile
    door.leave("b")
    assert door.enter("c", 0) is None
