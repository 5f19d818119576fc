"""Operations done exactly once, in one process: peers are threads, and a supervisor is a list of generations."""

import threading

import pytest
from fakes import FakeMembership, FakeRounds, Table, groups, together

from evenstep.core.errors import Dismissed, MismatchError, PeerError
from evenstep.exchange.board import Asks
from evenstep.exchange.generations import Generation
from evenstep.exchange.group import Group
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation


class Holder:
    """Notes what it is asked to do."""

    def __init__(self):
        self.did = []

    def begin(self, operation):
        self.did.append(("begin", operation))

    def abandon(self):
        self.did.append("abandon")

    def recover(self):
        self.did.append("recover")


def step(number):
    return Operation(f"step {number}", number, is_step=True)


def perform(ledger, operation, value=None, attempt=None):
    def alone():
        ledger.group.barrier(operation.kind)
        return Entry(operation.kind, value)

    return ledger.perform(operation, attempt or alone, lambda entry, took_part: (entry.value, took_part))


def gone_after(table, tag):
    """Let worker 1 be gone as soon as the other one has posted something under a tag."""

    def wait():
        with table.changed:
            table.changed.wait_for(lambda: tag in [found for found, _ in table.posts.values()], 30.0)
            FakeRounds(table, 1).fail("worker 1 is gone")

    threading.Thread(target=wait).start()


@pytest.fixture
def supervised(new_segment):
    """Makes ledgers of workers that a supervisor looks after, who knows these generations from the beginning."""
    table, segments = Table(), [new_segment(4)]

    def make(worker, *generations, before=lambda _: None):
        membership = FakeMembership(*generations, before=before)
        return Ledger(Group(segments[0], FakeRounds(table, worker), membership)), membership

    make.table = table
    yield make
    segments.clear()


def test_an_operation_is_committed_once_and_everyone_has_taken_part(new_segment):
    ledgers = [Ledger(group) for group in groups(new_segment(3), 3)]

    def body(ledger):
        return [perform(ledger, step(n), n * 10) for n in range(3)]

    assert together(ledgers, body) == [[(0, True), (10, True), (20, True)]] * 3
    assert [ledger.done for ledger in ledgers] == [3] * 3
    assert ledgers[0].journal.committed == 3
    assert ledgers[2].journal.read(1) == Entry("step 1", 10)


def test_a_worker_that_comes_late_takes_what_is_in_the_journal_without_doing_it(supervised):
    first, _ = supervised(0, Generation(1, 0, [0], None))
    for n in range(3):
        perform(first, step(n), n)
    late, membership = supervised(1)
    for n in range(3):
        assert late.catching_up
        assert perform(late, step(n), attempt=lambda: pytest.fail("it was done")) == (n, False)
    assert not late.catching_up
    assert membership.told == [], "it needs nobody yet"
    with pytest.raises(Dismissed):
        perform(late, step(3))


def test_a_script_that_does_something_else_than_the_others_did_is_told(supervised):
    first, _ = supervised(0, Generation(1, 0, [0], None))
    perform(first, step(0))
    late, _ = supervised(1)
    with pytest.raises(MismatchError, match="worker 1 does 'evaluate' where the other workers did 'step 0'"):
        perform(late, Operation("evaluate", 0))


def test_when_a_worker_is_lost_the_operation_is_tried_again_in_the_next_generation(supervised):
    def announced(generation):
        supervised.table.failure = None

    ledger, membership = supervised(0, Generation(1, 0, [0, 1], None), Generation(2, 9, [0], None), before=announced)
    ledger.holder = holder = Holder()
    gone_after(supervised.table, "step 0")
    assert perform(ledger, step(0), 7) == (7, True)
    assert holder.did == [("begin", 0), "recover", "abandon", ("begin", 0), "recover"]
    assert [event for event in membership.told if "waits" in event] == [{"waits": 0}, {"waits": 1}]
    assert {"committed": 0} in membership.told
    assert ledger.journal.committed == 1


def test_an_operation_that_is_committed_counts_even_if_a_worker_is_lost_before_everyone_knows(supervised):
    """The others wait in vain for the word that it is committed; what they did counts all the same."""
    ledger, _ = supervised(0, Generation(1, 0, [0, 1], None))
    ledger.holder = holder = Holder()

    gone_after(supervised.table, "step 0: committed")
    assert perform(ledger, step(0), attempt=lambda: Entry("step 0", 5)) == (5, True)
    assert "abandon" not in holder.did
    assert ledger.group.left


