from evenstep.launch.breaks import Breaks


def test_the_way_between_two_machines_may_break_twice_then_the_later_one_is_given_up():
    breaks = Breaks(0)
    assert [breaks.note(generation, 1, 2) for generation in (5, 6, 7)] == [None, None, 2]


def test_both_ends_say_so_and_it_counts_once():
    breaks = Breaks(0)
    said = [breaks.note(generation, *way) for generation in (5, 6, 7) for way in ((1, 2), (2, 1))]
    assert said == [None, None, None, None, 2, None]


def test_the_machine_to_which_most_ways_broke_is_the_one():
    breaks = Breaks(0)
    for generation in (1, 2):
        assert breaks.note(generation, 1, 2) is None
        assert breaks.note(generation, 1, 3) is None
    assert breaks.note(3, 3, 1) == 1


def test_the_head_is_never_given_up():
    breaks = Breaks(0)
    assert [breaks.note(generation, 1, 0) for generation in range(3)] == [None, None, 1]
    breaks = Breaks(0)
    assert [breaks.note(generation, 0, 0) for generation in range(3)] == [None, None, None]


def test_a_machine_that_names_nobody_else_is_given_up_itself():
    breaks = Breaks(0)
    assert [breaks.note(generation, 2, 2) for generation in range(3)] == [None, None, 2]


def test_after_a_committed_step_it_is_counted_anew():
    breaks = Breaks(0)
    for generation in range(10):
        assert breaks.note(generation, 1, 2) is None
        breaks.committed()
