"""Means are over samples, and only who is asked to shows anything."""

from evenstep.run.meter import Meter
from evenstep.run.progress import Progress


class Shown:
    def __init__(self):
        self.seen, self.closed = [], 0

    def show(self, progress):
        self.seen.append(progress)

    def close(self):
        self.closed += 1


def test_means_are_over_the_samples_of_the_epoch():
    meter = Meter(lambda: True)
    meter.add(3, 1.0, {"a": 2.0})
    meter.add(1, 5.0, {"a": 6.0})
    assert (meter.num_samples, meter.means()) == (4, {"loss": 2.0, "a": 3.0})
    meter.begin_epoch()
    assert (meter.num_samples, meter.means()) == (0, {})


def test_what_the_last_step_gave_is_shown_with_its_batch():
    meter = Meter(lambda: True)
    meter.display = shown = Shown()
    meter.show(0, 2, 0, 5)
    meter.add(4, 1.5, {"a": 2.0})
    meter.show(0, 2, 1, 5, 4)
    meter.begin_batch()
    meter.show(0, 2, 2, 5, 4)
    assert shown.seen == [
        Progress(0, 2, 0, 5, 0, None, {}, 0),
        Progress(0, 2, 1, 5, 4, 1.5, {"a": 2.0}, 4),
        Progress(0, 2, 2, 5, 4, None, {}, 4),
    ]
    meter.close()
    assert shown.closed == 1


def test_nothing_is_shown_by_who_shall_not():
    meter = Meter(lambda: False)
    meter.display = shown = Shown()
    meter.show(0, 1, 1, 1, 4)
    assert shown.seen == []
    Meter(lambda: True).show(0, 1, 1, 1)
    Meter(lambda: True).close()
