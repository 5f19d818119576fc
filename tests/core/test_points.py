"""Points do nothing until a test arms them, and nothing again once it is over."""

import pytest

from evenstep.core import points


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    points.arm(None)


def test_points_and_tensors_are_shown_in_order():
    reached, touched = [], []
    points.arm(reached.append, lambda what, tensor: touched.append((what, tensor)))
    points.reach("join")
    points.touch("gradient", 1, 2)
    points.reach("step begins")
    assert reached == ["join", "step begins"]
    assert touched == [("gradient", 1), ("gradient", 2)]


def test_a_test_may_watch_only_one_of_them():
    reached = []
    points.arm(reached.append)
    points.touch("gradient", 1)
    points.arm(None, lambda what, tensor: reached.append(what))
    points.reach("join")
    points.touch("buffer", 1)
    assert reached == ["buffer"]


def test_what_a_handler_raises_is_raised_at_the_point():
    def fail(point):
        raise ValueError(point)

    points.arm(fail)
    with pytest.raises(ValueError, match="inside update"):
        points.reach("inside update")
