"""Announcing generations: the last one is what counts, whoever reads when."""

from evenstep.exchange import generations
from evenstep.exchange.generations import Generation
from evenstep.native import core

NOW = 1


def test_before_the_first_there_is_none(new_segment):
    segment = new_segment(256)
    assert generations.latest(segment) == 0
    assert generations.wait(segment, 0, NOW) is None


def test_a_generation_is_read_as_it_was_announced(new_segment):
    segment = new_segment(256)
    said = Generation(3, 17, list(range(256)), [0.5] * 256, [7, 8])
    generations.announce(segment, said)
    assert generations.latest(segment) == 3
    assert generations.wait(segment, 2, NOW) == said
    assert generations.wait(segment, 3, NOW) is None


def test_of_several_that_were_missed_the_last_is_read(new_segment):
    segment = new_segment(256)
    for number in (1, 2, 3):
        generations.announce(segment, Generation(number, number, [number], None))
    assert generations.wait(segment, 0, NOW).members == [3]


def test_a_generation_begins_without_the_failure_of_the_one_before(new_segment):
    segment = new_segment(256)
    core.abort_all(segment.base, 0, 1, "a bad day")
    generations.announce(segment, Generation(1, 0, [0], None))
    assert core.aborted(segment.base) is None
