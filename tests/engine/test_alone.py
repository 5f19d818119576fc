"""A shard that is computed by itself says when it wants to meet others, as long as that can still be arranged."""

import pytest

from evenstep.core.errors import UnsupportedError
from evenstep.engine.alone import Alone, Meets

CALLS = [lambda here: here.meet("t", 1, None), lambda here: here.gather("t", None), lambda here: here.call_number("x")]


@pytest.mark.parametrize("call", CALLS)
def test_the_first_shard_asks_to_be_computed_beside_the_others(call):
    here = Alone(2, range(4, 6), before=None)
    assert (here.shard, here.rows, here.alone) == (2, range(4, 6), True)
    with pytest.raises(Meets):
        call(here)


def test_no_except_of_a_script_takes_that_for_an_error():
    assert not issubclass(Meets, Exception)


@pytest.mark.parametrize("call", CALLS)
def test_a_later_shard_is_too_late_and_names_the_one_that_did_something_else(call):
    with pytest.raises(UnsupportedError, match=r"but shard 2 ended without that"):
        call(Alone(3, range(6, 8), before=2))
