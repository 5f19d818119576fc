"""Over machines the protocol keeps its promises in every order of events; without any one of its rules it does not."""

from dataclasses import fields

import pytest

from machines import NEEDED, SIZES, Rules, check


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_whichever_machines_are_lost_all_operations_are_done_once(size):
    outcome = check(size)
    print(f"{outcome.states} states in {outcome.seconds:.1f} s")
    assert outcome.violation is None, f"\n{outcome}"
    assert outcome.terminals > 0


@pytest.mark.long
@pytest.mark.parametrize("rule", NEEDED)
def test_without_any_one_rule_something_goes_wrong(rule):
    outcome = check(NEEDED[rule], Rules(**{rule: False}))
    print(outcome)
    assert outcome.violation is not None


def test_each_rule_is_needed():
    assert {rule.name for rule in fields(Rules)} == set(NEEDED)
