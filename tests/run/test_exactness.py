"""The promise: the same fingerprint, and the same numbers, on every number of workers."""

import pytest
from cases import CASES, OPTIMIZERS, Seen, with_optimizer

import evenstep
from workers import run_workers


def result(function, shards=8, **options) -> tuple[str, Seen]:
    with evenstep.Run(shards=shards, seed=3, quiet=True, **options) as run:
        seen = function(run)
        return run.fingerprint(), seen


def assert_same_on(counts, function, shards=8, **options) -> None:
    alone = result(function, shards, **options)
    assert all(number == number for number in alone[1]), "a loss is not a number"
    for count in counts:
        for worker, found in enumerate(run_workers(count, lambda _: result(function, shards, **options))):
            assert found == alone, f"worker {worker} of {count}"


def test_every_number_of_workers_ends_on_the_same_bits():
    assert_same_on(range(1, 9), CASES["convolutions_with_batch_norm_and_dropout"])


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_model_ends_on_the_same_bits(name):
    assert_same_on((2, 3), CASES[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_ends_on_the_same_bits(name):
    assert_same_on((3,), lambda run: with_optimizer(run, name))


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 6, 7, 12])
def test_every_number_of_shards_ends_on_the_same_bits(shards):
    counts = sorted({1, shards // 2 or 1, shards})
    assert_same_on(counts, CASES["convolutions_with_batch_norm_and_dropout"], shards)


def test_repeated_runs_end_on_the_same_bits():
    function = CASES["randomness_of_every_kind"]
    assert result(function) == result(function)


def test_another_seed_or_number_of_shards_is_another_computation():
    function = CASES["convolutions_with_batch_norm_and_dropout"]
    with evenstep.Run(shards=8, seed=4, quiet=True) as run:
        function(run)
        other = run.fingerprint()
    assert len({result(function)[0], other, result(function, shards=4)[0]}) == 3
