"""The protocol keeps its promises in every order of events; and without any one of its rules it would not."""

from dataclasses import fields
from functools import cache

import pytest
from protocol import NEEDED, SIZES, Rules, Size, check


@cache
def with_all_rules(size):
    return check(size)


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_order_of_events_ends_with_all_operations_done_once(size):
    outcome = with_all_rules(size)
    print(f"{outcome.states} states in {outcome.seconds:.1f} s")
    assert outcome.violation is None, f"\n{outcome}"
    assert outcome.terminals > 0


@pytest.mark.long
@pytest.mark.parametrize("rule", NEEDED)
def test_without_any_one_rule_something_goes_wrong(rule):
    outcome = check(NEEDED[rule], Rules(**{rule: False}))
    print(outcome)
    assert outcome.violation is not None
    assert with_all_rules(NEEDED[rule]).violation is None, "it is the rule that makes the difference"
    for kind, said in EXPECTED.items():
        if rule in kind:
            assert said in outcome.violation


EXPECTED = {
    ("backup_first", "marks_compared", "takes_from_journal"): "cannot be had back",
    ("update_round", "rollback_later"): "is committed with images",
    ("first_commits",): "once more",
    ("entry_first",): "gave () to one worker",
    ("committed_round",): "computes operation 1",
    ("result_round", "recovered_round"): "recovered, but the images are",
    ("asked_by_all", "loss_aborts", "form_at_end"): "nothing can happen any more",
    ("all_wait", "ended_first"): "writes outside the present generation",
    ("ended_before_scaled",): "two processes take one place",
    ("pulls_at_end",): "closes with private copies",
}


@pytest.mark.long
def test_each_rule_is_needed_but_the_one_that_only_saves_work():
    assert {rule.name for rule in fields(Rules)} - set(NEEDED) == {"posts_stay"}
    assert set(NEEDED) == {rule for kind in EXPECTED for rule in kind}
    outcome = check(Size(3, 2, 1), Rules(posts_stay=False))
    assert outcome.violation is None, f"\n{outcome}"


@pytest.mark.long
def test_orders_that_nobody_can_see_make_no_difference():
    size = Size(2, 2, 2)
    fewer, all_ = check(size), check(size, all_orders=True)
    assert fewer.states < all_.states
    assert (fewer.violation, fewer.terminals) == (all_.violation, all_.terminals) == (None, all_.terminals)
