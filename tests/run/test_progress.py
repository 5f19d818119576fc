"""Progress: a line for each epoch where there is no terminal, one series for several groups, few events on a pipe."""

import io
import json
import os

import pytest

from evenstep.run.progress import Display, Merger, Pipe, Progress


def at(batch, epoch=0, loss=1.0, weight=1, num_batches=2, **metrics):
    return Progress(epoch, 3, batch, num_batches, 10, loss, metrics, weight)


def test_without_a_terminal_an_epoch_is_a_line():
    stream = io.StringIO()
    display = Display(stream)
    display.show(at(1))
    assert stream.getvalue() == ""
    display.show(at(2, loss=0.25, accuracy=0.5))
    display.close()
    line = stream.getvalue()
    assert line.startswith("epoch 1/3  2 steps  loss 0.2500  accuracy 0.5000  ")
    assert line.endswith(" samples/s\n")


def test_a_stream_of_unknown_length_has_no_line():
    stream = io.StringIO()
    Display(stream).show(at(7, num_batches=0))
    assert stream.getvalue() == ""


def test_several_groups_are_one_series_of_weighted_means():
    merger = Merger(2)
    (shown,) = merger.add(0, at(1, loss=1.0, weight=1, a=1.0, b=0.0))
    assert (shown.batch, shown.num_batches) == (1, 3), "somebody has yet to come"
    (shown,) = merger.add(1, at(2, loss=4.0, weight=3, a=2.0))
    assert (shown.batch, shown.num_batches, shown.num_samples) == (3, 4, 10)
    assert shown.loss == pytest.approx(3.25)
    assert shown.metrics == {"a": pytest.approx(1.75)}, "only what all of them have"


def test_an_epoch_is_shown_until_all_groups_have_it_behind_them():
    merger = Merger(2)
    assert [p.epoch for p in merger.add(0, at(2))] == [0]
    assert [p.epoch for p in merger.add(0, at(1, epoch=1))] == [0]
    assert [p.epoch for p in merger.add(1, at(2))] == [0, 1]


def test_data_that_is_gone_through_again_is_a_series_of_its_own():
    merger = Merger(1)
    assert [p.batch for p in merger.add(0, at(2))] == [2]
    (shown,) = merger.add(0, at(1))
    assert (shown.epoch, shown.batch) == (0, 1)


def test_a_pipe_holds_back_what_comes_too_fast_but_loses_no_sample():
    reading, writing = os.pipe()
    try:
        pipe = Pipe(writing)
        for batch in (1, 2, 3, 4):
            pipe.show(at(batch, num_batches=4))
        pipe.close()
        events = [json.loads(line)["progress"] for line in os.read(reading, 1 << 16).splitlines()]
    finally:
        os.close(reading)
        os.close(writing)
    assert len(events) < 4
    assert events[-1]["batch"] == 4
    assert sum(event["num_samples"] for event in events) == 40
