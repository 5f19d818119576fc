"""Who computed wrong: faults of every kind, against workers that compute a shard's number as its result."""

import itertools
import random

import pytest

from evenstep.plan.verdict import NUM_PASSES, Account, Verdict, judge, turn_of

SHARDS = 6


def passes_of(num_workers, result, count=NUM_PASSES, shards=SHARDS):
    """What workers give: `result(worker, shard, pass)` is a trail, or one number."""
    found = []
    for number in range(count):
        row = {}
        for shard in range(shards):
            worker = (shard * num_workers // shards - turn_of(number, num_workers)) % num_workers
            given = result(worker, shard, number)
            row[shard] = Account(worker, given if isinstance(given, tuple) else ((("loss", 0), ("weight", given)),))
        found.append(row)
    return found


def conduct(num_workers, result):
    """As a run does it: two passes, and if they differ the others too."""
    passes = passes_of(num_workers, result)
    first = judge(passes[:2])
    return judge(passes) if first.differences else first


@pytest.mark.parametrize("num_workers", range(1, 7))
def test_the_second_computation_is_elsewhere_and_so_is_the_third(num_workers):
    turns = [turn_of(number, num_workers) for number in range(3)]
    assert turns[1] == 0
    assert len(set(turns)) == min(num_workers, 3)


@pytest.mark.parametrize("num_workers", range(1, 7))
def test_healthy_workers_agree(num_workers):
    assert conduct(num_workers, lambda worker, shard, number: shard) == Verdict()


@pytest.mark.parametrize("num_workers", range(2, 7))
@pytest.mark.parametrize("number", range(2))
def test_a_worker_that_is_wrong_once_is_named_with_shard_and_tensor(num_workers, number):
    for culprit in range(num_workers):
        hit = next(k for k, a in passes_of(num_workers, lambda *_: 0)[number].items() if a.worker == culprit)

        def result(worker, shard, at, hit=hit):
            return -1 if (at, shard) == (number, hit) else shard

        verdict = conduct(num_workers, result)
        assert verdict.wrong == (culprit,)
        assert {(d.shard, d.worker, d.number, d.item) for d in verdict.differences} == {
            (hit, culprit, number, "weight")
        }
        assert all(d.other != number for d in verdict.differences)


@pytest.mark.parametrize("num_workers", range(3, 7))
@pytest.mark.parametrize("kind", ["the same each time", "something else each time"])
def test_one_that_is_always_wrong_is_named(num_workers, kind):
    for culprit in range(num_workers):
        fresh = itertools.count(100)

        def result(worker, shard, number, culprit=culprit, fresh=fresh):
            return shard if worker != culprit else -1 if kind == "the same each time" else next(fresh)

        assert conduct(num_workers, result).wrong == (culprit,)


def test_of_two_one_that_contradicts_itself_is_wrong():
    dice = random.Random(0)
    verdict = conduct(2, lambda worker, shard, number: shard if worker else dice.random())
    assert (verdict.wrong, verdict.unsteady) == ((0,), False)


def test_of_two_that_each_stay_with_what_they_have_nobody_can_say():
    verdict = conduct(2, lambda worker, shard, number: (shard, -1)[worker])
    assert (verdict.wrong, verdict.unsteady) == ((), False)
    assert verdict.differences


def test_two_pairs_that_disagree_have_no_majority():
    verdict = conduct(4, lambda worker, shard, number: (shard, -1)[worker % 2])
    assert (verdict.wrong, verdict.unsteady) == ((), False)


@pytest.mark.parametrize("num_workers", range(1, 7))
@pytest.mark.parametrize("values", [2, 3, 1 << 60], ids=["a coin", "three", "a clock"])
def test_code_that_is_not_deterministic_is_told_apart_from_a_broken_machine(num_workers, values):
    for seed in range(20):
        dice = random.Random(seed)
        verdict = conduct(num_workers, lambda *_, dice=dice: dice.randrange(values))
        assert verdict.unsteady, seed
        assert verdict.wrong == ()


def test_one_worker_that_is_wrong_once_can_be_told():
    verdict = conduct(1, lambda worker, shard, number: -1 if (shard, number) == (2, 1) else shard)
    assert (verdict.wrong, verdict.unsteady) == ((0,), False)


def test_two_workers_that_are_each_wrong_once_are_both_named():
    wrong = {(0, 0), (2, 1)}
    verdict = conduct(3, lambda worker, shard, number: -1 if (shard, number) in wrong else shard)
    assert (verdict.wrong, verdict.unsteady) == ((1, 2), False)


@pytest.mark.parametrize("num_workers", range(2, 5))
def test_where_shards_meet_whoever_differs_first_is_wrong_not_whoever_it_misled(num_workers):
    culprit = num_workers - 1
    hit = next(k for k, a in passes_of(num_workers, lambda *_: 0)[0].items() if a.worker == culprit)

    def result(worker, shard, number):
        offered = -1 if (number, shard) == (0, hit) else shard
        misled = 100 if number == 0 else 0
        return ((("samples", shard),), (("statistics", offered),), (("weight", shard + misled),))

    verdict = conduct(num_workers, result)
    assert verdict.wrong == (culprit,)
    assert {d.item for d in verdict.differences} == {"statistics"}
    assert {d.shard for d in verdict.differences} == {hit}


def test_what_one_computation_has_and_another_lacks_is_a_difference():
    def result(worker, shard, number):
        return ((("loss", 1),) if worker == 1 else (("loss", 1), ("weight", 2)),)

    verdict = conduct(3, result)
    assert verdict.wrong == (1,)
    assert {d.item for d in verdict.differences} == {"weight"}
