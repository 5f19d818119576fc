"""What all workers do alike: an error of one reaches the others, unless it came from them."""

import pytest

from evenstep.core.errors import ConfigError, Dismissed, EvenstepError, PeerError, Stopped
from evenstep.exchange.journal import Entry
from evenstep.run.operations import RunOperations


def operations_of(holdings_of):
    """Those of the only worker of a run, and what it tells the others."""
    (holdings,) = holdings_of()
    operations, said = RunOperations(holdings.ledger, 0), []
    operations.version = lambda: 7
    holdings.group.fail = said.append
    return operations, said


def test_an_operation_is_done_once_and_counted(holdings_of):
    operations, _ = operations_of(holdings_of)
    assert operations.perform(
        "count", lambda: Entry("count", 3), lambda entry, took_part: (entry.value, took_part)
    ) == (
        3,
        True,
    )
    assert operations._ledger.done == 1


def test_why_a_worker_fails_reaches_the_others_with_the_step(holdings_of):
    operations, said = operations_of(holdings_of)
    with pytest.raises(ZeroDivisionError), operations.alike():
        1 / 0  # noqa: B018  # it is the error that matters
    assert len(said) == 1
    assert said[0].startswith("worker 0 failed at step 7:\n")
    assert "ZeroDivisionError" in said[0]


@pytest.mark.parametrize("make", [lambda: PeerError("it failed", 1), Stopped, Dismissed], ids=["peer", "stop", "leave"])
def test_what_came_from_others_is_not_told_to_them(holdings_of, make):
    operations, said = operations_of(holdings_of)
    with pytest.raises(type(make())), operations.alike():
        raise make()
    assert said == []


def test_a_run_that_is_over_does_nothing(holdings_of):
    operations, _ = operations_of(holdings_of)
    operations.closed = True
    with pytest.raises(ConfigError, match="this run is closed"):
        operations.perform("count", lambda: Entry("count"), lambda entry, _: entry)


@pytest.mark.parametrize("elastic", [False, True])
def test_a_script_that_catches_the_error_of_a_step_goes_on_only_where_nobody_does_the_step_again(holdings_of, elastic):
    operations, _ = operations_of(holdings_of)
    operations._ledger.group.elastic = elastic
    with pytest.raises(ZeroDivisionError), operations.step():
        1 / 0  # noqa: B018  # it is the error that matters
    operations._ledger.group.elastic = False
    if elastic:
        with pytest.raises(
            EvenstepError, match=r"caught an error of step 7 \(ZeroDivisionError.*inside the step function"
        ):
            operations.perform("count", lambda: Entry("count"), lambda entry, _: entry)
    else:
        operations.perform("count", lambda: Entry("count"), lambda entry, _: entry)


def test_what_another_worker_did_is_nothing_that_the_script_caught(holdings_of):
    operations, _ = operations_of(holdings_of)
    operations._ledger.group.elastic = True
    with pytest.raises(PeerError), operations.step():
        raise PeerError("it failed", 1)
    operations.check_open()