def test_without_a_supervisor_a_failure_is_raised_and_what_was_tried_is_given_up(new_segment):
    mine, theirs = (Ledger(group) for group in groups(new_segment(2), 2))
    mine.holder = holder = Holder()
    theirs.group.fail("a bad day")
    with pytest.raises(PeerError, match="a bad day"):
        perform(mine, step(0))
    assert holder.did == [("begin", 0), "abandon"]
    assert mine.journal.committed == 0


def test_an_error_of_the_operation_itself_is_the_scripts(new_segment):
    (ledger,) = (Ledger(group) for group in groups(new_segment(1), 1))
    ledger.holder = holder = Holder()

    def attempt():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        perform(ledger, step(0), attempt=attempt)
    assert holder.did == [("begin", 0), "abandon"]
    assert perform(ledger, step(0), 3) == (3, True), "it can be tried again"


def test_what_the_supervisor_asks_for_is_seen_alike_by_all_and_a_regroup_is_left_for(new_segment):
    ledgers = [Ledger(group) for group in groups(new_segment(3), 3)]
    board = ledgers[0].group.board
    board.ask(Asks.CHECKPOINT, 2)
    together(ledgers, lambda ledger: perform(ledger, step(0)))
    assert [ledger.asked for ledger in ledgers] == [(0, 2, 0)] * 3
    board.ask(Asks.REGROUP, 2)
    together(ledgers, lambda ledger: perform(ledger, step(1)))
    assert [ledger.group.left for ledger in ledgers] == [True] * 3


class TwoMachines(FakeMembership):
    """Workers 0 and 1 on one machine, worker 2 on another."""

    elastic = False
    first = Generation(1, 0, [0, 1, 2], None, machines=[0, 0, 1])


def over_machines(segments):
    table = Table()
    ledgers = [
        Ledger(Group(segments[machine], FakeRounds(table, worker), TwoMachines()))
        for worker, machine in enumerate((0, 0, 1))
    ]
    return table, ledgers


def shared(ledger, number):
    def attempt():
        given = ledger.share(f"step {number}: update", ledger.group.worker)
        return Entry(f"step {number}", given)

    return perform(ledger, step(number), attempt=attempt)


def test_over_machines_a_step_that_all_have_shared_needs_no_other_exchange_between_them(new_segment):
    here, there = new_segment(3), new_segment(3)
    table, ledgers = over_machines([here, there])
    ledgers[2].group.board.ask(Asks.CHECKPOINT, 2)
    assert together(ledgers, lambda ledger: [shared(ledger, n) for n in range(3)]) == [[([0, 1, 2], True)] * 3] * 3
    assert [ledger.asked for ledger in ledgers] == [(0, 2, 0)] * 3, "though one machine alone had heard of it"
    assert [ledgers[worker].journal.committed for worker in (0, 2)] == [3, 3]
    assert [among for _, among in said(ledgers[0], table, "step 2")] == [(0, 1, 2), [0, 1]]


def said(ledger, table, kind):
    """What a worker has posted in a step, and to whom."""
    tags = [tag for (worker, _), (tag, _) in sorted(table.posts.items()) if worker == ledger.group.worker]
    return [(tag, among) for tag, among in zip(tags, ledger.group._rounds.among, strict=True) if kind in tag]


def test_a_worker_goes_on_when_its_own_machine_has_counted(new_segment):
    here, there = new_segment(3), new_segment(3)
    _, ledgers = over_machines([here, there])
    count = ledgers[0]._count
    over = [threading.Event() for _ in ledgers]

    def later(entry):
        assert over[2].wait(30.0), "the other machine need not wait"
        assert not over[1].wait(0.05), "a worker of this one does"
        count(entry)

    ledgers[0]._count = later

    def body(ledger):
        found = shared(ledger, 0)
        over[ledger.group.worker].set()
        return found

    assert together(ledgers, body) == [([0, 1, 2], True)] * 3


def test_only_a_step_is_watched_by_the_clock(new_segment):
    (ledger,) = (Ledger(group) for group in groups(new_segment(1), 1))
    seen = []

    def attempt():
        seen.append(ledger.group.board.doing(0).busy_s is not None)
        return Entry("x")

    for operation in (Operation("x", 0), Operation("x", 0, is_step=True)):
        perform(ledger, operation, attempt=attempt)
    assert seen == [False, True]
    assert ledger.group.board.doing(0).busy_s is None


def test_a_prelude_is_an_operation_before_the_next(new_segment):
    (ledger,) = (Ledger(group) for group in groups(new_segment(1), 1))
    ledger.prelude = lambda: perform(ledger, Operation("restore", 0), "first")
    perform(ledger, step(0), "second")
    assert [ledger.journal.read(n).value for n in range(2)] == ["first", "second"]
    assert ledger.prelude is None
