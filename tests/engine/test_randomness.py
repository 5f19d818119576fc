"""What a shard draws is a function of its seed alone, whoever draws in between."""

import random

import numpy as np
import pytest
import torch

from evenstep.engine.randomness import Stream, derive, preserved, seed_all


@pytest.fixture(autouse=True)
def process_generators():
    """Leave the generators of the process as they were, by other means than the code under test."""
    states = torch.get_rng_state(), np.random.get_bit_generator(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_bit_generator(states[1])
    np.random.set_state(states[2])
    random.setstate(states[3])


def draw():
    return torch.rand(1).item(), np.random.rand(), random.random()


def draws(seed, count):
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    return [draw() for _ in range(count)]


def test_seeds_are_those_that_every_fingerprint_rests_on():
    assert derive("step", 0, 0, 0) == 7431023853122733786
    assert derive("sample", 3, 1, 4159) == 4396154714436896874


def test_seeds_of_different_purposes_and_numbers_differ():
    seeds = {derive(purpose, a, b) for purpose in ("step", "sample") for a in range(20) for b in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeding_seeds_all_three_as_their_own_functions_do():
    expected = draws(11, 3)
    seed_all(11)
    assert [draw() for _ in range(3)] == expected


def test_streams_that_interrupt_each_other_draw_what_they_would_draw_alone():
    expected = {seed: draws(seed, 4) for seed in (1, 2**40 + 5, 3)}
    streams = {seed: Stream() for seed in expected}
    found = {seed: [] for seed in expected}
    for seed, stream in streams.items():
        stream.reseed(seed)
    with preserved():
        for seed in [1, 2**40 + 5, 1, 3, 3, 2**40 + 5, 1, 2**40 + 5, 3, 1, 3, 2**40 + 5]:
            streams[seed].resume()
            found[seed].append(draw())
            streams[seed].pause()
    assert found == expected


def test_a_stream_begins_anew_when_it_is_reseeded():
    stream = Stream()
    with preserved():
        for _ in range(2):
            stream.reseed(9)
            stream.resume()
            assert draw() == draws(9, 1)[0]
            stream.pause()


def test_what_happens_inside_leaves_the_generators_of_the_caller_alone():
    def fail():
        seed_all(77)
        draw()
        raise LookupError

    expected = draws(5, 4)
    draws(5, 2)
    mine = np.random.get_bit_generator()
    with pytest.raises(LookupError), preserved():
        fail()
    assert np.random.get_bit_generator() is mine
    assert [draw() for _ in range(2)] == expected[2:]


def test_the_normal_number_that_numpy_has_drawn_ahead_belongs_to_its_stream():
    np.random.seed(7)
    alone = np.random.randn(6).tolist()
    inner = Stream()
    np.random.seed(7)
    found = []
    for _ in alone:
        found.append(np.random.randn())
        with preserved():
            inner.reseed(5)
            inner.resume()
            first = np.random.randn()
            inner.pause()
            seed_all(1)
            np.random.randn()
            inner.resume()
            second = np.random.randn()
    assert found == alone, "what is drawn inside changes nothing outside"
    assert [first, second] == np.random.RandomState(5).randn(2).tolist(), "nor what other streams draw"


def test_a_step_that_is_not_computed_here_leaves_the_script_the_same_numbers():
    def script(*, computes):
        np.random.seed(3)
        found = []
        for _ in range(5):
            found.append(np.random.randn())
            if computes:
                with preserved():
                    seed_all(1)
        return found

    assert script(computes=True) == script(computes=False)
