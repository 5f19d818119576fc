import pytest

from evenstep.launch.machine import End
from evenstep.launch.seat import Seat


def test_a_seat_tells_how_its_worker_ended_once_it_has():
    seat = Seat(3)
    with pytest.raises(AssertionError):
        _ = seat.ended
    seat.end = End(-9, "worker 3 was killed", None, False, 7)
    assert seat.ended.step == 7
