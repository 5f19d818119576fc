"""Which machine has which place: newcomers get free ones; a place whose machine is gone goes where there is room."""

from evenstep.launch.places import RunPlaces


def test_the_head_has_the_first_places_and_newcomers_the_next():
    places = RunPlaces(2, 0)
    assert places.on(0) == [0, 1]
    found = places.free(3)
    places.give(1, found)
    assert found == places.on(1) == [2, 3, 4]
    assert places.free(1) == [5]
    assert (places.known_machine_of(4), places.known_machine_of(5)) == (1, None)


def test_a_new_place_goes_to_the_first_machine_with_room_or_else_to_the_head():
    places = RunPlaces(1, 0)
    places.give(1, places.free(1))
    assert places.machine_of(2, {0: 1, 1: 2}) == 1
    assert places.machine_of(3, {0: 1, 1: 2}) == 0, "nobody has room"
    assert places.machine_of(2, {0: 1, 1: 2}) == 1, "and it stays there"


def test_the_places_of_a_lost_machine_are_free_but_the_first_ones_stay_the_heads():
    places = RunPlaces(2, 0)
    places.give(1, places.free(2))
    assert places.machine_of(0, {1: 9}) == 1, "the head may be left out"
    assert places.take(1) == [0, 2, 3]
    assert places.free(9)[:2] == [2, 3]
    assert places.machine_of(2, {0: 5}) == 0
