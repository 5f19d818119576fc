"""Who computed wrong, judged from what several workers computed for the same shards. Pure.

A computation of a shard leaves a *trail*: digests of what it offered to others and of its results, in *stages*. Up to
the first stage that differs anywhere, everybody had the same inputs, so the error began with the workers that differ
there; later differences may be consequences. A *pass* is one computation of all shards, each by some worker.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["NUM_PASSES", "Account", "Difference", "Pass", "Trail", "Verdict", "judge", "turn_of"]

Trail = tuple[tuple[tuple[str, int], ...], ...]
"""Stages made of items: the name of a tensor and its digest."""


@dataclass(frozen=True)
class Account:
    """One computation of a shard.

    Attributes:
        worker: The worker that computed it.
        trail: Its digests.
    """

    worker: int
    trail: Trail


Pass = Mapping[int, Account]
"""The computations of one pass, by shard."""


@dataclass(frozen=True)
class Difference:
    """A computation that differs from another of the same shard.

    Attributes:
        worker: Whose it is.
        shard: Which shard.
        number: In which pass.
        other: The pass in which it was computed differently: rightly, if that is known.
        item: The name of the first tensor that differs.
    """

    worker: int
    shard: int
    number: int
    other: int
    item: str


@dataclass(frozen=True)
class Verdict:
    """The conclusion from some passes.

    Attributes:
        differences: Those at the first stage that differs, in the order of shards and passes; empty: all agree.
        wrong: The workers that computed wrong, if that can be told.
        unsteady: Whether too many workers differ to be all broken: the code is not deterministic.
    """

    differences: tuple[Difference, ...] = ()
    wrong: tuple[int, ...] = ()
    unsteady: bool = False


_TURNS = (1, 0, 2, 1, 0)
NUM_PASSES = len(_TURNS)
"""Two, and if they differ three more: another opinion on every shard, and two repetitions by the same workers."""


def turn_of(number: int, num_workers: int) -> int:
    """By how many workers a pass shifts every shard from the worker that has it.

    The first pass computes every shard on another worker than the second, which is the one that counts, and the third
    on yet another if there are enough workers. In the rest the same workers repeat their work: a broken worker may err
    once or always, but if several contradict themselves, the code is not deterministic.
    """
    return _TURNS[number] % num_workers


def judge(passes: Sequence[Pass]) -> Verdict:
    """Compare passes of one step, in the order in which they were computed.

    A result is right if more workers had it than any other, at least two; or if those that had it repeat it and all
    others contradict themselves. With one worker, it is right if it is the most frequent.
    """
    stage = _first_stage(passes)
    if stage is None:
        return Verdict()
    differences: list[Difference] = []
    off: set[tuple[int, int]] = set()  # which worker, in which pass
    workers: set[int] = set()
    settled, unsteady = True, False
    for shard in passes[0]:
        votes = [(each[shard].worker, _at(each[shard].trail, stage)) for each in passes]
        workers |= {worker for worker, _ in votes}
        if len({value for _, value in votes}) == 1:
            continue
        right, contradicting = _right(votes), _contradicting(votes)
        settled, unsteady = settled and right is not None, unsteady or bool(contradicting)
        for number, (worker, value) in enumerate(votes):
            if value != right:
                wanted = right if right is not None else next(v for _, v in votes if v != value)
                other = next(n for n, (_, v) in enumerate(votes) if v == wanted)
                differences.append(Difference(worker, shard, number, other, _first_item(value, wanted)))
                if right is not None or worker in contradicting:
                    off.add((worker, number))
    times = Counter(worker for worker, _ in off)
    often = sum(number > 1 for number in times.values())
    if unsteady and (often > 1 or len(times) > 2 or (often and len(workers) == 1)):
        return Verdict(tuple(differences), unsteady=True)
    few = len(times) == 1 or 2 * len(times) < len(workers) or not often
    return Verdict(tuple(differences), tuple(sorted(times)) if settled and few else ())


Stage = tuple[tuple[str, int], ...]
Vote = tuple[int, Stage]


def _right(votes: Sequence[Vote]) -> Stage | None:
    """The result that counts, if one does."""
    times = Counter(value for _, value in votes)
    backers = {value: {worker for worker, theirs in votes if theirs == value} for value in times}
    alone = len({worker for worker, _ in votes}) == 1
    weight = times if alone else {value: len(theirs) for value, theirs in backers.items()}
    first, second = sorted(weight.values(), reverse=True)[:2]
    if first > max(second, 1):
        return max(weight, key=lambda value: weight[value])
    unsteady = _contradicting(votes)
    firm = {value for worker, value in votes if worker not in unsteady}
    if unsteady and len(firm) == 1 and all(times[value] > 1 for value in firm):
        return firm.pop()
    return None


def _contradicting(votes: Sequence[Vote]) -> set[int]:
    """The workers that gave different results."""
    return {worker for worker, _ in votes if len({value for who, value in votes if who == worker}) > 1}


def _first_stage(passes: Sequence[Pass]) -> int | None:
    most = max((len(account.trail) for each in passes for account in each.values()), default=0)
    for stage in range(most):
        if any(len({_at(each[shard].trail, stage) for each in passes}) > 1 for shard in passes[0]):
            return stage
    return None


def _at(trail: Trail, stage: int) -> Stage:
    return trail[stage] if stage < len(trail) else ()


def _first_item(one: Stage, other: Stage) -> str:
    """The name of the first item that differs, or that only one of the two has."""
    for here, there in zip_longest(one, other):
        if here != there:
            return str((here or there)[0])
    raise AssertionError("the two stages differ in some item")
