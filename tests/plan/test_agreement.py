"""Which copy is right: the ones that are what they were, or else most of all."""

import pytest

from evenstep.plan.agreement import right_copy


@pytest.mark.parametrize(
    ("copies", "sound", "right"),
    [
        ("aaa", [1, 1, 1], "a"),
        ("aab", [1, 1, 1], "a"),
        ("ab", [1, 0], "a"),
        ("ba", [0, 1], "a"),
        ("abb", [1, 0, 0], "a"),
        ("ab", [1, 1], None),
        ("abc", [1, 1, 1], None),
        ("aabb", [1, 1, 1, 1], None),
        ("aabb", [1, 1, 1, 0], None),
        ("aabb", [1, 1, 0, 0], "a"),
        ("ab", [0, 0], None),
        ("aab", [0, 0, 0], None),
    ],
)
def test_it_is_that_of_those_that_stayed_or_of_most(copies, sound, right):
    assert right_copy(copies, [bool(each) for each in sound]) == right
