"""What a layer finds around itself, by thread."""

import contextlib
import threading

from evenstep.exchange.surroundings import current, inside


def test_there_is_nothing_around_a_layer_by_default():
    assert current() is None


def test_surroundings_nest_and_end_however_they_end():
    outer, inner = object(), object()
    with inside(outer):
        with contextlib.suppress(ValueError), inside(inner):
            assert current() is inner
            raise ValueError
        assert current() is outer
        with inside(None):
            assert current() is None
    assert current() is None


def test_each_thread_has_its_own():
    seen = []
    with inside(object()):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]
