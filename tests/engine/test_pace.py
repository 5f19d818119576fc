"""Who counts as slow, and where the shards go then."""

import random

from evenstep.engine.pace import Pace
from evenstep.plan.placement import cut

STEPS = 8  # that are looked at before anything moves


def after(pace, seconds_of, spans):
    """What is decided after each of some steps."""
    return [pace.observe(seconds_of(step), spans) for step in range(STEPS)]


def test_a_worker_that_is_always_slow_loses_shards_and_gets_them_back():
    spans = cut(8, 2)
    pace = Pace(2)
    *before, moved = after(pace, lambda _: [0.4, 0.1], spans)
    assert before == [None] * (STEPS - 1)
    assert moved == [(0, 2), (2, 8)]
    assert after(pace, lambda _: [0.2, 0.15], moved)[-1] is None, "it is as slow as it was, and has what it can do"
    assert after(pace, lambda _: [0.05, 0.15], moved)[-1] == spans


def test_workers_that_wait_for_a_core_now_and_then_keep_their_shards():
    dice = random.Random(1)
    spans = cut(8, 3)

    def seconds(_):  # each is held up in a third of its steps, and hardly ever in all eight
        return [dice.choice((1.0, 1.0, 2.5)) * (end - first) * 0.01 for first, end in spans]

    assert [after(Pace(3), seconds, spans)[-1] for _ in range(200)] == [None] * 200


def test_what_is_not_worth_it_is_left_alone():
    assert after(Pace(2), lambda _: [0.002, 0.001], cut(8, 2)) == [None] * STEPS


def test_one_worker_has_nobody_to_compare_with():
    assert after(Pace(1), lambda _: [1.0], cut(8, 1)) == [None] * STEPS
